"""check_async_arithmetic(): [`check_arithmetic`] of TRL's asynchronous GRPO, which has one way to average."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from troll_trl.experimental.async_grpo.trl_compat import AsyncGRPOTrainer
from troll_trl.lm_head import SparseCausalLMOutput
from troll_trl.trainers.arithmetic_check import SIGNS, fault_in, log_ratios, refuse_if_any, slope
from troll_trl.trainers.probe import probe_of


@torch.enable_grad()
def check_async_arithmetic(trainer: Any, inputs: dict[str, Any]) -> None:
    """Raise a `RuntimeError` on every rank unless TRL's loss is the surrogate, averaged as `trainer._aggregate` does.
    It gets the micro-batch `inputs` with made-up log-probabilities and advantages of the M trained tokens."""
    refuse_if_any(trainer, AsyncGRPOTrainer, _faults(trainer, inputs))


def _faults(trainer: Any, inputs: dict[str, Any]) -> Iterator[str]:
    selected = inputs["token_index"] >= 0
    number = torch.arange(int(selected.sum()), device=selected.device)  # (M,)
    log_probs = (-1 - 0.5 * torch.sin(1.0 + number)).unsqueeze(0).requires_grad_()  # (1, M)
    fixed = log_probs.detach()
    output = SparseCausalLMOutput(log_probs=log_probs, entropy=torch.zeros_like(fixed), aux_loss=fixed.new_zeros(()))

    def column(values: torch.Tensor) -> torch.Tensor:  # (M,) -> (1, L)
        return torch.zeros(selected.shape, device=values.device).masked_scatter(selected, values)

    for gain, up in itertools.product(SIGNS, (True, False)):
        log_ratio = log_ratios(trainer, number, (number // 4 % 2 == 0) == up)
        advantages = gain * (1 + number % 4 / 4)
        given = inputs | {
            "token_index": torch.where(selected, selected.cumsum(1) - 1, -1),
            "old_log_probs": column(fixed[0] - log_ratio),
            "advantages": column(advantages),
            "global_n_tokens": 2 * inputs["global_n_tokens"] + 3,  # tokens of all ranks, unlike any count on this one
        }
        ours = trainer._aggregate(-slope(trainer, log_ratio, advantages) * log_probs, given)
        (expected,) = torch.autograd.grad(ours, log_probs)
        probe = probe_of(trainer, AsyncGRPOTrainer, {})
        (actual,) = torch.autograd.grad(probe.compute_loss(lambda **_: output, given), log_probs)
        case = f"with {'positive' if gain > 0 else 'negative'} advantages and log-ratios of both signs"
        if fault := fault_in(actual, expected, expected.abs(), case):
            yield fault
