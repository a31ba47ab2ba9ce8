"""The training pass: a policy's log-probabilities on a given support, and its entropy, without full logits.

For one token, with logits `z`, kept tokens `k_1…k_K`, `R = logsumexp` of all other logits and `log Z = logsumexp` of
all:

    sparse log-probabilities   L_j = z_{k_j} − log Z,   L_rest = R − log Z
    entropy                    H = log Z − Σ_v p_v z_v              with p_v = exp(z_v − log Z)

Equivalent to `SparseDistribution.of(logits, token_ids)` and the entropy of `softmax(logits)`.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from troll_trl.kernels.support_selection import UNUSED
from troll_trl.kernels.tiles import (
    FLOOR,
    LogitTransform,
    accumulate_product,
    compute_dtype,
    empty_tile,
    logits_into,
    training_tile,
)


class SparseLogProbs(torch.autograd.Function):
    """
    `(sparse_log_probs, entropy) = SparseLogProbs.apply(hidden, weight, bias, token_ids, transform, gather)`

    Args:
        hidden (`torch.Tensor` of shape `(N, H)`):
            Hidden states of the positions to evaluate.
        weight (`torch.Tensor` of shape `(V, H)`), bias (`torch.Tensor` of shape `(V,)`, *optional*):
            The LM head.
        token_ids (`torch.Tensor` of shape `(N, K)`, integer):
            Support of every position; −1 marks an unused slot.
        transform ([`LogitTransform`]):
            Scale, soft-capping and temperature of the logits.
        gather (`Callable[..., AbstractContextManager]`):
            Called with weight and bias in the backward: makes a sharded head whole, as the caller did for the forward.

    Returns:
        `sparse_log_probs` `(N, K + 1)` and `entropy` `(N,)`, both float32 with gradient for hidden states, weight and
        bias.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, transform: LogitTransform, gather):
        ctx.set_materialize_grads(False)  # the entropy is often only logged, and then has no gradient
        dtype = compute_dtype(hidden)
        tokens, columns = training_tile(hidden.device)
        log_probs = hidden.new_empty((len(hidden), token_ids.shape[1] + 1), dtype=torch.float32)
        log_z, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        tile, scratch = (_tile(hidden, weight, tokens, columns) for _ in range(2))
        for rows in _slices(len(hidden), tokens):
            fold = _Fold(token_ids[rows])
            hidden_rows = hidden[rows].to(dtype)
            for cols in _slices(len(weight), columns):
                logits = _logits(tile, hidden_rows, weight, bias, cols, transform)
                fold.add(logits, scratch, cols.start)
            log_probs[rows], log_z[rows], entropy[rows] = fold.finish()

        ctx.save_for_backward(hidden, weight, bias, token_ids, log_probs, log_z, entropy)
        ctx.transform, ctx.gather, ctx.dtype = transform, gather, dtype
        return log_probs, entropy

    # Gradient of one token's outputs with respect to its logits, with upstream g_j on L_j, g_rest on L_rest, h on H and
    # G = Σ_j g_j + g_rest. From ∂L_j/∂z_v = 1[v = k_j] − p_v, ∂L_rest/∂z_v = 1[v ∉ K]·p_v/p_rest − p_v and
    # ∂H/∂z_v = −p_v (log p_v + H):
    #     v = k_j:   g_j − p_v·(G + h·(log p_v + H))
    #     v ∉ K:     e_v·[g_rest − p_rest·(G + h·(log p_v + H))]      with e_v = p_v/p_rest = exp(z_v − R)
    # The second line takes one exp, of a difference with the rest's own log-sum-exp, and so stays right when p_rest is
    # tiny. It is linear in z_v; the kept entries are then overwritten by the first.
    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, token_ids, log_probs, log_z, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        tokens, columns = training_tile(hidden.device)
        with ctx.gather(weight, bias):
            # In float32, whatever the inputs: see `accumulate_product`
            grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else hidden.new_empty(0)
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else weight.new_empty(0)
            grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else weight.new_empty(0)
            tile = _tile(hidden, weight, tokens, columns)
            for rows in _slices(len(hidden), tokens):
                gradient = _TileGradient(
                    token_ids[rows],
                    log_probs[rows],
                    log_z[rows],
                    entropy[rows],
                    None if grad_log_probs is None else grad_log_probs[rows].float(),
                    None if grad_entropy is None else grad_entropy[rows].float(),
                    ctx.transform,
                )
                hidden_rows = hidden[rows].to(ctx.dtype)
                for cols in _slices(len(weight), columns):
                    logits = _logits(tile, hidden_rows, weight, bias, cols, ctx.transform)
                    grad = gradient.overwrite(logits, cols.start).to(ctx.dtype)  # (n, v)
                    if needs_hidden:
                        accumulate_product(grad_hidden[rows], grad, weight[cols].to(ctx.dtype))
                    if needs_weight:
                        accumulate_product(grad_weight[cols], grad.t(), hidden_rows)
                    if needs_bias:
                        grad_bias[cols] += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden.to(hidden.dtype) if needs_hidden else None,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(bias.dtype) if needs_bias else None,
            None,
            None,
            None,
        )


