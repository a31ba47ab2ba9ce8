"""`old_policy: engine`: what an engine answers, and the rows of numbers that become of it."""

import itertools
import math
import pickle
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from troll_trl.trainers import engine_policy
from troll_trl.trainers.engine_policy import SampledLogProb, check_tokens, read_answer, rows_of
from troll_trl.trust_region.sparse import sparsify

V = 100


def answer_of(listed, tokens, others):
    """What the engine said, from a dictionary for every token."""
    values = chain.from_iterable(row.values() for row in listed)
    return read_answer(tokens, [*map(len, listed)], [*chain(*listed)], [*values], others)


def listing(count, likely):
    """Tokens, log-probabilities `(count, V)` of all, and what an engine lists: in any order."""
    generator = torch.Generator().manual_seed(0)
    rows = (4 * torch.randn(count, V, generator=generator)).log_softmax(-1)
    tokens = torch.randint(V, (count,), generator=generator).tolist()
    listed = []
    for token, row in zip(tokens, rows, strict=True):
        ids = [*{*row.topk(likely).indices.tolist(), token}]
        listed.append({ids[i]: row[ids[i]].item() for i in torch.randperm(len(ids), generator=generator).tolist()})
    return tokens, rows, listed


def test_rows_agree_with_a_dense_selection():
    tokens, rows, listed = listing(50, 7)
    answered = pickle.loads(pickle.dumps(answer_of(listed, tokens, 7)))  # as between processes
    assert [value.token for value in answered] == tokens
    expected = sparsify(rows, torch.tensor(tokens), 8, 0.0)
    for place, row in enumerate(rows_of(answered, [1] * 50, 8)):
        log_probs, rest, ids = row[:8], row[8], row[9:]
        used = int((ids >= 0).sum())
        assert ids[:used].tolist() == expected.token_ids[place, 1 : used + 1].tolist()
        assert used == (6 if len(listed[place]) == 7 else 7)
        assert log_probs[0] == answered[place] == pytest.approx(rows[place, tokens[place]].item(), rel=1e-6)
        assert math.exp(rest) == pytest.approx(1 - math.fsum(map(math.exp, log_probs)), abs=1e-6)


@pytest.mark.parametrize(("whose", "others"), [("sampled", 0), ("sampled", 7), ("likely", 7)])
@pytest.mark.parametrize("bad", [math.nan, -9999.0, None, "missing"])
def test_an_answer_without_a_number_is_no_old_policy(whose, others, bad):
    """Of the second token, and of no other one, whichever of its numbers it is."""
    tokens, _, listed = listing(20, others)
    whole = rows_of(answer_of(listed, tokens, others), [1] * 20, others + 1)
    assert np.isfinite(whole[:, [0, others + 1]]).all()
    for wrong in [tokens[1]] if whose == "sampled" else listed[1].keys() - {tokens[1]}:
        changed = listed[1] | {wrong: bad}
        if bad == "missing":  # all likely tokens: one less is what a likely sampled token leaves
            left = listed[1].keys() - {wrong} if whose == "sampled" else {tokens[1]}
            changed = {token: listed[1][token] for token in left}
        rows = rows_of(answer_of([listed[0], changed, *listed[2:]], tokens, others), [1] * 20, others + 1)
        assert np.isnan(rows[1, 0])
        np.testing.assert_array_equal(np.delete(rows, 1, 0), np.delete(whole, 1, 0))


@pytest.mark.parametrize("count", [0, 1])
def test_completions_of_no_token_and_of_one(count):
    tokens, _, listed = listing(count, 3)
    assert rows_of(answer_of(listed, tokens, 3), [1] * count, 4).shape == (count, 8)


class Flat:
    """vLLM's flat list of one completion, as far as it is read."""

    def __init__(self, listed):
        self.end_indices = np.cumsum([*map(len, listed)]).tolist()
        self.start_indices = [0, *self.end_indices[:-1]]
        self.token_ids = [*chain(*listed)]
        self.logprobs = [*chain.from_iterable(row.values() for row in listed)]


