"""LossPass: one micro-batch's way through TRL's loss, with the projected policy in place of the policy."""

import torch

from troll_trl.lm_head.patch import SparseCausalLMOutput
from troll_trl.trust_region.projection import kl_divergence, project
from troll_trl.trust_region.sparse import SparseDistribution, keep_nothing

# Largest difference, for each unit of a log-probability, that two float32 evaluations of the same weights make in a
# log-sum-exp over a vocabulary: some 2⁻²⁰ is seen.
_ROUNDING = 2**-17


def equal_to_rounding(log_probs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """
    `log_probs` `(B, C)`, equal to `others` `(B, C)` wherever the two differ by no more than their rounding.

    A reference model with the policy's weights has its log-probabilities, but scored in another pass they differ in
    the last digits. Taken for a step away from the reference, that would be the only gradient of a batch without a
    learning signal, and Adam would scale it up to full steps.
    """
    same = (log_probs - others).abs() <= _ROUNDING * others.abs().clamp(min=1)
    return torch.where(same, others, log_probs)


def smaller_surrogate(projected: torch.Tensor, policy: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """
    Of `log π(a)` and `log p(a)` `(B, C)` the one with the smaller surrogate, `ratio · advantage`, as PPO takes the
    smaller of the clipped and the free (arXiv 1707.06347, equation 7). `advantages` is `(B, 1)` or `(B, C)`.

    They differ outside of the bound alone, where π(a) lies, but for the normaliser, between q(a) and p(a): a token that
    has moved with its advantage is projected, and one that has moved against it keeps its whole gradient, which leads
    back. Token by token, also where the ratio is a completion's.
    """
    return torch.where(advantages > 0, torch.minimum(projected, policy), torch.maximum(projected, policy))


class LossPass:
    """One micro-batch's way through TRL's loss: evaluates the policy on the old policy's support, projects it, and
    keeps what the terms around TRL's surrogate need."""

    def __init__(
        self, old: SparseDistribution, kl_bound: float, mask: torch.Tensor, advantages: torch.Tensor | None = None
    ):
        """With `advantages` `(B, 1)` or `(B, C)` the surrogate is the smaller of two; see [`smaller_surrogate`]."""
        self.old, self.kl_bound, self.advantages = old, kl_bound, advantages  # (B, C, K)
        self.dead = ~mask.bool()  # (B, C)

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are those of the projected policy."""

        def projected_policy(**model_inputs):
            output = model(**model_inputs, token_ids=self.old.token_ids, check_finite=False)
            policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
            if policy.dtype != torch.float32:
                raise TypeError(
                    f"The model's log-probabilities are {policy.dtype}, not float32: what wraps the model casts its "
                    "outputs, and TROLL would take their rounding for steps of the policy. Have it keep their dtype."
                )
            # What takes no part in the loss enters no exp. Nor does NaN, which `project` would refuse, on one rank
            # while the others wait: `nonfinite` has counted it, and the update will be skipped.
            dead = self.dead | self.old.log_probs.isnan().any(-1) | policy.detach().isnan().any(-1)
            self.old = SparseDistribution(self.old.token_ids, keep_nothing(self.old.log_probs, dead))
            policy = keep_nothing(policy, dead)
            self.policy_log_probs = output.log_probs[:, -completion_length:].masked_fill(dead, 0.0)  # (B, C)
            self.projection = project(policy, self.old.log_probs, self.kl_bound)
            # Inside the bound π is p, and the term is 0. Computed, its gradient p·(1 − Σp) is only the rounding of Σp,
            # which Adam scales up to full steps where there is no other gradient.
            regression = kl_divergence(policy, self.projection.log_probs.detach())
            self.regression = regression.masked_fill(self.projection.eta == 0, 0.0)  # (B, C)
            # Dead positions have all their mass in the rest, and −∞ for a sampled token
            sampled = self.projection.log_probs[..., 0].masked_fill(dead, 0.0)
            if self.advantages is not None:
                sampled = smaller_surrogate(sampled, self.policy_log_probs, self.advantages)
            log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return what_trl_reads(output, log_probs)

        return projected_policy


def what_trl_reads(output, log_probs: torch.Tensor) -> SparseCausalLMOutput:
    """Without supports and sparse log-probabilities, which TRL would hold through its loss."""
    return SparseCausalLMOutput(log_probs=log_probs, entropy=output.entropy, aux_loss=output.aux_loss)
