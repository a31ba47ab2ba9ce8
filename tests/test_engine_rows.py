"""`old_policy: engine`: what an engine answers, and the rows of numbers that become of it."""

import math
import pickle
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from troll_trl.trainers import engine_policy
from troll_trl.trainers.engine_policy import SampledLogProb, read_answer, rows_of
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
    expected = sparsify(rows, torch.tensor(tokens), 8, 0.0)
    for place, row in enumerate(rows_of(answered, [1] * 50, 8)):
        log_probs, rest, ids = row[:8], row[8], row[9:]
        used = int((ids >= 0).sum())
        assert ids[:used].tolist() == expected.token_ids[place, 1 : used + 1].tolist()
        assert used == (6 if len(listed[place]) == 7 else 7)
        assert log_probs[0] == answered[place] == pytest.approx(rows[place, tokens[place]].item(), rel=1e-6)
        assert math.exp(rest) == pytest.approx(1 - math.fsum(map(math.exp, log_probs)), abs=1e-6)


@pytest.mark.parametrize(
    ("whose", "others"), [("sampled", 0), ("sampled", 2), ("sampled", 7), ("likely", 2), ("likely", 7)]
)
@pytest.mark.parametrize("bad", [math.nan, -9999.0, -math.inf, None, "missing"])
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


def test_a_colocated_engine_answers_in_flat_lists_and_a_rollout_function_in_its_own():
    """This rank has the second half of what its group samples. A list that was asked of `llm.generate` itself stays."""
    tokens, _, listed = listing(12, 5)
    halves = [slice(0, 6), slice(6, 12)]
    made = lambda logprobs, ids: SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)])
    config = SimpleNamespace(max_logprobs=4)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    llm.generate = lambda: [made(Flat(listed[half]), tokens[half]) for half in halves]

    def generate():
        (own,) = llm.generate()[1].outputs
        assert own.logprobs is None
        return [[1]], [own.token_ids], None, None

    generation = SimpleNamespace(mode="colocate", llm=llm, generation_kwargs={}, generate=generate)
    recorder = SimpleNamespace(support_size=6, answered=None)
    engine_policy.ask_for_likely_tokens(generation, recorder)
    assert generation.logprobs == config.max_logprobs == 5
    assert generation.generation_kwargs == {"flat_logprobs": True, "detokenize": False}
    _, ids, log_probs, _ = generation.generate()
    assert ids == [tokens[6:]]
    expected = rows_of(answer_of(listed[6:], tokens[6:], 5), [1] * 6, 6)
    np.testing.assert_array_equal(rows_of([value for (value,) in log_probs[0]], [1] * 6, 6), expected)
    assert recorder.answered == [[value for (value,) in log_probs[0]]]

    llm = SimpleNamespace(llm_engine=llm.llm_engine, generate=lambda: [made(listed, tokens)])
    engine_policy.ask_for_likely_tokens(SimpleNamespace(**vars(generation) | {"llm": llm}), recorder)
    assert llm.generate()[0].outputs[0].logprobs is listed


def test_numbers_without_likely_tokens_are_refused_except_for_binary_masks():
    with pytest.raises(ValueError, match="Give a `SampledLogProb`"):
        rows_of([-1.0], [1], 20)
    with pytest.raises(ValueError, match="of 1 other tokens, expected 19"):
        rows_of(read_answer([5], [2], [5, 6], [-1.0, -2.0], 1), [1], 20)
    assert not rows_of([-1.0, None], [0, 0], 20).any(), "nothing is read of other tokens"
    rows = rows_of([-1.0, SampledLogProb(-2.0), None, math.nan, -9999.0, -math.inf], [1, 0, 1, 1, 1, 1], 1)
    assert rows[0].tolist() == pytest.approx([-1.0, math.log(1 - math.exp(-1))]) and not rows[1].any()
    assert np.isnan(rows[2:]).all()
