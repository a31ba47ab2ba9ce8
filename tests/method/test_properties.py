"""Properties at volume: the projection on a million rows in each precision, the head at any tile, a run at any split.

test_projection.py and test_sparse.py have the exact values and the gradients against finite differences.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.method.test_projection import kl
from tests.tiny import tiny_model
from tests.trl_comparison import logged, make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.kernels import tiles
from troll_trl.lm_head import add_sparse_lm_head, support_selection
from troll_trl.trust_region.projection import project

INF = math.inf
ROWS = {2: 40_000, 5: 24_000, 17: 8_000, 65: 2_500}  # by number of slots


def rows_of(kind: str, slots: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and an old policy `(rows, slots)`, float64."""
    shape = (ROWS[slots], slots)
    normal = lambda scale=1.0: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    uniform = lambda: torch.rand(shape, generator=generator, dtype=torch.float64)
    old = normal(3.0)
    if kind == "near":
        return old + normal(10.0 ** -(8 * uniform()[:, :1])), old
    if kind == "far":
        return old + normal(100.0), old
    if kind == "peaked":  # the sampled token has nearly all of the old mass, and the policy leaves it
        old[:, 0] += 40 * uniform()[:, 0]
        return old - 60 * uniform() * (torch.arange(slots) == 0), old
    if kind == "opposite":
        return -old * 30, old * 30
    if kind == "tied":
        return (4 * uniform()).round() * 8, torch.zeros(shape, dtype=torch.float64)
    if kind == "extreme":  # the largest logits that models produce in half precision
        return (uniform() - 0.5) * 2e4, (uniform() - 0.5) * 2e4
    policy = old + normal(3.0)
    missing = uniform() < 0.4
    missing[:, 0] = False
    if kind == "both missing":
        return policy.masked_fill(missing, -INF), old.masked_fill(missing, -INF)
    if kind == "old missing":
        return policy, old.masked_fill(missing, -INF)
    assert kind == "one-hot policy"
    return policy.masked_fill(torch.arange(slots) > 0, -INF), old


KINDS = ["near", "far", "peaked", "opposite", "tied", "extreme", "both missing", "old missing", "one-hot policy"]
BOUNDS = [0.01, 0.3]


def check_rows(log_p, log_q, bound, dtype, generator):
    """Every property of one batch of rows that each row can be asked for."""
    tolerance, of_sum = {torch.float32: (1e-3, 2e-5), torch.float64: (1e-9, 1e-11)}[dtype]
    log_p = log_p.to(dtype).requires_grad_()
    log_q = log_q.to(dtype)
    result = project(log_p, log_q, bound)
    pi = result.log_probs.detach()
    result.log_probs.masked_fill(pi == -INF, 0.0).mul(torch.randn(pi.shape, generator=generator)).sum().backward()

    assert not pi.isnan().any() and (pi < INF).all()
    assert result.eta.isfinite().all() and result.kl.isfinite().all() and log_p.grad.isfinite().all()
    assert (pi[log_q == -INF] == -INF).all() or (kl(log_p.detach(), log_q) <= bound).any()
    excess = (kl(pi, log_q) / bound - 1).max().item()
    assert excess <= tolerance, f"KL exceeds the bound by {excess:.1e}"
    assert (pi.double().exp().sum(-1) - 1).abs().max() <= of_sum
    inside = kl(log_p.detach(), log_q) <= bound * (1 - 1e-5)
    assert torch.equal(pi[inside], log_p.detach()[inside])
    assert (result.eta[inside] == 0).all()
    return result, inside


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=["float32", "float64"]
)
def test_a_million_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = outside = 0
    for kind in KINDS:
        for slots in ROWS:
            logits_p, logits_q = rows_of(kind, slots, generator)
            log_p, log_q = (logits.log_softmax(-1) for logits in (logits_p, logits_q))
            for bound in BOUNDS:
                _, inside = check_rows(log_p, log_q, bound, dtype, generator)
                rows += len(inside)
                outside += int((~inside).sum())
    assert rows >= 1_000_000 and outside >= 500_000 and rows - outside >= 50_000


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_a_wider_bound(kind):
    generator = torch.Generator().manual_seed(1)
    log_p, log_q = (logits[:1500].log_softmax(-1) for logits in rows_of(kind, 17, generator))
    results = [project(log_p, log_q, bound) for bound in (0.003, 0.01, 0.05, 0.3, 2.0)]
    for narrow, wide in itertools.pairwise(results):
        assert (wide.eta <= narrow.eta * (1 + 1e-9)).all()
        assert (kl(wide.log_probs, log_q) >= kl(narrow.log_probs, log_q) - 1e-10).all()
        if "missing" not in kind and "one-hot" not in kind:  # and never further from the policy than before
            assert (kl(wide.log_probs, log_p) <= kl(narrow.log_probs, log_p) + 1e-7).all()

    order = torch.randperm(17, generator=generator)
    pi = results[2].log_probs.exp()
    permuted = project(log_p[:, order], log_q[:, order], 0.05).log_probs.exp()
    torch.testing.assert_close(permuted, pi[:, order], rtol=1e-7, atol=1e-12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 80.0, 3e4]),
    st.sampled_from([1e-38, 1e-3, 1.0, 30.0, 3e4]),
    st.floats(0.01, 20),
    st.integers(0, 2**32),
)
def test_any_shape_and_scale(slots, rows, difference, spread, bound, seed):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(rows, slots, generator=generator, dtype=torch.float64)
    old = spread * normal()
    log_p, log_q = ((old + difference * normal()).log_softmax(-1), old.log_softmax(-1))
    for dtype in (torch.float32, torch.float64):
        check_rows(log_p, log_q, bound, dtype, generator)


