"""What the GPU's code does in each pass, beside TRL's, counted without a GPU (`benchmarks/counts.py`): a regression
shows here and not on a device."""

import sys

import pytest
import torch
from repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from counts import MIB, SHAPES, _leaves_the_device, count_passes, count_steps
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from troll_trl.kernels.dispatch import INTERPRETED, TRITON_AVAILABLE
from troll_trl.lm_head import add_sparse_lm_head, support_selection
from troll_trl.trust_region.sparse import keep_nothing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRITON_AVAILABLE or INTERPRETED, reason="counts the launches of compiled kernels"),
]

TOKENS = 8 * 4096
_, VOCABULARY = SHAPES["qwen3-0.6b"]


@pytest.fixture(scope="module")
def counts():
    return count_passes(SHAPES["qwen3-0.6b"][0], VOCABULARY, TOKENS)


def test_products_are_trls(counts):
    for name, products in (("scoring", 1), ("training", 4)):
        expected = products * 2 * TOKENS * VOCABULARY * SHAPES["qwen3-0.6b"][0]
        assert counts[f"ours/{name}"].flops == counts[f"trl/{name}"].flops == expected


def test_logits_are_written_and_read_as_often_as_trls(counts):
    logits = 2 * TOKENS * VOCABULARY
    assert counts["trl/training"].tile_bytes == 7 * logits and counts["trl/scoring"].tile_bytes == 2 * logits
    assert counts["ours/training"].tile_bytes <= 7 * logits * 1.0001  # ours has a spare column in each tile
    # Above TRL's: 12 bytes for each block of 64, written and read, and the K best blocks
    assert counts["ours/scoring"].tile_bytes <= 2 * logits * 1.12


def test_launches(counts):
    tiles_of_tokens, chunks = 8, 5
    training = counts["ours/training"].launches
    assert training["_fold_kernel"] == training["_take_kept_kernel"] == tiles_of_tokens * chunks
    assert training["_gradient_kernel"] == training["_put_kept_kernel"] == tiles_of_tokens * chunks
    for name in ("_outcomes_kernel", "_coefficients_kernel"):  # torch: some 35 operations together
        assert training[name] == tiles_of_tokens
    assert counts["ours/training"].launched <= 400
    assert counts["ours/scoring"].launches["_support_kernel"] == 1  # torch: some 45 operations
    assert counts["ours/scoring"].launched <= 176
    projection = counts["projection"]
    assert projection.launches["_project_kernel"] == projection.launches["_project_backward_kernel"] == 1
    assert projection.launched <= 14  # the torch version: about 420


def test_nothing_waits_for_the_device(counts):
    assert {name: of.waits for name, of in counts.items() if of.waits} == {}


def test_peak_memory(counts):
    assert counts["ours/training"].peak_bytes <= 1.02 * counts["trl/training"].peak_bytes
    assert counts["ours/scoring"].peak_bytes <= 1.02 * counts["trl/scoring"].peak_bytes
    assert counts["projection"].peak_bytes <= 48 * MIB


@pytest.mark.parametrize("support", [129, 130, 256, 1024])
def test_peak_memory_of_large_supports(support):
    """Above 129, torch chooses from copies of the best blocks: 396 MiB for 130, and 531 for 256."""
    kept = 4096 * support * 16  # of all positions, the result and what it is made of
    counts = count_passes(SHAPES["qwen3-0.6b"][0], VOCABULARY, 4096, support)
    assert counts["ours/scoring"].peak_bytes <= 1.02 * counts["trl/scoring"].peak_bytes + kept


@pytest.fixture(scope="module")
def steps():
    """Of a model with one layer; what more layers add is the same on both sides."""
    return count_steps("qwen3-0.6b", 8, 4096, layers=1)


