"""Properties at volume: the projection on a million rows in each precision, the head at any tile, a run at any split.

test_projection.py and test_sparse.py have the exact values and the gradients against finite differences.
"""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG
from repository import IMPORT_PATH
from tiny import tiny_model

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


def kl(log_p, log_q):
    """KL(p‖q) in float64, from the definition."""
    log_p, log_q = log_p.double(), log_q.double()
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -INF, 0.0, terms).sum(-1)


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
def test_order_unused_slots_and_a_wider_bound(kind):
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
    padded = project(*(torch.nn.functional.pad(x, (0, 7), value=-INF) for x in (log_p, log_q)), 0.05).log_probs
    torch.testing.assert_close(padded[:, :17].exp(), pi, rtol=1e-7, atol=1e-12)
    assert (padded[:, 17:] == -INF).all()


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in one piece: its losses, and the file of its completions."""
    folder = tmp_path_factory.mktemp("whole")
    losses, largest_kl, completions = trajectory.train(folder)
    assert len(losses) == trajectory.UPDATES and max(largest_kl) > 2 * trajectory.OPTIONS["kl_bound"]
    file = folder / "completions.json"
    file.write_text(json.dumps(completions))
    return losses, file


def assert_same_losses(expected, actual):
    differences = [abs(a - e) for a, e in zip(actual, expected, strict=True)]
    assert max(differences) <= 1e-4 and sum(differences) / len(differences) <= 1e-5, differences
    assert max(map(abs, expected)) > 0.05


SPLITS = {
    "accumulation_2": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
    },
    "accumulation_8": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
    },
    "checkpointing": {"gradient_checkpointing": True},
    "small_tiles": {},
}
SPLIT_CASES = [
    pytest.param(split, marks=[pytest.mark.slow] * (split in ("accumulation_8", "checkpointing"))) for split in SPLITS
]


@pytest.mark.parametrize("split", SPLIT_CASES)
def test_fifty_updates_do_not_depend_on_the_split(split, whole, tmp_path, monkeypatch):
    losses, completions = whole
    if split == "small_tiles":
        monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (7, 64), "accelerator": (7, 64)})
        monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": 5 * 8192})
    actual, _, _ = trajectory.train(tmp_path, completions, **SPLITS[split])
    assert_same_losses(losses, actual)


@pytest.mark.slow
def test_fifty_updates_on_two_ranks(whole, tmp_path):
    losses, completions = whole
    script = tmp_path / "train.py"
    script.write_text(
        "import json, sys, trajectory\nfrom pathlib import Path\nfrom accelerate.state import PartialState\n"
        "from ranks import leave_together\n"
        "folder = Path(sys.argv[1])\n"
        "losses, _, _ = trajectory.train(folder, Path(sys.argv[2]), per_device_train_batch_size=8,\n"
        "                                ddp_find_unused_parameters=False)\n"
        "assert PartialState().num_processes == 2\n"
        "(folder / f'losses-{PartialState().process_index}.json').write_text(json.dumps(losses))\n"
        "leave_together()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, script, tmp_path, completions],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    file = tmp_path / "losses-0.json"
    assert file.exists(), done.stderr[-3000:]
    assert_same_losses(losses, json.loads(file.read_text()))
