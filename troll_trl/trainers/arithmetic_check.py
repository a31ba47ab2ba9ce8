"""
check_arithmetic(): at the first loss, compares TRL's loss with the loss that our trainers build on.

We copy two terms from TRL: the average over tokens and the reference KL. We also run TRL's loss in a state of ours:
`beta` is 0, the clip range is infinite unless the trust region `clips`, and the ratio may be far from 1. Names cannot
show that TRL's loss still reads this state from where we set it.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from troll_trl.trainers.probe import owner_of, probe_of
from troll_trl.trainers.trl_compat import unsupported

TOLERANCE = 1e-4  # relative, of each gradient; both losses are float32
SIGNS = (1, -1)


@torch.enable_grad()
def check_arithmetic(trainer: Any, inputs: dict[str, Any], mode: str) -> None:
    """
    Raise a `RuntimeError` on every rank unless TRL's loss is the surrogate plus `beta` times `trainer._reference_kl`,
    averaged as `trainer._aggregate` does.

    TRL's own `compute_loss` runs again, without the model. It gets the micro-batch `inputs` with made-up masks,
    advantages and log-probabilities `(B, C)`. Entropies and the MoE loss are 0, and vLLM's correction is 1. Both losses
    must have the same gradient in the log-probabilities, for both signs of advantages and log-ratios: with `beta` 0, as
    the loss runs, and with the run's `beta`. The off-policy mask is made up as well, and TRL must ask `self` for it.

    The loss runs on a copy of the trainer's attributes, whose metrics and entropy control nobody reads, and without
    what a subclass or an instance overrides.
    """
    owner = owner_of(trainer)
    refuse_if_any(trainer, owner, _faults(trainer, owner, inputs, mode))


def refuse_if_any(trainer: Any, owner: type, faults: Iterator[str]) -> None:
    """Raise a `RuntimeError` on every rank if the loss of TRL's class `owner` has `faults` on any, or if looking for
    them raises."""
    try:
        found = [*faults]
    except Exception as error:  # TRL's loss or our copy of it asks for a name that has moved
        what = f"`{owner.__name__}`'s loss cannot be compared with troll_trl's copy: {type(error).__name__}: {error}"
        raise RuntimeError(unsupported(owner, what)) from error
    if trainer.accelerator.gather(torch.tensor([bool(found)], device=trainer.accelerator.device)).any():
        fault = found[0] if found else "Another rank has the numbers"
        raise RuntimeError(
            unsupported(
                owner,
                f"`{owner.__name__}`'s loss averages over tokens, adds the reference KL, or reads ratio, clip range or "
                f"off-policy mask in another way than troll_trl expects. {fault}",
            )
        )


def fault_in(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor, case: str) -> str | None:
    """A sentence on the gradients `(…)` of TRL's loss and of ours if they differ by more than rounding. `scale` `(…)`
    has the size of the terms of the sum that `expected` is."""
    difference = (actual - expected).abs()
    limit = TOLERANCE * (scale + TOLERANCE * scale.max())
    if (difference <= limit).all():  # NaN is not
        return None
    worst = (difference / limit.clamp(min=torch.finfo(limit.dtype).tiny)).nan_to_num(math.inf).argmax()
    values = f"{actual.flatten()[worst]:.3g} where troll_trl expects {expected.flatten()[worst]:.3g}"
    return f"Its gradient in a log-probability is {values}, {case}"


def log_ratios(trainer: Any, number: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Made-up log-ratios of the shape of `number`, which counts the tokens; they are positive where `up` is true. Their
    sizes alternate: beyond any clip, just beyond the run's clip, so large that only a guard against overflow should
    act, and just within the clip."""
    ends = _size(1 + trainer.epsilon_high), _size(1 - trainer.epsilon_low)  # infinite unless the trust region clips
    above, below = (torch.tensor([3.0, 1.1 * end, 9.0, 0.9 * end], device=number.device)[number % 4] for end in ends)
    return torch.where(up, above, -below)


def _size(ratio: float) -> float:
    """The size of the logarithm of one end of a clip range, limited to sizes at which rounding decides nothing."""
    return min(max(abs(math.log(ratio)), 0.01), 10.0) if 0 < ratio < math.inf else 0.5


