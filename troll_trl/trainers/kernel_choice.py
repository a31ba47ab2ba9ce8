"""At a trainer's start: adds the sparse LM head, and checks its Triton kernels. All ranks run them, or none does."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from troll_trl.kernels.dispatch import INTERPRETED, kernels_mode, use_torch_alone, use_triton
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.lm_head.kernel_check import Case, self_check
from troll_trl.lm_head.patch import logit_transform

logger = get_logger(__name__)


def add_head(accelerator: Accelerator, model: PreTrainedModel, args: Any) -> int:
    """Add the sparse LM head that a trainer's `args` ask for. Returns the support size, at most the vocabulary."""
    support_size = min(args.support_size, model.config.get_text_config().vocab_size)
    select_kernel_backend(accelerator, case_of_run(model, args, support_size))
    # Not every config of TRL's has `cast_lm_head_to_fp32`
    add_sparse_lm_head(model, args.temperature, getattr(args, "cast_lm_head_to_fp32", False))
    return support_size


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


def select_kernel_backend(accelerator: Accelerator, run: Case | None = None) -> None:
    """Check the kernels. If any kernel fails on any rank, all ranks run the PyTorch fallbacks. Every rank must call
    this. If `TROLL_KERNELS=triton` asks for the kernels, a failure is a `RuntimeError`."""
    kernels_mode()  # an unknown mode is refused on a CPU, too
    use_torch_alone(False)  # a trainer before this one in the process may have met another device
    device = torch.device(accelerator.device)
    if not use_triton(device) or INTERPRETED:
        return
    failed = [check for check in self_check(device, run) if not check.ok]
    if accelerator.gather(torch.tensor([len(failed)], device=device)).sum().item() == 0:
        return
    said = "; ".join(map(str, failed)) or "on another rank"
    message = (
        f"Triton kernels of troll_trl fail on this device: {said}. Unless `TROLL_KERNELS=triton` is set, all ranks run "
        "their torch versions, slower and with more memory, and log `troll/torch_kernels`. Please report this, with "
        "the versions of torch, Triton and the driver."
    )
    if kernels_mode() == "triton":
        raise RuntimeError(message)
    logger.warning(message, main_process_only=not failed)
    use_torch_alone()
