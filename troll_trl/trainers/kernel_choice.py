"""At a trainer's start: checks the Triton kernels on the accelerator. All ranks run them, or none does."""

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.kernels.agreement import KernelCheck, self_check
from troll_trl.kernels.dispatch import INTERPRETED, kernels_mode, use_torch_alone, use_triton

logger = get_logger(__name__)


def settle_kernels(accelerator: Accelerator) -> bool:
    """Check the kernels, and run their PyTorch fallbacks on all ranks if any kernel fails on one of them: whether that
    is so. Every rank must call this. If `TROLL_KERNELS=triton` asks for the kernels, a failure is a `RuntimeError`."""
    mode = kernels_mode()
    use_torch_alone(False)  # a trainer before this one in the process may have met another device
    if not use_triton(accelerator.device) or INTERPRETED:
        return False
    device = torch.device(accelerator.device)
    failed = [check for check in self_check(device) if not check.ok]
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
