"""self_check(): compares the kernels of the LM head and the projection with PyTorch alone, for `troll check`."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple
from unittest.mock import patch

import torch

from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs
from troll_trl.lm_head.support_selection import select_support
from troll_trl.trust_region.projection import project

# Largest difference, as a share of an output's largest entry. Kernels and PyTorch sum float32 numbers in different
# orders. Gradients come from tiles of the products' dtype: for bf16, the tolerance is twice its rounding.
_TOLERANCE = 2e-5
_TOLERANCE_OF_TILE = {torch.float32: _TOLERANCE, torch.bfloat16: 1e-2}
# The logits' spread, at any temperature. With logits in the hundreds, float32 numbers are 3e-5 apart, and a correct
# kernel would fail.
_SPREAD = 3.0


class Case(NamedTuple):
    """Shapes and options of one comparison."""

    vocabulary: int
    support_size: int
    tokens: int
    dtype: torch.dtype  # of hidden states and products
    transform: LogitTransform
    bias: bool
    tail_mass: float


# The last block is short, some supports have unused slots, and the model has a bias and soft-capping
SMALL = Case(5003, 24, 21, torch.float32, LogitTransform(scale=1.3, softcap=8.0, temperature=0.7), True, 0.5)
# The shapes of Qwen3 with the defaults, with several tiles of the vocabulary: Triton recompiles the kernels for them
QWEN3 = Case(151_936, 64, 5, torch.bfloat16, LogitTransform(), False, 1e-5)


class KernelCheck(NamedTuple):
    """The result of the kernels of one pass on one case."""

    name: str  # of the pass: scoring, training or projection
    ok: bool  # the kernels ran, and agreed with PyTorch to the rounding of their dtype
    difference: float  # the largest, as a share of the tolerance; NaN if they did not run
    shapes: str  # shapes of the case
    error: str  # why they did not run; else empty

    def __str__(self) -> str:
        agrees = "agree with torch" if self.ok else "FAIL"
        return f"{self.name} ({self.shapes}): {agrees}, {self.error or f'{self.difference:.2g} of the tolerance'}"


def self_check(device: torch.device, cases: tuple[Case, ...] = (SMALL, QWEN3)) -> list[KernelCheck]:
    """Run the head and the projection with and without kernels, on a device that can run the kernels."""
    return [_check(name, run, case, device) for case in cases for name, run in _PASSES.items()]


def _check(name: str, run: Callable, case: Case, device: torch.device) -> KernelCheck:
    dtype = str(case.dtype).removeprefix("torch.")
    shapes = f"{case.tokens} tokens, vocabulary {case.vocabulary}, {case.support_size} kept, {dtype}"
    try:
        ours = run(case, device)
        with _without_kernels():
            theirs = run(case, device)
        difference = max(_difference(a, b) / tolerance for (a, tolerance), (b, _) in zip(ours, theirs, strict=True))
    except Exception as error:  # report whatever a compiler or a driver raises, with the pass
        return KernelCheck(name, False, math.nan, shapes, f"{type(error).__name__}: {error}"[:2000])
    return KernelCheck(name, difference <= 1, difference, shapes, "")


def _without_kernels():
    return patch.dict(os.environ, TROLL_KERNELS="torch")


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference as a share of the largest finite entry; infinite where one is −∞ or NaN and the other is
    not."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = (ours - theirs).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf, math.inf)
    scale = theirs.masked_fill(~theirs.isfinite(), 0.0).abs().amax().clamp(min=1e-30)
    return (error.amax() / scale).item()


def _head(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Hidden states, weight and bias of a head, and sampled tokens. Each hidden state has a single 1, so all products
    are exact for any order of summation and any tile shape."""
    generator = torch.Generator().manual_seed(0)
    spread = _SPREAD / case.transform.slope
    hidden = torch.eye(case.tokens, dtype=case.dtype)
    weight = (spread * torch.randn(case.vocabulary, case.tokens, generator=generator)).to(case.dtype)
    bias = torch.randn(case.vocabulary, generator=generator).to(case.dtype) if case.bias else None
    sampled = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    return hidden.to(device), weight.to(device), None if bias is None else bias.to(device), sampled.to(device)


def _score(case: Case, device: torch.device) -> list[tuple[torch.Tensor, float]]:
    hidden, weight, bias, sampled = _head(case, device)
    ids, log_probs, entropy = select_support(
        hidden, weight, bias, sampled, case.support_size, case.tail_mass, case.transform
    )
    # Tokens with equal logits may come in any order. So compare the log-probabilities that PyTorch computes for the ids
    with _without_kernels():
        named, _ = SparseLogProbs.apply(hidden, weight, bias, ids, case.transform, nullcontext)
    return [(log_probs, _TOLERANCE), (named, _TOLERANCE), (log_probs.exp(), _TOLERANCE), (entropy, _TOLERANCE)]


def _train(case: Case, device: torch.device) -> list[tuple[torch.Tensor, float]]:
    hidden, weight, bias, sampled = _head(case, device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(case.vocabulary, generator=generator)[: case.support_size] for _ in sampled])
    ids[::3, 1 + case.support_size // 2 :] = -1
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    log_probs, entropy = SparseLogProbs.apply(
        hidden, weight, bias, ids.int().to(device), case.transform, lambda *_: nullcontext()
    )
    upstream = [torch.randn(x.shape, generator=generator).to(device) for x in (log_probs, entropy)]
    used = log_probs > -math.inf
    outputs = [(log_probs, _TOLERANCE), (log_probs.exp(), _TOLERANCE), (entropy, _TOLERANCE)]
    policy = (log_probs.where(used, 0.0) * upstream[0]).sum()
    for loss in (policy, policy + (entropy * upstream[1]).sum()):  # without and with a gradient of the entropy
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        outputs += [(gradient, _TOLERANCE_OF_TILE[case.dtype]) for gradient in gradients]
    return outputs


def _project(case: Case, device: torch.device) -> list[tuple[torch.Tensor, float]]:
    generator = torch.Generator().manual_seed(2)
    old = _SPREAD * torch.randn(case.tokens, case.support_size + 1, generator=generator)
    new = old + torch.linspace(0, 5, case.tokens).unsqueeze(1) * torch.randn(old.shape, generator=generator)
    old[::3, 5:-1] = new[::3, 5:-1] = -math.inf
    policy, old = (x.log_softmax(-1).to(device) for x in (new, old))
    projected = project(policy.requires_grad_(), old, 0.05)
    upstream = torch.randn(old.shape, generator=generator).to(device)
    (gradient,) = torch.autograd.grad(projected.log_probs, policy, upstream)
    outputs = [projected.log_probs.exp(), 1 / (1 + projected.eta), projected.policy_kl, projected.kl, gradient]
    return [(output, _TOLERANCE) for output in outputs]


_PASSES: dict[str, Callable] = {"scoring": _score, "training": _train, "projection": _project}