def test_a_step_does_trls_products(steps):
    for name in ("scoring", "training"):
        # The last position of each row, which has no label, once counted as live: 1 in 4,097
        assert steps[f"ours/{name}"].flops == steps[f"trl/{name}"].flops
        head = 2 * TOKENS * VOCABULARY * SHAPES["qwen3-0.6b"][0]
        assert steps[f"trl/{name}"].flops > (1 if name == "scoring" else 4) * head


def test_what_a_step_moves_beside_its_products(steps):
    """Above TRL's, in the loss: some 200 reads and writes of (tokens, 65) float32, forward and backward."""
    kept = TOKENS * 65 * 4
    assert 0 < steps["ours/training"].other_bytes - steps["trl/training"].other_bytes <= 200 * kept
    assert 0 < steps["ours/scoring"].other_bytes - steps["trl/scoring"].other_bytes <= 200 * kept


def test_a_binary_mask_costs_what_a_clip_costs(steps):
    """No support is selected or evaluated: the mask is some operations on one number a token."""
    mask, clip = steps["mask/training"], steps["trl/training"]
    assert mask.flops == clip.flops and mask.waits == clip.waits
    assert mask.launched - clip.launched <= 60
    assert mask.other_bytes - clip.other_bytes <= 100 * 4 * TOKENS
    assert mask.peak_bytes <= 1.001 * clip.peak_bytes


def test_launches_and_waits_of_a_step(steps):
    """A forward alone has thousands at 28 layers."""
    # Some 13 of them tell a NaN of a trust region from one of the model, and the message names the right one
    assert steps["ours/training"].launched - steps["trl/training"].launched <= 215
    assert steps["ours/scoring"].launched - steps["trl/scoring"].launched <= 110
    # For the live positions and the check of their supports; TRL's indexes and scatters by a mask
    assert steps["ours/training"].waits == 2 <= steps["trl/training"].waits
    # For the live positions, and in packing the old policy, whose copy to the host is not in here
    assert steps["ours/scoring"].waits <= 4


def test_peak_memory_of_a_step(steps):
    """The model's own part is the least at one layer."""
    for name in ("scoring", "training"):
        assert steps[f"ours/{name}"].peak_bytes <= 1.01 * steps[f"trl/{name}"].peak_bytes


class _Waits(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal") or name.startswith("masked_scatter"):
            self.count += 1
        assert not _leaves_the_device(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Copies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._overloadpacket is not torch.ops.aten.copy_, "a number of the host is copied to the device"
        return func(*args, **(kwargs or {}))


def test_an_empty_distribution_copies_nothing_from_the_host():
    """`x[-1] = 0.0` does on a GPU, and waits: three times in a micro-batch. On meta tensors it does not show."""
    with _Copies():
        kept = keep_nothing(torch.zeros(2, 4), torch.tensor([True, False]))
    assert kept.exp().tolist() == [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]


def waits_of(run) -> int:
    with _Waits() as mode:
        run()
    return mode.count


def test_a_call_of_the_head_waits_three_times(monkeypatch):
    """For the number of live positions, for the checks of a support (not in scoring), and for that of the logits. The
    scatter of the outputs once waited as well, in the forward and in the backward."""
    monkeypatch.setattr(support_selection, "_one_chunk_at_a_time", lambda device: False)  # as on a GPU
    model = tiny_model("qwen3", vocab_size=331)
    ids = torch.randint(3, 331, (2, 9))
    batch = {"input_ids": ids, "labels": ids.clone(), "fused_lm_head": True}
    batch["labels"][0, :3] = -100
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    add_sparse_lm_head(model)
    # What the backbone itself asks for
    backbone = waits_of(lambda: model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward())
    with torch.no_grad():
        token_ids = model(**batch, support_size=5).token_ids
        scoring = waits_of(lambda: model(**batch, support_size=5))
    training = waits_of(lambda: model(**batch, token_ids=token_ids).sparse_log_probs.exp().sum().backward())
    assert scoring - backbone <= 2 and training - backbone <= 3
