"""What FSDP2 would do to log-probabilities."""

from dataclasses import replace

from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecisionPolicy


def keep_output_dtypes(accelerator: Accelerator) -> None:
    """
    Have FSDP2 return what a model returns, in its dtype; before any model is prepared.

    With mixed precision accelerate makes a policy whose `output_dtype` is that of the parameters, and FSDP2 then casts
    every output of the model to it. The sparse head computes float32 log-probabilities, from bfloat16 hidden states
    too. Rounded to bfloat16, that of an unlikely token is off by up to 0.03, and the ratio of a small step is noise.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)
