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


class LossPass:
    """One micro-batch's way through TRL's loss: evaluates the policy on the old policy's support, projects it, and
    keeps what the terms around TRL's surrogate need."""

    def __init__(self, old: SparseDistribution, kl_bound: float, mask: torch.Tensor):
        self.old, self.kl_bound = old, kl_bound  # (B, C, K)
        self.dead = ~mask.bool()  # (B, C)

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are those of the projected policy."""

        def projected_policy(**model_inputs):
            output = model(**model_inputs, token_ids=self.old.token_ids, check_finite=False)
            policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
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
            log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return what_trl_reads(output, log_probs)

        return projected_policy


def what_trl_reads(output, log_probs: torch.Tensor) -> SparseCausalLMOutput:
    """Without supports and sparse log-probabilities, which TRL would hold through its loss."""
    return SparseCausalLMOutput(log_probs=log_probs, entropy=output.entropy, aux_loss=output.aux_loss)
