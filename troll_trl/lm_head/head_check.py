"""check_head(): compares the sparse LM head and the projection with a model's own logits in plain PyTorch, at the first
rollout of a run and for `troll check`."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor

from troll_trl.trust_region.projection import project, torch_project_rows, torch_project_rows_backward
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

_TOKENS = 16  # tokens of a completion that are compared; with a vocabulary of 150,000 two rows of logits take 20 MB
# Largest mean difference of log-probabilities, relative to the largest logit. If only the logits are rounded to
# bfloat16, each by up to 2⁻⁹, it is about 0.001. A model that caps or scales its logits is off by far more.
_TOLERANCE = 0.01
# Largest difference of a gradient, relative to its norm: rounding to bfloat16 causes about 0.005
_GRADIENT_TOLERANCE = 0.03
_LOWEST = -1e30  # replaces a logit of −∞ until its log-probability is set to −∞
_KL_BOUND = 0.05  # of the projection whose gradient is compared, on made-up old policies
_REPORT = "Train another model or method, and please report this with the versions of torch, Triton and the driver."


def check_head(
    model: Any, model_inputs: dict[str, Any], completion_length: int, support_size: int, temperature: float
) -> bool:
    """
    Compare the sparse head and the projection with the model's own logits in plain PyTorch, on a few tokens of the most
    and the least padded row.

    The head multiplies the last hidden states by the matrix of the model's LM head, and transforms the logits as the
    configs of known families specify. If a family transforms its logits in another way, or a kernel is wrong on a new
    device, the run would train on wrong numbers without any other sign. Every rank must call this. Return whether this
    rank had anything to compare.

    Args:
        model (`torch.nn.Module`):
            The policy, wrapped as it is trained.
        model_inputs (`dict[str, Any]`):
            What TRL scores with: `input_ids`, `attention_mask` and `labels` `(B, T)`, of which the last
            `completion_length` columns are the completions. Inputs of another shape, such as images, are left out.
        completion_length, support_size (`int`):
            C and K.
        temperature (`float`):
            The temperature by which the head divides the logits.

    Raises:
        ValueError: log-probabilities, or their gradient with respect to the last hidden states, differ by more than
            rounding. The gradient is not compared if the weights are sharded.
    """
    inputs = _excerpt(model_inputs, completion_length)
    device = inputs["input_ids"].device
    # All passes begin with the same state of the random generators, which is restored: with dropout, all draw the same
    same_draws = partial(torch.random.fork_rng, [device] if device.type == "cuda" else [])
    selection = {"fused_lm_head": True, "support_size": support_size, "tail_mass": 0.0, "check_finite": False}
    labels = inputs.pop("labels")
    with torch.no_grad(), same_draws():
        sparse = model(**inputs, labels=labels, **selection)
    with torch.no_grad(), same_draws():
        logits = model(**inputs, use_cache=False).logits
    n = labels.shape[1] - 1  # prompt tuning puts more positions in front
    token_ids = sparse.token_ids[:, -n:].long()  # (b, n, K)
    kept = token_ids != UNUSED
    own = (logits[:, -n - 1 : -1].float() / temperature).log_softmax(-1).gather(-1, token_ids.clamp(min=0))
    kept &= own != -math.inf  # a logit of −∞ is a probability of 0
    difference = (sparse.sparse_log_probs[:, -n:, :-1] - own).abs()[kept].mean().item()
    if not math.isfinite(difference):  # no token to compare, or logits that are not finite, which the guard finds
        return False
    if difference > _TOLERANCE * max(1.0, logits.masked_fill(logits == -math.inf, 0.0).abs().max().item()):
        raise ValueError(
            "The sparse LM head is wrong for this model: its log-probabilities differ from the model's own by "
            f"{difference:.2g} nats on average over {kept.any(-1).sum().item()} tokens. {_REPORT}"
        )
    unwrapped = extract_model_from_parallel(model)
    sharded = any(isinstance(x, DTensor) or hasattr(x, "ds_id") for x in unwrapped.parameters())
    if not sharded and hasattr(unwrapped, "base_model"):
        _check_gradient(_gradients(unwrapped, inputs, labels, token_ids, temperature, same_draws))
    return True


def _excerpt(model_inputs: dict[str, Any], completion_length: int) -> dict[str, torch.Tensor]:
    """Return the first tokens of the completions in the most and the least padded row, `(b, t)`."""
    shape = model_inputs["input_ids"].shape
    # Include only the last token of the prompt: the model's own logits for a whole prompt could take gigabytes
    start = shape[1] - completion_length - 1
    lengths = model_inputs["attention_mask"].sum(1)
    rows = sorted({int(lengths.argmax()), int(lengths.argmin())})
    return {
        name: value[rows, start : start + _TOKENS + 1]
        for name, value in model_inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == shape
    }


def _check_gradient(gradients: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise a `ValueError` if the two `gradients` `(b, n + 1, H)` differ by more than rounding."""
    if gradients is None:
        return
    ours, theirs = gradients
    difference = ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()
    if difference > _GRADIENT_TOLERANCE:
        raise ValueError(
            "The gradient of head and projection differs from the gradient of the model's own logits by "
            f"{difference:.2g} of its norm. {_REPORT}"
        )


@torch.enable_grad()
def _gradients(
    model: Any,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    same_draws: Callable[[], AbstractContextManager],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two gradients `(b, n + 1, H)` of projected log-probabilities, with made-up old policies, with respect to
    the last hidden states: through head and kernels, and through the model's own logits in plain PyTorch. Return `None`
    if the model's own forward does not call its `base_model`, as in OPT."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    leaves: list[torch.Tensor] = []

    def make_leaf(_module, _args, output):
        output.last_hidden_state = output.last_hidden_state.detach().requires_grad_()
        leaves.append(output.last_hidden_state)
        return output

    n = token_ids.shape[1]
    live = labels[:, 1:] != -100  # (b, n)
    hook = base.base_model.register_forward_hook(make_leaf)
    try:
        with same_draws():
            ours = base(**inputs, labels=labels, fused_lm_head=True, token_ids=token_ids.int(), check_finite=False)
        policy = ours.sparse_log_probs[live]  # (N, K + 1)
        generator = torch.Generator(policy.device).manual_seed(0)
        noise = torch.randn(policy.shape, generator=generator, device=policy.device)
        old = (policy.detach() + noise).log_softmax(-1)
        upstream = torch.rand(policy.shape, generator=generator, device=policy.device)
        upstream[:, 0] += 10  # as in a loss, whose gradient mostly comes from the sampled token
        projected = project(policy, old, _KL_BOUND).log_probs
        weighted = upstream * projected.masked_fill(projected == -math.inf, 0.0)
        (gradient,) = torch.autograd.grad(weighted.sum(), leaves[0])

        with same_draws():
            logits = base(**inputs, use_cache=False).logits[:, -n - 1 : -1].float() / temperature
        if len(leaves) < 2:
            return None
        logits = logits.masked_fill(logits == -math.inf, _LOWEST)
        plain = SparseDistribution.log_probs_on_support(logits[live], token_ids[live])
        plain = plain.masked_fill(plain < _LOWEST / 2, -math.inf)
        log_pi, t, *_ = torch_project_rows(plain.detach(), old, _KL_BOUND)
        upstream = upstream.masked_fill(log_pi == -math.inf, 0.0)
        through = torch_project_rows_backward(upstream, plain.detach(), old, log_pi, t)
        (expected,) = torch.autograd.grad(plain, leaves[1], through.masked_fill(plain.detach() == -math.inf, 0.0))
    finally:
        hook.remove()
    return gradient.float(), expected.float()
