"""What makes many short runs cheap."""

import functools
import gc
import importlib.metadata

import torch

from tests.kernels.interpreter import round_as_a_gpu
from troll_trl.kernels.dispatch import INTERPRETED

torch.set_num_threads(1)  # as under `make`: some tests compare with a process of one thread, bit for bit
if INTERPRETED:
    round_as_a_gpu()

# accelerate asks some 45 times in a short run whether peft and others are installed, a millisecond of the disk each
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def pytest_collection_finish():
    """Every training begins with `gc.collect()`. A third of a short run's time went into what imports had left: from
    here on the collector skips it."""
    gc.collect()
    gc.freeze()
