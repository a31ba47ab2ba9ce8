"""TrollMetrics: what the trust region did since the last log line, exact over all tokens and ranks."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator

from troll_trl.kernels.dispatch import has_float64
from troll_trl.trust_region.regions import SUPPORT_METRICS, TrustRegion


class TrollMetrics:
    """
    Accumulates sums, counts and maxima on the device, and reduces them over ranks when a line is logged. The
    [`TrustRegion`] defines the numbers for each token, and the metrics that are made from these numbers.

    TRL averages the averages of its micro-batches; these metrics are averages over tokens. Every rank reports the same
    keys, whatever its own batches contained.
    """

    def __init__(self, accelerator: Accelerator, trust_region: TrustRegion):
        self.accelerator = accelerator
        self._means = dict(trust_region.mean_metrics)
        self._largest = dict(trust_region.max_metrics)
        names = dict.fromkeys(name for pair in self._means.values() for name in pair)
        names.pop("tokens", None)
        self._names = ("micro_batches", "tokens", *names)  # only the first two count without an old policy
        self._sums, self._maxima = self._zeros()
        self._has_stats = True  # whether the last micro-batch had an old policy

    def add(self, mask: torch.Tensor, token_stats: Mapping[str, torch.Tensor] | None) -> None:
        """Add the `token_stats` `(B, C)` of one micro-batch, as a [`TrustRegionOutput`] has them, over the tokens that
        are 1 in `mask` `(B, C)`. They are `None` without an old policy: nothing has moved, so means are 0."""
        mask = mask.bool()
        self._sums[0] += 1
        self._sums[1] += mask.sum()
        self._has_stats = token_stats is not None
        if token_stats is None:
            return
        # `where`, because an index would wait for the device
        values = {name: torch.where(mask, x.detach().to(self._sums.dtype), 0.0) for name, x in token_stats.items()}
        if names := self._names[2:]:
            self._sums[2:] += torch.stack([values[name].sum() for name in names])
        if self._largest:
            largest = torch.stack([values[name].amax() for name in self._largest.values()])
            self._maxima = self._maxima.maximum(largest)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What this rank has counted since the last [`pop`]."""
        return {
            "sums": dict(zip(self._names, self._sums.tolist(), strict=True)),
            "maxima": dict(zip(self._largest, self._maxima.tolist(), strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the counts of [`state_dict`], and ignore the counts of another trust region."""
        sums, maxima = state["sums"], state["maxima"]
        self._sums = self._sums.new_tensor([sums.get(name, 0.0) for name in self._names])
        self._maxima = self._maxima.new_tensor([maxima.get(name, 0.0) for name in self._largest])

    def pop(self) -> Mapping[str, float]:
        """Return the metrics since the last call, the same on all ranks. Empty if no rank has counted a micro-batch."""
        sums = dict(zip(self._names, self.accelerator.reduce(self._sums, reduction="sum").tolist(), strict=True))
        largest = self.accelerator.gather(self._maxima.unsqueeze(0)).amax(0)  # over ranks
        self._sums, self._maxima = self._zeros()
        if sums["micro_batches"] == 0:
            return {}
        metrics = {name: sums[a] / max(sums[b], 1) for name, (a, b) in self._means.items()}
        if not self._has_stats:  # a support of 0 tokens would be wrong
            metrics = {name: value for name, value in metrics.items() if name not in SUPPORT_METRICS}
        return metrics | dict(zip(self._largest, largest.tolist(), strict=True))

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        # float64: a count of tokens outgrows float32 within one line of a large run
        device = self.accelerator.device
        dtype = torch.float64 if has_float64(device) else torch.float32
        sums, maxima = (torch.zeros(len(names), dtype=dtype, device=device) for names in (self._names, self._largest))
        return sums, maxima