class Colocated:
    """TRL's `VLLMGeneration` with an engine that two ranks share, of which this one has the second half."""

    mode = "colocate"

    def __init__(self, completions, listed, take=lambda tokens: tokens):
        made = [
            SimpleNamespace(token_ids=tokens, logprobs=Flat(rows))
            for tokens, rows in zip(completions, listed, strict=True)
        ]
        self.config = SimpleNamespace(max_logprobs=4)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=self.config))
        self.llm.generate = lambda: [SimpleNamespace(outputs=[one]) for one in made]
        self.generation_kwargs, self.take, self.made = {}, take, made

    def generate(self):
        own = self.llm.generate()[len(self.made) // 2 :]
        assert all(each.outputs[0].logprobs is None for each in own), "TRL would sort an object for every listed token"
        return [[1]] * len(own), [self.take(each.outputs[0].token_ids) for each in own], None, None


def colocated(*lengths, likely=5, **options):
    """Such an engine of completions with these lengths, what this rank must get, and its recorder."""
    tokens, _, listed = listing(sum(lengths), likely)
    ends = [0, *np.cumsum(lengths).tolist()]
    pieces = [slice(*pair) for pair in itertools.pairwise(ends)]
    generation = Colocated([tokens[piece] for piece in pieces], [listed[piece] for piece in pieces], **options)
    recorder = SimpleNamespace(size=likely + 1, answered=None)
    engine_policy.ask_for_likely_tokens(generation, recorder)
    own = pieces[len(pieces) // 2 :]
    expected = [rows_of(answer_of(listed[x], tokens[x], likely), [1] * len(tokens[x]), likely + 1) for x in own]
    return generation, [tokens[x] for x in own], expected, recorder


@pytest.mark.parametrize("take", [lambda tokens: tokens, list])
def test_a_colocated_engine_answers_in_flat_lists(take):
    """Also if TRL copies the lists of tokens."""
    generation, tokens, expected, recorder = colocated(3, 5, 4, 1, take=take)
    assert generation.logprobs == generation.config.max_logprobs == 5
    assert generation.generation_kwargs == {"flat_logprobs": True, "detokenize": False}
    _, ids, log_probs, _ = generation.generate()
    assert ids == tokens
    for row, wanted in zip(log_probs, expected, strict=True):
        np.testing.assert_array_equal(rows_of([value for (value,) in row], [1] * len(row), 6), wanted)
    assert recorder.answered == [[value for (value,) in row] for row in log_probs]


def test_completions_whose_numbers_cannot_be_told_are_refused():
    """vLLM did not sample them, or copies fit both ranks: equal completions of other prompts have other numbers."""
    with pytest.raises(RuntimeError, match="in 0 places among the 2"):
        colocated(6, 6, take=lambda tokens: tokens[1:])[0].generate()
    generation, *_ = colocated(4, 4, take=list)
    generation.made[0].token_ids = list(generation.made[1].token_ids)
    with pytest.raises(RuntimeError, match="in 2 places among the 2"):
        generation.generate()


def test_a_rollout_function_that_asks_vllm_itself_gets_what_vllm_says():
    generation, *_ = colocated(6, 6)
    lists = [each.logprobs for each in generation.made]
    assert [each.outputs[0].logprobs for each in generation.llm.generate()] == lists
    generation.generate()
    generation.made[1].logprobs = lists[1]
    assert generation.llm.generate()[1].outputs[0].logprobs is lists[1], "after a generation of TRL's, too"


@pytest.mark.parametrize("change", [lambda flat: flat.end_indices.pop(), lambda flat: flat.logprobs.append(-1.0)])
def test_flat_lists_of_other_lengths_are_refused(change):
    generation, *_ = colocated(6, 6)
    change(generation.made[1].logprobs)
    with pytest.raises(ValueError, match="The engine sampled 6 tokens"):
        generation.generate()


@pytest.mark.parametrize(("change", "said"), [
    (lambda ids, values: ids[0][2].pop(), "5 ids at 3 positions and 6 log-probabilities at 3"),
    (lambda ids, values: (ids[0].pop(), values[0].pop()), "The engine sampled 3 tokens"),
])  # fmt: skip
def test_nested_lists_of_other_lengths_are_refused(change, said):
    ids, values = ([[[start, start + 1] for start in (1, 2, 3)] for _ in range(2)] for _ in range(2))
    change(ids, values)
    generation = SimpleNamespace(mode="server", generate=lambda: ([[1]] * 2, [[1, 2, 3]] * 2, values, ids))
    engine_policy.ask_for_likely_tokens(generation, SimpleNamespace(size=3, answered=None))
    with pytest.raises(ValueError, match=said):
        generation.generate()


@pytest.mark.parametrize(
    ("others", "zero"), [(99, -math.inf), (100, "missing"), (101, -9999.0), (127, -math.inf), (127, "missing")]
)
def test_tokens_that_cannot_be_sampled_take_no_slot(others, zero):
    """A head of 128 rows of which 100 are tokens has −∞ for the others."""
    generator = torch.Generator().manual_seed(0)
    finite = (2 * torch.randn(20, 100, generator=generator)).log_softmax(-1)
    tokens = finite.exp().multinomial(1, generator=generator).flatten().tolist()
    listed = []
    for token, row in zip(tokens, finite, strict=True):
        ranked = row.argsort(descending=True).tolist() + list(range(100, 128))
        ranked = ranked[:others]
        listed.append({i: row[i].item() if i < 100 else zero for i in dict.fromkeys([*ranked, token])})
        listed[-1] = {i: value for i, value in listed[-1].items() if value != "missing"}
    rows = rows_of(answer_of(listed, tokens, others), [1] * 20, others + 1)
    expected = sparsify(finite, torch.tensor(tokens), min(others, 99) + 1, 0.0)
    for place, row in enumerate(rows):
        used = 1 + int((row[others + 2 :] >= 0).sum())
        assert used == 100 - (others == 99 and tokens[place] != finite[place].argmin().item())
        assert [tokens[place], *row[others + 2 : others + 1 + used].tolist()] == expected.token_ids[
            place, :used
        ].tolist()
        np.testing.assert_allclose(row[:used], finite[place][expected.token_ids[place, :used].long()], rtol=1e-6)
        assert not np.isfinite(row[used : others + 1]).any() and (row[others + 1 + used :] == -1).all()
    # With a number that is really missing, the mass is not complete
    likely = max((i for i in listed[0] if i != tokens[0]), key=lambda i: finite[0][i] if i < 100 else -math.inf)
    for bad in (math.nan, None, math.inf, zero):
        spoilt = {i: bad if i == likely else value for i, value in listed[0].items() if bad != "missing" or i != likely}
        rows = rows_of(answer_of([spoilt, *listed[1:]], tokens, others), [1] * 20, others + 1)
        assert np.isnan(rows[0]).all() and not np.isnan(rows[1:]).any()


@pytest.mark.parametrize("support_size", [1, 4])
def test_numbers_of_other_tokens_are_refused(support_size):
    """With a binary mask, too, as long as they are those of `generate`. A plain number has no id."""
    tokens, _, listed = listing(6, support_size - 1)
    answered = answer_of(listed, tokens, support_size - 1)
    assert len({*tokens}) == 6
    mask = [1, 1, 0, 1, 1, 1]
    check_tokens(answered, mask, tokens, "it")
    check_tokens([None, *map(float, answered[:5])], mask, tokens, "it")
    check_tokens([*answered[:2], 0.0, *answered[3:]], mask, tokens, "it")
    check_tokens([*answered[:2], answered[4], *answered[3:]], mask, tokens, "nothing is read of other tokens")
    with pytest.raises(ValueError, match="misaligned: 5 of 5"):
        check_tokens([*answered[1:], answered[0]], mask, tokens, "it")
    with pytest.raises(ValueError, match="misaligned: 1 of 5"):
        check_tokens([*answered[:5], answered[0]], mask, np.array(tokens), "it")


def test_numbers_without_likely_tokens_are_refused_except_for_binary_masks():
    with pytest.raises(ValueError, match="Give a `SampledLogProb`"):
        rows_of([-1.0], [1], 20)
    with pytest.raises(ValueError, match="of 1 other tokens, expected 19"):
        rows_of(read_answer([5], [2], [5, 6], [-1.0, -2.0], 1), [1], 20)
    assert not rows_of([-1.0, None], [0, 0], 20).any(), "nothing is read of other tokens"
    rows = rows_of([-1.0, SampledLogProb(-2.0), None, math.nan, -9999.0, -math.inf], [1, 0, 1, 1, 1, 1], 1)
    assert rows[0].tolist() == pytest.approx([-1.0, math.log(1 - math.exp(-1))]) and not rows[1].any()
    assert np.isnan(rows[2:]).all()
