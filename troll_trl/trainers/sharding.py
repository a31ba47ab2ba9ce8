"""Keeps FSDP2 from rounding log-probabilities, and from leaving weights in a form that vLLM cannot take."""

from dataclasses import replace

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def keep_output_dtypes(accelerator: Accelerator) -> None:
    """
    Have FSDP2 return the outputs of a model in their own dtype. Call this before any model is prepared.

    With mixed precision, accelerate sets `output_dtype` to the dtype of the parameters, and FSDP2 then casts every
    output of the model to this dtype. The sparse head computes float32 log-probabilities, even from bfloat16 hidden
    states. Rounded to bfloat16, the log-probability of an unlikely token is off by up to 0.03, and small ratios are
    noise.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def reshard(model: torch.nn.Module) -> None:
    """
    Shard the weights again after a forward pass without gradient. Call this before vLLM loads the weights.

    Such a forward pass leaves the outermost group of FSDP2 unsharded, and only a backward pass shards it again. TRL
    calls `full_tensor()` of every parameter, which an unsharded parameter does not have. With vLLM's sleep mode, which
    loads the weights for each generation, an evaluation failed at its second batch.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
