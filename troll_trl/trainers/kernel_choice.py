"""At a trainer's start: checks the Triton kernels on the accelerator. All ranks run them, or none does."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from troll_trl.kernels.agreement import Case, KernelCheck, self_check
from troll_trl.kernels.dispatch import INTERPRETED, kernels_mode, use_torch_alone, use_triton
from troll_trl.lm_head.patch import logit_transform

logger = get_logger(__name__)


def case_of_run(model: PreTrainedModel, args: Any, support_size: int) -> Case:
    """What a run asks of the kernels: Triton compiles them anew for each of these, and a compilation may fail."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else head.weight.dtype
    if getattr(args, "cast_lm_head_to_fp32", False):
        dtype = torch.float32
    return Case(
        vocabulary=config.vocab_size,
        slots=support_size,
        dtype=dtype,
        transform=logit_transform(config, args.temperature),
        bias=getattr(head, "bias", None) is not None,
        kl_bound=args.kl_bound,
        rows=5,
        chunk=32_768,
    )


def settle_kernels(accelerator: Accelerator, run: Case | None = None) -> bool:
    """Check the kernels, and run their PyTorch fallbacks on all ranks if any kernel fails on one of them: whether that
    is so. Every rank must call this. If `TROLL_KERNELS=triton` asks for the kernels, a failure is a `RuntimeError`."""
    mode = kernels_mode()
    use_torch_alone(False)  # a trainer before this one in the process may have met another device
    if not use_triton(accelerator.device) or INTERPRETED:
        return False
    device = torch.device(accelerator.device)
    failed = [check for check in self_check(device, run) if not check.ok]
    failures = accelerator.gather(torch.tensor([len(failed)], device=device)).sum().item()
    if failures == 0:
        return False
    message = "Triton kernels of troll_trl fail on this device: " + (_describe(failed) or "on another rank") + "."
    if mode == "triton":
        raise RuntimeError(f"{message} Without `TROLL_KERNELS=triton` the run would take their torch versions.")
    logger.warning(
        f"{message} The run goes on with their torch versions on all ranks, slower and with more memory, and logs "
        "`troll/torch_kernels`. Please report this, with the versions of torch, Triton and the driver.",
        main_process_only=not failed,
    )
    use_torch_alone()
    return True


def _describe(failed: list[KernelCheck]) -> str:
    return "; ".join(
        f"{check.kernel} ({check.shapes}): "
        + (check.error or f"differs from torch's by {check.difference:.1e} of the largest entry")
        for check in failed
    )