def slope(trainer: Any, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The derivative of `min(r·A, clip(r)·A)` by the log-ratio: `r·A` where the clip does not act. Log-ratios and
    advantages broadcast. GRPO's `delta` is the largest ratio of a penalty's two-sided clip."""
    ratio, highest, lowest = log_ratio.exp(), 1 + trainer.epsilon_high, 1 - trainer.epsilon_low
    delta = getattr(trainer.args, "delta", None)
    delta = math.inf if delta is None else delta
    gains = ratio <= min(highest, delta)
    loses = (ratio >= lowest) & (ratio <= max(highest, delta))
    return (ratio * advantages).masked_fill(~torch.where(advantages > 0, gains, loses), 0.0)


def _faults(trainer: Any, owner: type, inputs: dict[str, Any], mode: str) -> Iterator[str]:
    """The sentences of [`fault_in`] on each case."""
    inputs = _widened(inputs, getattr(trainer.args, "max_completion_length", None))
    rows, columns = inputs["completion_mask"].shape
    device = inputs["completion_mask"].device
    row, column = torch.arange(rows, device=device).unsqueeze(1), torch.arange(columns, device=device)
    loss_mask = column < 1 + (row + (columns - 1) // 2) % columns  # (B, C): completions of several lengths
    # The log-probabilities are so small that sums over a completion lose nothing to rounding
    log_probs = ((-1 - 0.5 * torch.sin(1.0 + row + column)) / columns).requires_grad_()
    threshold = getattr(trainer, "off_policy_mask_threshold", None)
    masks = [torch.ones_like(row)] if threshold is None else [row % 2, 1 - row % 2]  # (B, 1), 1 keeps a completion
    for gain, up, kept, beta in itertools.product(SIGNS, (True, False), masks, sorted({0.0, float(trainer.beta)})):
        log_ratio = log_ratios(trainer, row + column, (row % 2 == 0) == up)
        advantages = gain * (1 + row % 4 / 4)  # (B, 1)
        given = inputs | _made_up(inputs, loss_mask, log_probs.detach(), log_ratio, advantages)
        expected, reference = _expected(trainer, given, loss_mask, log_probs, log_ratio, advantages * kept, mode, beta)
        actual = _actual(trainer, owner, given, log_probs, kept, beta)
        case = (
            f"with {'positive' if gain > 0 else 'negative'} advantages, log-ratios of both signs, `beta` {beta:g} and "
            f"a clip range of ({trainer.epsilon_low:g}, {trainer.epsilon_high:g})"
        )
        if fault := fault_in(actual, expected + reference, expected.abs() + reference.abs(), case):
            yield fault


def _widened(inputs: dict[str, Any], width: int | None) -> dict[str, Any]:
    """A micro-batch with one or two more columns in every tensor of tokens, and without tools. The number of columns
    then differs from `max_completion_length`, the `width`, by which TRL may divide."""
    shape = inputs["completion_mask"].shape
    more = 2 if shape[1] + 1 == width else 1
    return {
        name: torch.cat([value, *[value[:, -1:]] * more], 1)
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape
        else value
        for name, value in inputs.items()
        if name != "tool_mask" and not name.startswith("troll_")
    }


def _made_up(
    inputs: dict[str, Any],
    loss_mask: torch.Tensor,
    fixed: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The columns that TRL's loss reads next to the policy's log-probabilities `fixed` `(B, C)`, for log-ratios `(B,
    C)` to the old policy. RLOO's log-ratio of a completion is their mean: the sum may overflow."""
    (rows, columns), device = loss_mask.shape, loss_mask.device
    angle = torch.arange(rows, device=device).unsqueeze(1) + 2.0 * torch.arange(columns, device=device)
    real = inputs["advantages"]  # (B,), or (B, 1) or (B, C) of a newer TRL
    return {
        "completion_mask": loss_mask.to(inputs["completion_mask"].dtype),
        "advantages": advantages.view(rows, *[1] * (real.dim() - 1)).expand(real.shape).to(real.dtype),
        "old_per_token_logps": fixed - log_ratio,
        "old_logps": (fixed * loss_mask).sum(1) - _mean(log_ratio, loss_mask).squeeze(1),
        "ref_per_token_logps": fixed + 0.3 + 0.2 * torch.cos(angle),
        "sampling_per_token_logps": fixed,
        "importance_sampling_ratio": torch.ones_like(fixed),
    }


def _mean(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The mean `(B, 1)` of values `(B, C)` over the tokens of `loss_mask` `(B, C)`."""
    return (values * loss_mask).sum(1, keepdim=True) / loss_mask.sum(1, keepdim=True)


def _expected(
    trainer: Any,
    inputs: dict[str, Any],
    loss_mask: torch.Tensor,
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    mode: str,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients `(B, C)` of the surrogate and of the reference term. In GSPO and RLOO, a completion's ratio gives
    each of its tokens the same slope."""
    if getattr(trainer.args, "importance_sampling_level", "sequence") == "sequence":
        log_ratio = _mean(log_ratio, loss_mask)
    surrogate = trainer._aggregate(-slope(trainer, log_ratio, advantages) * log_probs, loss_mask, inputs, mode)
    (gradient,) = torch.autograd.grad(surrogate, log_probs)
    kl = trainer._reference_kl(log_probs, loss_mask, inputs) if beta else None
    if kl is None:  # RLOO's is in the reward
        return gradient, torch.zeros_like(gradient)
    term = beta * trainer._aggregate(kl, loss_mask, inputs, mode)
    return gradient, torch.autograd.grad(term, log_probs)[0]


def _actual(
    trainer: Any, owner: type, inputs: dict[str, Any], log_probs: torch.Tensor, kept: torch.Tensor, beta: float
) -> torch.Tensor:
    """The gradient `(B, C)` of TRL's own loss in the state in which ours runs it, with this `beta`."""
    fixed = log_probs.detach()
    scored = (log_probs, torch.zeros_like(fixed), fixed.new_zeros(()))  # log-probabilities, entropies, MoE loss
    passes: list[Any] = []

    def score(self, model, *args, **kwargs):
        passes.append(model)
        return scored

    stubs: dict[str, Callable[..., Any]] = {
        "_get_per_token_logps_and_entropies": score,
        # It takes its arguments as our override does
        "get_off_policy_mask": lambda self, *, per_token_logps, **others: kept.to(inputs["completion_mask"].dtype),
    }
    probe = probe_of(trainer, owner, stubs)
    probe.beta = beta
    (gradient,) = torch.autograd.grad(probe.compute_loss(trainer.model, inputs), log_probs)
    if len(passes) != 1:  # the trust region would bound another pass, too, and overwrite the regression of the first
        raise ValueError(f"it scores the policy in {len(passes)} passes, expected 1")
    return gradient
