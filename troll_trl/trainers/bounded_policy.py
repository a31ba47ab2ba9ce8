"""BoundedPolicy: in TRL's loss, takes the place of the policy."""

from collections.abc import Callable

import torch

from troll_trl.lm_head.patch import SparseCausalLMOutput
from troll_trl.trust_region.penalty import ROUNDING
from troll_trl.trust_region.regions import Bounded
from troll_trl.trust_region.sparse import keep_nothing


def equal_to_rounding(log_probs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """
    `log_probs` `(B, C)`, equal to `others` `(B, C)` wherever the two differ by no more than their rounding.

    A reference model with the policy's weights has its log-probabilities, but scored in another pass they differ in
    the last digits. Taken for a step away from the reference, that would be the only gradient of a batch without a
    learning signal, and Adam would scale it up to full steps.
    """
    same = (log_probs - others).abs() <= ROUNDING * others.abs().clamp(min=1)
    return torch.where(same, others, log_probs)


class BoundedPolicy:
    """
    Takes the place of the policy in TRL's loss of one micro-batch: evaluates the policy on the old policy's support,
    bounds it, and keeps what the terms around TRL's surrogate need: `bounded`, and `policy_log_probs` `(B, C)`,
    `log p(a)`.

    `old` `(B, C, S)` has log-probabilities of the old policy on its support `token_ids` `(B, C, K)` and the rest; or,
    without a support, of the sampled token, `S = 1`. `live` `(B, C)`, bool, are the tokens that the loss is over, and
    `advantages` is `(B, 1)` or `(B, C)`.
    """

    def __init__(
        self,
        trust_region: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Bounded],
        old: torch.Tensor,
        token_ids: torch.Tensor | None,
        live: torch.Tensor,
        advantages: torch.Tensor,
    ):
        self.trust_region, self.old, self.token_ids, self.advantages = trust_region, old, token_ids, advantages
        self.dead = ~live.bool()

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are what the trust region makes of the policy."""

        def bounded_policy(**model_inputs):
            if self.token_ids is None:  # TRL's own head
                output = model(**model_inputs)
                policy = output.log_probs[:, -completion_length:].unsqueeze(-1)  # (B, C, 1)
            else:
                output = model(**model_inputs, token_ids=self.token_ids, check_finite=False)
                policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
            if policy.dtype != torch.float32:
                raise TypeError(
                    f"The model's log-probabilities are {policy.dtype}, not float32: a wrapper of the model casts its "
                    "outputs. The trust region would take their rounding for steps of the policy. Make the wrapper "
                    "keep the dtype."
                )
            # What takes no part in the loss enters no exp. Nor does NaN, which `project` would refuse, on one rank
            # while the others wait: the guard has counted it, and the update will be skipped.
            dead = self.dead | self.old.isnan().any(-1) | policy.detach().isnan().any(-1)
            self.policy_log_probs = output.log_probs[:, -completion_length:].masked_fill(dead, 0.0)  # (B, C)
            policy, old = keep_nothing(policy, dead), keep_nothing(self.old, dead)
            self.bounded = self.trust_region(policy, old, self.advantages)
            # Dead positions have all their mass in the rest, and −∞ for a sampled token
            sampled = self.bounded.log_probs.masked_fill(dead, 0.0)
            log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return without_supports(output, log_probs)

        return bounded_policy


def without_supports(output, log_probs: torch.Tensor) -> SparseCausalLMOutput:
    """An output for TRL, without supports and sparse log-probabilities, which TRL would hold through its loss."""
    return SparseCausalLMOutput(log_probs=log_probs, entropy=output.entropy, aux_loss=output.aux_loss)
