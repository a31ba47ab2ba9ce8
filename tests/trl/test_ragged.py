"""RaggedDistribution gives back what was packed, bit for bit, after TRL's shuffling and splitting as well."""

import math

import pytest
import torch
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import SparseDistribution, sparsify

VOCABULARY = 23


def example(rows=6, length=9, support=7, seed=0):
    """A dense distribution as the sparse head gives it, its sampled tokens, and which are live: ragged completions, one
    of them empty, and masked positions within another."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, length, VOCABULARY, generator=generator)
    sampled = torch.randint(VOCABULARY, (rows, length), generator=generator)
    dense = sparsify(logits, sampled, support, 0.05)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = length, 0
    live = torch.arange(length) < lengths.unsqueeze(1)
    live[0, 2:4] = False
    return dead_where(dense, ~live), sampled, live


def dead_where(dense, dead):
    nothing = torch.tensor([-math.inf] * dense.token_ids.shape[-1] + [0.0])
    return SparseDistribution(
        dense.token_ids.masked_fill(dead.unsqueeze(-1), -1), torch.where(dead.unsqueeze(-1), nothing, dense.log_probs)
    )


def assert_equal(actual, expected):
    assert actual.token_ids.dtype == torch.int32 and actual.log_probs.dtype == torch.float32
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.log_probs, expected.log_probs)


def none_sampled(shape):
    return torch.full(shape, -1)


def test_it_holds_the_used_slots_of_the_live_positions():
    dense, _, live = example()
    ragged = RaggedDistribution.pack(dense)
    ids, log_probs, rest, counts = [], [], [], []
    for row, mask in enumerate(live.tolist()):
        last = max((t for t, alive in enumerate(mask) if alive), default=-1)
        assert ragged.lengths[row] == last + 1
        for t in range(last + 1):
            kept = [k for k, token in enumerate(dense.token_ids[row, t].tolist()) if token >= 0]
            assert bool(kept) == mask[t]
            counts.append(len(kept))
            rest.append(dense.log_probs[row, t, -1])
            ids += [dense.token_ids[row, t, k] for k in kept]
            log_probs += [dense.log_probs[row, t, k] for k in kept]
    assert ragged.counts.tolist() == counts and ragged.width == max(counts)
    for actual, expected in ((ragged.rest, rest), (ragged.token_ids, ids), (ragged.log_probs, log_probs)):
        assert torch.equal(actual, torch.stack(expected))
    assert ragged.nbytes == 8 * (len(ids) + len(counts)) + 4 * len(live)


@pytest.mark.parametrize("support", [1, 7, VOCABULARY])
def test_the_dense_form_comes_back(support):
    dense, _, live = example(support=support)
    ragged = RaggedDistribution.pack(dense)
    width = int((dense.token_ids >= 0).sum(-1).max())
    trimmed = SparseDistribution(
        dense.token_ids[..., :width], torch.cat([dense.log_probs[..., :width], dense.log_probs[..., -1:]], -1)
    )
    assert_equal(ragged.dense(none_sampled(live.shape)), trimmed)


def test_slot_0_is_the_sampled_token_where_nothing_was_kept():
    """The head asks for it at every token that it scores, a tool's among them."""
    dense, sampled, live = example()
    scored = sampled.masked_fill(~(live | (torch.arange(9) < 5)), -1)
    back = RaggedDistribution.pack(dense).dense(scored)
    assert torch.equal(back.token_ids[..., 0], torch.where(live, dense.token_ids[..., 0], scored.int()))
    assert back.token_ids[~live][:, 1:].eq(-1).all()
    assert back.log_probs[~live][:, :-1].eq(-math.inf).all() and back.log_probs[~live][:, -1].eq(0).all()


def test_what_is_not_finite_comes_back():
    """`nonfinite` counts it in the loss, and skips the update on every rank."""
    dense, _, _ = example()
    dense.log_probs[0, 0, 0], dense.log_probs[0, 1, -1] = math.nan, math.inf
    back = RaggedDistribution.pack(dense).dense(none_sampled((6, 9)))
    assert back.log_probs[0, 0, 0].isnan() and back.log_probs[0, 1, -1] == math.inf


def test_tokens_can_be_taken_out_afterwards():
    dense, _, live = example()
    fewer = live & (torch.arange(9) % 3 > 0)
    kept = RaggedDistribution.pack(dense).keep(fewer)
    packed = RaggedDistribution.pack(dead_where(dense, ~fewer))
    assert kept.width == RaggedDistribution.pack(dense).width
    assert torch.equal(kept.token_ids, packed.token_ids) and torch.equal(kept.log_probs, packed.log_probs)
    back, expected = kept.dense(none_sampled(live.shape)), dead_where(dense, ~fewer)
    assert torch.equal(back.token_ids, expected.token_ids[..., : kept.width])
    assert torch.equal(back.log_probs[..., -1], expected.log_probs[..., -1])


def test_trl_shuffles_and_splits_its_rows():
    dense, _, _ = example(rows=8)
    ragged = RaggedDistribution.pack(dense)
    whole = ragged.dense(none_sampled((8, 9)))
    columns = {"ids": whole.token_ids, "log_probs": whole.log_probs, "ragged": ragged.rows(), "other": None}
    torch.manual_seed(1)
    batches = split_tensor_dict(shuffle_sequence_dict(columns), 4)
    assert not torch.equal(torch.cat([batch["ids"] for batch in batches]), whole.token_ids)
    for batch in batches:
        joined = RaggedDistribution.concatenate(batch["ragged"])
        assert_equal(joined.dense(none_sampled((2, 9))), SparseDistribution(batch["ids"], batch["log_probs"]))


def test_parts_of_different_width_become_as_wide_as_the_widest():
    parts = [RaggedDistribution.pack(example(rows=2, support=support)[0]) for support in (2, 7)]
    joined = RaggedDistribution.concatenate(parts)
    assert joined.width == parts[1].width > parts[0].width == 2
    back = joined.dense(none_sampled((4, 9)))
    assert torch.equal(back.token_ids[2:], parts[1].dense(none_sampled((2, 9))).token_ids)
    assert back.token_ids[:2, :, 2:].eq(-1).all() and back.log_probs[:2, :, 2:-1].eq(-math.inf).all()


def test_nothing_at_all():
    dense, _, live = example()
    nothing = RaggedDistribution.pack(dead_where(dense, torch.ones_like(live)))
    assert nothing.nbytes == 4 * len(live) and nothing.width == 1
    back = nothing.dense(none_sampled(live.shape))
    assert back.token_ids.eq(-1).all() and back.log_probs.tolist() == [[[-math.inf, 0.0]] * 9] * 6
    empty = RaggedDistribution.pack(SparseDistribution(dense.token_ids[:, :0], dense.log_probs[:, :0]))
    assert empty.dense(none_sampled((6, 0))).log_probs.shape == (6, 0, 2)


def test_the_dense_form_waits_for_no_device():
    """Every number of a meta tensor is unknown, as a GPU's is to the host until it waits."""
    ragged = RaggedDistribution.pack(example()[0]).to("meta")
    dense = ragged.dense(torch.empty(6, 9, dtype=torch.int64, device="meta"))
    assert dense.token_ids.shape == (6, 9, ragged.width) and dense.log_probs.shape == (6, 9, ragged.width + 1)
