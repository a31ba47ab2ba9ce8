"""RaggedDistribution: sparse distributions without their unused slots and masked positions, to store them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import pad

from troll_trl.trust_region.sparse import UNUSED, SparseDistribution


@dataclass
class RaggedDistribution:
    """
    The positions of [`SparseDistribution`]s that keep tokens, and their used slots. A position with k kept tokens takes
    8·k + 8 bytes.

    The numbers of a row follow the numbers of the row before it. A masked position, which keeps no token, takes 8
    bytes. Masked positions after a row's last kept token take none.

    Attributes:
        lengths (`torch.Tensor` of shape `(B,)`, int32):
            Positions of each row, up to its last one that keeps a token.
        counts (`torch.Tensor` of shape `(P,)`, int32):
            Kept tokens of each of these `P = Σ lengths` positions.
        rest (`torch.Tensor` of shape `(P,)`, float32):
            Log-probability of the rest.
        token_ids (`torch.Tensor` of shape `(S,)`, int32):
            The `S = Σ counts` kept tokens.
        log_probs (`torch.Tensor` of shape `(S,)`, float32):
            Their log-probabilities.
        width (`int`):
            Slots K of the dense form.
    """

    lengths: torch.Tensor
    counts: torch.Tensor
    rest: torch.Tensor
    token_ids: torch.Tensor
    log_probs: torch.Tensor
    width: int

    @staticmethod
    def pack(dense: SparseDistribution) -> "RaggedDistribution":
        """Pack the positions that keep a token, of a `dense` distribution of `(B, T, K)` tokens with used slots first,
        on its device. The width is the widest position's. Waits for the device."""
        used = dense.token_ids != UNUSED  # (B, T, K)
        counts = used.sum(-1, dtype=torch.int32)  # (B, T)
        steps = torch.arange(1, counts.shape[1] + 1, device=counts.device, dtype=torch.int32)
        lengths = pad(torch.where(counts > 0, steps, 0), (1, 0)).amax(1)
        rest = dense.log_probs[..., -1].masked_fill(counts == 0, 0.0)
        # Each `nonzero` waits for the device once; a boolean index would wait for every tensor
        inside = (steps <= lengths.unsqueeze(1)).nonzero(as_tuple=True)
        slots = used.nonzero(as_tuple=True)
        return RaggedDistribution(
            lengths,
            counts[inside],
            rest[inside],
            dense.token_ids[slots],
            dense.log_probs[..., :-1][slots],
            width=max(int(counts.max()), 1) if counts.numel() > 0 else 1,
        )

    @staticmethod
    def concatenate(parts: Sequence["RaggedDistribution"]) -> "RaggedDistribution":
        """The rows of all parts, one after the other, with the width of the widest part."""
        tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        return RaggedDistribution(**tensors, width=max(part.width for part in parts))

    def keep(self, mask: torch.Tensor) -> "RaggedDistribution":
        """Drop the tokens of all positions where `mask` `(B, T)`, bool, is false; the width stays. Waits for the
        device."""
        inside = torch.arange(mask.shape[1], device=mask.device) < self.lengths.unsqueeze(1)
        mask = mask[inside]  # (P,)
        kept = mask.repeat_interleave(self.counts)  # (S,)
        return RaggedDistribution(
            self.lengths,
            self.counts * mask,
            self.rest.masked_fill(~mask, 0.0),
            self.token_ids[kept],
            self.log_probs[kept],
            self.width,
        )

    def rows(self) -> list["RaggedDistribution"]:
        """Each row by itself, as a view with the width of all. Waits for the device."""
        lengths = self.lengths.tolist()
        counts, rest = self.counts.split(lengths), self.rest.split(lengths)
        kept = [int(row.sum()) for row in counts]
        columns = (self.lengths.split(1), counts, rest, self.token_ids.split(kept), self.log_probs.split(kept))
        return [RaggedDistribution(*row, width=self.width) for row in zip(*columns, strict=True)]

    def dense(self, sampled_ids: torch.Tensor) -> SparseDistribution:
        """
        The dense form `(B, T, K)`, on the device of the numbers and without waiting for it. A position that was kept
        equals the packed one, bit for bit. At the others, all mass is in the rest.

        `sampled_ids` `(B, T)`, integer, are the sampled tokens; −1 for none. The sparse head needs them in slot 0, also
        at positions that keep nothing.
        """
        shape = sampled_ids.shape
        positions = _places(self.lengths, shape[1]).flatten()  # (B·T,)
        counts = pad(self.counts, (1, 0)).index_select(0, positions)
        slots = _places(counts, self.width).flatten()  # (B·T·K,)
        token_ids = pad(self.token_ids, (1, 0), value=UNUSED).index_select(0, slots).view(*shape, self.width)
        sampled = torch.where(counts.view(shape) == 0, sampled_ids.int(), token_ids[..., 0])
        token_ids[..., 0] = sampled
        kept = pad(self.log_probs, (1, 0), value=-math.inf).index_select(0, slots).view(*shape, self.width)
        rest = pad(self.rest, (1, 0)).index_select(0, positions).view(*shape, 1)
        return SparseDistribution(token_ids, torch.cat([kept, rest], -1))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, by attribute."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "width"}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RaggedDistribution":
        """Copy to `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def to_host_of(self, device: torch.device) -> "RaggedDistribution":
        """Copy to host memory: for a GPU to pinned memory, from which it copies while the host continues."""
        host = self.to("cpu")
        return host._each(torch.Tensor.pin_memory) if device.type == "cuda" else host

    def _each(self, change) -> "RaggedDistribution":
        return RaggedDistribution(**{name: change(tensor) for name, tensor in self.tensors.items()}, width=self.width)


def _places(counts: torch.Tensor, width: int) -> torch.Tensor:
    """The places `(n, width)` int32, counted from 1, of the numbers of n runs in the array of all runs; 0, where
    [`RaggedDistribution.dense`] puts a filler, after the end of a run."""
    steps = torch.arange(width, device=counts.device, dtype=torch.int32)
    first = counts.cumsum(0, dtype=torch.int32) - counts + 1
    return torch.where(steps < counts.unsqueeze(1), first.unsqueeze(1) + steps, 0)
