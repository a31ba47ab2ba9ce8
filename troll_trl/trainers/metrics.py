"""TrollMetrics: what the projection did since the last log line, exact over all tokens and ranks."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator

from troll_trl.kernels.dispatch import has_float64
from troll_trl.trust_region.projection import Projection
from troll_trl.trust_region.sparse import SparseDistribution

# In this order; only the first two count in an idle run
_SUMS = ("micro_batches", "tokens", "projected", "policy_kl", "kl", "eta", "regression", "support_size", "rest_mass")
_MAXIMA = ("policy_kl", "kl")


class TrollMetrics:
    """
    Accumulates sums, counts and maxima on the device, and reduces them over ranks when a line is logged.

    TRL averages the averages of its micro-batches; these are averages over tokens. Every rank reports the same keys,
    whatever its own batches held.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._sums, self._maxima = self._zeros()

    def add(
        self, mask: torch.Tensor, projection: Projection, regression: torch.Tensor, old: SparseDistribution
    ) -> None:
        """
        Count one micro-batch.

        Args:
            mask (`torch.Tensor` of shape `(B, C)`):
                1 for the tokens that the loss is over.
            projection ([`Projection`]), regression (`torch.Tensor` of shape `(B, C)`), old ([`SparseDistribution`]):
                The micro-batch's projection, KL(p ‖ π) and old policy.
        """
        mask = mask.bool()
        values = {
            "tokens": torch.ones_like(projection.kl),
            "projected": projection.eta > 0,
            "policy_kl": projection.policy_kl,
            "kl": projection.kl,
            "eta": projection.eta,
            "regression": regression.detach(),
            "support_size": old.support_size,
            "rest_mass": old.rest_mass,
        }
        # `where` and not an index, which would wait for the device
        values = {name: torch.where(mask, x.to(self._sums.dtype), 0.0) for name, x in values.items()}
        self._sums[0] += 1
        self._sums[1:] += torch.stack([values[name].sum() for name in _SUMS[1:]])
        self._maxima = self._maxima.maximum(torch.stack([values[name].amax() for name in _MAXIMA]))

    def add_idle(self, mask: torch.Tensor) -> None:
        """Count a micro-batch `(B, C)` of an idle run: policy and old policy are equal, so all but tokens is 0."""
        self._sums[0] += 1
        self._sums[1] += mask.sum()

    def state_dict(self) -> dict[str, list[float]]:
        """What this rank has counted since the last [`pop`]."""
        return {"sums": self._sums.tolist(), "maxima": self._maxima.tolist()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Go on from what [`state_dict`] gave."""
        self._sums, self._maxima = self._sums.new_tensor(state["sums"]), self._maxima.new_tensor(state["maxima"])

    def pop(self) -> Mapping[str, float]:
        """Metrics since the last call, the same on all ranks; empty when no micro-batch was counted on any of them."""
        sums = dict(zip(_SUMS, self.accelerator.reduce(self._sums, reduction="sum").tolist(), strict=True))
        largest = self.accelerator.gather(self._maxima.unsqueeze(0)).amax(0)  # over ranks
        maxima = dict(zip(_MAXIMA, largest.tolist(), strict=True))
        self._sums, self._maxima = self._zeros()
        if sums["micro_batches"] == 0:
            return {}
        tokens, projected = max(sums["tokens"], 1), max(sums["projected"], 1)
        return {
            "troll/projected_fraction": sums["projected"] / tokens,
            "troll/policy_kl_mean": sums["policy_kl"] / tokens,
            "troll/policy_kl_max": maxima["policy_kl"],
            "troll/kl_mean": sums["kl"] / tokens,
            "troll/kl_max": maxima["kl"],
            "troll/eta_mean": sums["eta"] / projected,
            "troll/regression": sums["regression"] / tokens,
            "troll/support_size_mean": sums["support_size"] / tokens,
            "troll/rest_mass_mean": sums["rest_mass"] / tokens,
        }

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        # float64: a count of tokens outgrows float32 within one line of a large run
        device = self.accelerator.device
        dtype = torch.float64 if has_float64(device) else torch.float32
        sums, maxima = (torch.zeros(len(names), dtype=dtype, device=device) for names in (_SUMS, _MAXIMA))
        return sums, maxima