@pytest.mark.parametrize("side", [-1e-3, 1e-3, 0.1], ids=["just inside", "just outside", "outside"])
@pytest.mark.parametrize("bound", [0.01, 0.05, 1.0])
def test_float32_gradient_at_the_boundary_is_the_float64_gradient(bound, side):
    """The gradient jumps where the bound begins to act; a log-softmax makes those of either side comparable."""
    generator = torch.Generator().manual_seed(2)
    normal = lambda scale: scale * torch.randn(2000, 17, generator=generator, dtype=torch.float64)
    old = normal(2.0)
    log_q, log_p = old.log_softmax(-1), (old + normal(4.0)).log_softmax(-1)
    target = bound * (1 + side)
    near = project(log_p, log_q, target).log_probs
    on_target = kl(near, log_q) > target * (1 - 1e-6)  # as good as all: the others were inside
    near, log_q, upstream = near[on_target], log_q[on_target], normal(1.0)[on_target]
    assert len(near) > 1500
    gradients = []
    for dtype in (torch.float64, torch.float32):
        logits = near.clone().to(dtype).requires_grad_()
        result = project(logits.log_softmax(-1), log_q.to(dtype), bound)
        assert ((result.eta > 0) == (side > 0)).all()
        result.log_probs.backward(upstream.to(dtype))
        gradients.append(logits.grad.double())
    assert (gradients[1] - gradients[0]).abs().max() <= 2e-4 * gradients[0].abs().max()


# -- The head ---------------------------------------------------------------------------------------------------------

TILES = [(1, 64), (2, 128), (3, 64), (5, 192), (7, 320), (16, 128), (64, 1024), (1024, 16384)]


def head_outputs(model, ids, chunk):
    """Selected supports and gradients of a loss on them, `chunk` rows at a time."""
    model.zero_grad()
    outputs = []
    for rows in ids.split(chunk):
        inputs = {"input_ids": rows, "labels": rows.masked_fill(rows % 7 == 0, -100), "fused_lm_head": True}
        with torch.no_grad():
            selected = model(**inputs, support_size=16, tail_mass=1e-3)
        output = model(**inputs, token_ids=selected.token_ids)
        used = torch.nn.functional.pad(selected.token_ids >= 0, (0, 1), value=True)
        (output.sparse_log_probs.masked_fill(~used, 0.0).sum() + output.entropy.sum()).backward()
        outputs.append((selected.token_ids, output.sparse_log_probs.detach(), output.entropy.detach()))
    gradients = [p.grad.clone() for p in model.parameters()]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)], gradients


def test_the_head_does_not_depend_on_tile_or_chunk(monkeypatch):
    model = tiny_model(vocab_size=331)
    add_sparse_lm_head(model, 0.8)
    ids = torch.randint(1, 331, (6, 11), generator=torch.Generator().manual_seed(0))
    (expected_ids, *expected), expected_gradients = head_outputs(model, ids, 6)
    for number, (tokens, columns) in enumerate(TILES):
        monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (tokens, columns), "accelerator": (tokens, columns)})
        monkeypatch.setattr(support_selection, "_COLUMNS", {"cpu": columns, "accelerator": columns})
        monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": tokens * max(columns, 384)})
        (actual_ids, *actual), gradients = head_outputs(model, ids, chunk=1 + number % 6)
        assert torch.equal(actual_ids, expected_ids), (tokens, columns)
        for a, e in zip((*actual, *gradients), (*expected, *expected_gradients), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-5)


# -- A run ------------------------------------------------------------------------------------------------------------


def train(folder, stored=None, **options):
    """Losses and largest KLs before the projection, update by update, and the completions, which may be `stored`."""
    # Every update is over the whole rollout batch of 16 completions, however it is split; the second is off-policy
    options = {"num_iterations": 2, "max_steps": 20, "learning_rate": 3e-3, "kl_bound": 0.01, **options}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, tiny_model(spread=3.0), **options)
    generate, calls = trainer._generate_single_turn, []

    def replay(prompt_ids, *args):
        calls.append(generate(prompt_ids, *args)[0] if stored is None else stored[len(calls)])
        return calls[-1], None

    trainer._generate_single_turn = replay
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "troll/policy_kl_max"), calls


def test_twenty_updates_do_not_depend_on_the_split(tmp_path):
    whole = {"per_device_train_batch_size": 16, "steps_per_generation": 1}
    expected, largest_kl, completions = train(tmp_path, **whole)
    assert len(expected) == 20 and max(largest_kl) > 0.02 and max(map(abs, expected)) > 0.05
    halves = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    actual, _, _ = train(tmp_path, completions, **halves)
    differences = [abs(a - e) for a, e in zip(actual, expected, strict=True)]
    assert max(differences) <= 1e-4 and sum(differences) / len(differences) <= 1e-5, differences
