"""LossInputs: the copy of a micro-batch that TRL's loss reads, and the mathematics of its changes."""

from typing import Any

import torch

from troll_trl.trust_region.penalty import ROUNDING

LOWEST_LOG_RATIO = -40.0  # far below this, the regression divided by the ratio overflows float32
_NEWTON_STEPS = 4  # from the first guess of `rescale_kl` to float32's digits


class LossInputs(dict):
    """A copy of a micro-batch for TRL's loss. [`~troll_trl.trainers.troll_trainer.TrollTrainer`] changes the copy when
    TRL scores the policy, and then checks what the loss has `read`."""

    def __init__(self, inputs: dict[str, Any]):
        super().__init__(inputs)
        self.mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()  # (B, C), tokens of the loss
        # Columns and the policy's log-probabilities, with harmless values at masked positions and no other change.
        # Empty until TRL has scored the policy
        self.masked: dict[str, torch.Tensor] = {}
        self.read: set[str] = set()  # since TRL has scored the policy

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def ignore_rounding(ref_logps: torch.Tensor, policy_logps: torch.Tensor) -> torch.Tensor:
    """
    Return `ref_logps` `(B, C)`, replaced by `policy_logps` `(B, C)` wherever the two differ only by rounding.

    With the same weights, two passes differ in the last digits. If the loss treated this difference as a step away from
    the reference model, it would give the only gradient of a batch without a learning signal, and Adam would scale that
    gradient up to full steps.
    """
    same = (ref_logps - policy_logps).abs() <= ROUNDING * policy_logps.abs().clamp(min=1)
    return torch.where(same, policy_logps, ref_logps)


def rescale_kl(log_ref_ratio: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """
    Return `d'` `(B, C)` with `k(d') = exp(log_scale)·k(d)`, for TRL's estimate `k(d) = exp(d) − d − 1` of the reference
    KL, `d = log_ref_ratio` `(B, C)` and `log_scale` `(B, C)` or `(B, 1)`.

    `d'` has the sign of `d`. Newton's method starts beyond the solution on that side, where it cannot overshoot. By the
    implicit function theorem, the gradient is `∇d' = ∇(exp(log_scale)·k(d)) / (exp(d') − 1)`.
    """
    kl = (log_ref_ratio.expm1() - log_ref_ratio) * log_scale.exp()
    with torch.no_grad():
        target = kl.clamp(min=0)  # rounding
        beyond = target + (2 * target).sqrt()
        solution = torch.where(log_ref_ratio > 0, beyond.log1p(), -beyond)
        for _ in range(_NEWTON_STEPS):
            slope = solution.expm1()
            solution = solution - (slope - solution - target) / torch.where(slope == 0, 1.0, slope)
        slope = solution.expm1()
    gradient = torch.where(slope == 0, 0.0, (kl - kl.detach()) / torch.where(slope == 0, 1.0, slope))
    # With equal ratios, TRL's estimate is already right, and Newton's rounding would only disturb it
    return torch.where(log_scale == 0, log_ref_ratio, solution + gradient)
