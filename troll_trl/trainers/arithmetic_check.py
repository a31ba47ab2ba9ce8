"""check_arithmetic(): at the first loss, compares the arithmetic that we copied from TRL with TRL's own."""

from collections import defaultdict
from typing import Any

import torch

from troll_trl.trainers.trl_compat import METHOD, unsupported

_TOLERANCE = 1e-4  # of the largest gradient; both are computed in float32


@torch.enable_grad()
def check_arithmetic(trainer: Any, inputs: dict[str, Any], mode: str) -> None:
    """
    Raise a `RuntimeError` on every rank if TRL's loss averages over tokens, or adds the reference KL, in another way
    than `trainer._aggregate` and `trainer._reference_term`.

    TRL's own `compute_loss` runs once more, without the model. It gets the micro-batch `inputs`, with made-up masks,
    advantages and log-probabilities `(B, C)`. The ratio is 1, the entropy, the MoE loss and every correction are
    neutral, so nothing but our two terms acts. Both losses must have the same gradient in the log-probabilities. One
    that is wrong by a factor shows, whatever the loss type, the accumulation and the number of ranks.

    The loss runs on a copy of the trainer's attributes, whose metrics and entropy control nobody reads, and without
    what a subclass or an instance overrides.
    """
    mask = inputs["completion_mask"]
    rows, columns = mask.shape
    row, column = torch.arange(rows, device=mask.device).unsqueeze(1), torch.arange(columns, device=mask.device)
    live = column < 1 + (row + (columns - 1) // 2) % columns  # (B, C): completions of several lengths
    log_probs = (-1 - 0.5 * torch.sin(1.0 + row + column)).requires_grad_()
    fixed = log_probs.detach()
    advantages = 1 + row.squeeze(1) / rows  # positive: the off-policy mask keeps the completion
    given = {
        "completion_mask": live.to(mask.dtype),
        "advantages": advantages,
        "old_per_token_logps": fixed,
        "old_logps": (fixed * live).sum(1),
        "ref_per_token_logps": fixed + 0.3 * torch.cos(row + 2.0 * column),
        "sampling_per_token_logps": fixed,
        "importance_sampling_ratio": torch.ones_like(fixed),
    }
    inputs = {name: value for name, value in inputs.items() if name != "tool_mask"} | given

    ours = trainer._aggregate(-advantages.unsqueeze(1) * log_probs, live, inputs, mode)
    ours = ours + trainer._reference_term(log_probs, live, inputs, mode)
    (expected,) = torch.autograd.grad(ours, log_probs)
    trl_trainer = next(cls for cls in type(trainer).__mro__ if cls in METHOD)
    neutral = (log_probs, torch.zeros_like(fixed), fixed.new_zeros(()))  # log-probabilities, entropies, MoE loss
    stub = {"_get_per_token_logps_and_entropies": lambda self, *args, **kwargs: neutral}
    probe: Any = object.__new__(type(trl_trainer.__name__, (trl_trainer,), stub))
    for name, value in vars(trainer).items():
        if not hasattr(trl_trainer, name):
            counts = isinstance(value, dict) and value.keys() == {"train", "eval"}  # metrics, whatever their name
            setattr(probe, name, {name: defaultdict(list) for name in value} if counts else value)
    (actual,) = torch.autograd.grad(probe.compute_loss(trainer.model, inputs), log_probs)
    difference, largest = (actual - expected).abs().max(), expected.abs().max()
    equal = difference <= _TOLERANCE * largest  # NaN is not
    if not trainer.accelerator.gather(equal.unsqueeze(0)).all():
        raise RuntimeError(
            unsupported(
                trl_trainer,
                f"`{trl_trainer.__name__}`'s loss averages over tokens, or adds the reference KL, in another way than "
                f"troll_trl's copy. Its gradient is {actual.flatten()[0]:.3g} where troll_trl's is "
                f"{expected.flatten()[0]:.3g} (the largest difference is {difference:.3g})",
            )
        )
