"""The training pass: a policy's log-probabilities on a given support, and its entropy, without full logits.

For one token, with logits `z`, kept tokens `k_1…k_K`, `R = logsumexp` of all other logits and `log Z = logsumexp` of
all:

    sparse log-probabilities   L_j = z_{k_j} − log Z,   L_rest = R − log Z
    entropy                    H = log Z − Σ_v p_v z_v              with p_v = exp(z_v − log Z)

Equivalent to `SparseDistribution.log_probs_on_support(logits, token_ids)` and the entropy of `softmax(logits)`.
"""

import torch
from torch.autograd.function import once_differentiable

from troll_trl.kernels.coefficients import gradient_coefficients
from troll_trl.kernels.dispatch import use_triton
from troll_trl.kernels.fold import FoldState, online_logsumexp
from troll_trl.kernels.gradient import gradient_tile
from troll_trl.kernels.outcomes import outcomes_of
from troll_trl.kernels.tiles import (
    LogitTransform,
    accumulate_product,
    compute_dtype,
    empty_tile,
    product_into,
    slices,
    training_tile,
)


class SparseLogProbs(torch.autograd.Function):
    """
    `(sparse_log_probs, entropy) = SparseLogProbs.apply(hidden, weight, bias, token_ids, transform, gather)`

    Takes hidden states `(N, H)`, the head's `weight` `(V, H)` and `bias` `(V,)` or `None`, supports `token_ids`
    `(N, K)`, integer, with −1 in unused slots, and the `transform` of the logits. The backward pass calls `gather` with
    weight and bias to gather a sharded head, as the caller did for the forward pass. Returns `(N, K + 1)` and `(N,)`,
    both float32, with gradient for hidden states, weight and bias.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, transform: LogitTransform, gather):
        ctx.set_materialize_grads(False)  # the entropy is often only logged, and then has no gradient
        dtype = compute_dtype(hidden)
        tokens, columns = training_tile(hidden.device)
        token_ids = token_ids.contiguous()
        log_probs = hidden.new_empty((len(hidden), token_ids.shape[1] + 1), dtype=torch.float32)
        log_z, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        tile = _tile(hidden, weight, tokens, columns, dtype)
        scratch = None if use_triton(hidden.device) else _tile(hidden, weight, tokens, columns, dtype)
        for rows in slices(len(hidden), tokens):
            state = FoldState.empty(token_ids[rows])
            hidden_rows = hidden[rows].to(dtype)
            for cols in slices(len(weight), columns):
                products = _products(tile, hidden_rows, weight[cols])
                online_logsumexp(
                    products, _slice(bias, cols, dtype), transform, token_ids[rows], cols.start, state, scratch
                )
            log_probs[rows], log_z[rows], entropy[rows] = outcomes_of(state, token_ids[rows], transform)

        ctx.save_for_backward(hidden, weight, bias, token_ids, log_probs, log_z, entropy)
        ctx.transform = transform
        ctx.gather = gather
        ctx.dtype = dtype
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        hidden, weight, bias = saved[:3]
        with ctx.gather(weight, bias):
            # The gradients are float32, whatever the inputs are: see `accumulate_product`
            inputs = list(zip((hidden, weight, bias), ctx.needs_input_grad, strict=False))
            grads = [torch.zeros_like(x, dtype=torch.float32) if needed else None for x, needed in inputs]
            _accumulate(ctx, saved, grads, grad_log_probs, grad_entropy)
        cast = (None if grad is None else grad.to(x.dtype) for grad, (x, _) in zip(grads, inputs, strict=True))
        return *cast, None, None, None


def _accumulate(ctx, saved, grads, grad_log_probs, grad_entropy) -> None:
    """Add to the float32 `grads` of hidden states, weight and bias; `None` for a gradient that is not needed. This is a
    separate function because its tile must be freed before the cast, whose result takes half as much memory as the
    gradients."""
    hidden, weight, bias, token_ids, log_probs, log_z, entropy = saved
    grad_hidden, grad_weight, grad_bias = grads
    transform = ctx.transform
    dtype = ctx.dtype
    tokens, columns = training_tile(hidden.device)
    tile = _tile(hidden, weight, tokens, columns, dtype)
    for rows in slices(len(hidden), tokens):
        g, h = (None if x is None else x[rows].float() for x in (grad_log_probs, grad_entropy))
        coefficients = gradient_coefficients(log_probs[rows], log_z[rows], entropy[rows], g, h, transform)
        hidden_rows = hidden[rows].to(dtype)
        for cols in slices(len(weight), columns):
            weight_cols = weight[cols].to(dtype)
            products = _products(tile, hidden_rows, weight_cols)
            bias_cols = _slice(bias, cols, dtype)
            grad = gradient_tile(products, bias_cols, transform, token_ids[rows], cols.start, coefficients)
            grad = grad.to(dtype)
            if grad_hidden is not None:
                accumulate_product(grad_hidden[rows], grad, weight_cols)
            if grad_weight is not None:
                accumulate_product(grad_weight[cols], grad.t(), hidden_rows)
            if grad_bias is not None:
                grad_bias[cols] += grad.sum(0, dtype=torch.float32)


def _tile(hidden: torch.Tensor, weight: torch.Tensor, tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer for one tile and a spare column, to which the PyTorch fallbacks map the slots outside of the tile."""
    return empty_tile(min(tokens, len(hidden)), min(columns, len(weight)) + 1, dtype, hidden.device)


def _products(tile: torch.Tensor, hidden_rows: torch.Tensor, weight_cols: torch.Tensor) -> torch.Tensor:
    """Products with some rows `(v, H)` of the head in `tile`, `(n, v + 1)`."""
    tile = tile[: len(hidden_rows), : len(weight_cols) + 1]
    product_into(tile[:, :-1], hidden_rows, weight_cols)
    return tile


def _slice(bias: torch.Tensor | None, cols: slice, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias[cols].to(dtype).contiguous()