class _Fold:
    """Running statistics of `n` tokens over the tiles of the vocabulary: kept logits, and an online log-sum-exp of the
    rest with its mean logit."""

    def __init__(self, token_ids: torch.Tensor):
        self.token_ids = token_ids  # (n, K)
        self.kept = torch.full(token_ids.shape, FLOOR, device=token_ids.device)  # (n, K)
        self.max = torch.full((len(token_ids), 1), FLOOR, device=token_ids.device)
        self.sum_exp, self.sum_exp_u = torch.zeros_like(self.max), torch.zeros_like(self.max)  # u = z − max

    def add(self, tile: torch.Tensor, scratch: torch.Tensor, start: int) -> None:
        slots = _slots(self.token_ids, start, tile)
        self.kept = torch.maximum(self.kept, tile.gather(1, slots))
        tile.scatter_(1, slots, FLOOR)  # what is left is the rest
        new_max = torch.maximum(self.max, tile.amax(1, keepdim=True))
        shift = self.max - new_max
        rescale = shift.exp()
        u = tile.sub_(new_max)
        exp_u = torch.exp(u, out=scratch[: u.shape[0], : u.shape[1]])
        self.sum_exp_u = rescale * (self.sum_exp_u + shift * self.sum_exp) + u.mul_(exp_u).sum(1, keepdim=True)
        self.sum_exp = rescale * self.sum_exp + exp_u.sum(1, keepdim=True)
        self.max = new_max

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sparse log-probabilities `(n, K + 1)`, log Z `(n,)` and entropy `(n,)`."""
        kept = self.kept.masked_fill(self.token_ids == UNUSED, -math.inf)
        # Only the floor was summed where no token is left to the rest (a NaN must not pass for that)
        rest = torch.where(self.max < FLOOR / 2, -math.inf, self.max + self.sum_exp.log())
        outcomes = torch.cat([kept, rest], 1)
        log_z = outcomes.logsumexp(1, keepdim=True)
        log_probs = outcomes - log_z
        # H = −Σ_kept p log p − p_rest·E_rest[log p]
        mean_log_prob = torch.where(rest == -math.inf, 0.0, self.sum_exp_u / self.sum_exp + self.max - log_z)
        surprise = torch.cat([log_probs[:, :-1].masked_fill(kept == -math.inf, 0.0), mean_log_prob], 1)
        return log_probs, log_z.squeeze(1), -(log_probs.exp() * surprise).sum(1)


class _TileGradient:
    """Turns tiles of logits of `n` tokens into tiles of gradients, in place."""

    def __init__(self, token_ids, log_probs, log_z, entropy, grad_log_probs, grad_entropy, transform: LogitTransform):
        self.token_ids, self.transform = token_ids, transform
        log_z, entropy = log_z.unsqueeze(1), entropy.unsqueeze(1)  # (n, 1)
        g = torch.zeros_like(log_probs) if grad_log_probs is None else grad_log_probs
        g = g.masked_fill(log_probs == -math.inf, 0.0)  # unused slots and an empty rest
        total = g.sum(1, keepdim=True)
        probs = log_probs.exp()
        self.rest_log_sum_exp = log_probs[:, -1:] + log_z  # R

        # Everything is scaled by the slope ∂z/∂y here, so that the tile needs no pass of its own for it
        slope = transform.slope
        kept = g - probs * total
        self.constant = slope * (g[:, -1:] - probs[:, -1:] * total)  # of the bracket of v ∉ K
        self.linear = None
        if grad_entropy is not None:
            h = grad_entropy.unsqueeze(1)
            kept = kept - h * probs * (log_probs.masked_fill(probs == 0, 0.0) + entropy)
            self.linear = -slope * h * probs[:, -1:]  # times z_v
            self.constant = self.constant + self.linear * (entropy - log_z)
        self.kept = slope * kept[:, :-1]  # (n, K)

    def overwrite(self, tile: torch.Tensor, start: int) -> torch.Tensor:
        """Overwrite logits `(n, v + 1)`, the last column spare, with their gradient; returns it `(n, v)`."""
        derivative = None if self.transform.softcap is None else self.transform.softcap_derivative(tile)
        if self.linear is None:
            tile.sub_(self.rest_log_sum_exp).exp_().mul_(self.constant)
        else:
            factor = torch.addcmul(self.constant, self.linear, tile)
            tile.sub_(self.rest_log_sum_exp).exp_().mul_(factor)
        # Kept entries may have overflowed in the exp, being no part of the rest
        tile.scatter_(1, _slots(self.token_ids, start, tile), self.kept)
        return (tile if derivative is None else tile.mul_(derivative))[:, :-1]


def _tile(hidden: torch.Tensor, weight: torch.Tensor, tokens: int, columns: int) -> torch.Tensor:
    """A float32 buffer for one tile and a spare column."""
    return empty_tile(min(tokens, len(hidden)), min(columns, len(weight)) + 1, hidden.device)


def _logits(tile, hidden_rows, weight, bias, cols: slice, transform: LogitTransform) -> torch.Tensor:
    """Logits of the columns `cols` in `tile`, `(n, v + 1)`; the spare column takes the slots that lie elsewhere."""
    width = cols.stop - cols.start
    tile = tile[: len(hidden_rows), : width + 1]
    logits_into(tile[:, :width], hidden_rows, weight[cols], None if bias is None else bias[cols], transform)
    tile[:, width] = FLOOR
    return tile


def _slots(token_ids: torch.Tensor, start: int, tile: torch.Tensor) -> torch.Tensor:
    """Column `(n, K)` of every kept token within a tile `(n, v + 1)` from token `start` on, or its spare column."""
    spare = tile.shape[1] - 1
    local = token_ids.long() - start
    return torch.where((local >= 0) & (local < spare), local, spare)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
