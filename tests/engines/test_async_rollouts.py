"""What vLLM's answer says, through TRL's own rollout loop to a sample; and what is checked of server and worker."""

import asyncio
import json
import math
import multiprocessing
import pickle
import queue

import numpy as np
import pytest
import torch
from accelerate import PartialState
from async_engine import Engine, likely_tokens, make_trainer, no_reward
from tiny import saved_model, tiny_prompts, tiny_tokenizer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.async_rollout_worker import (
    RolloutGroup,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from troll_trl.experimental.async_grpo.engine import EngineRolloutLoop, sample_log_probs
from troll_trl.experimental.async_grpo.worker import WatchedRolloutLoop
from troll_trl.trainers.engine_rows import REST_FLOOR, rows_of
from troll_trl.trainers.vllm import check_server

K = 4


def distributions(rows, seed=0):
    logits = 3 * torch.randn(rows, 30, generator=torch.Generator().manual_seed(seed))
    return logits.log_softmax(-1)


def vllm_choice(token_ids, log_probs, most):
    """A choice of vLLM's completions endpoint: the sampled token first, then the most likely ones, perhaps with it."""
    top = []
    for token, row in zip(token_ids, log_probs, strict=True):
        ids = [token, *row.argsort(descending=True).tolist()[:most]]
        top.append({f"token_id:{i}": max(row[i].item(), -9999.0) for i in dict.fromkeys(ids)})
    values = [row[token].item() for token, row in zip(token_ids, log_probs, strict=True)]
    return {
        "token_ids": token_ids,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in token_ids],
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": [0] * len(token_ids),
        },
    }


@pytest.fixture(autouse=True)
def state():
    """Accelerate's loggers ask for it, in the child process too."""
    PartialState(cpu=True)


@pytest.fixture
def loop():
    """The loop that a worker runs in its child process."""
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = {}  # what a known chat template brings
    made = EngineRolloutLoop(
        support_size=K, hang_seconds=300, model_name="model", dataset=tiny_prompts(), reward_funcs=[first_token],
        eos_token_ids=[1],
        processing_class=tokenizer, rollout_buffer=queue.Queue(), model_version_value=multiprocessing.Value("i", 0),
        heartbeat_value=multiprocessing.Value("d", 0.0), failed_event=multiprocessing.Event(),
        exception_info_queue=queue.Queue(), metrics_queue=queue.Queue(), num_generations=2,
    )  # fmt: skip
    yield made
    made._loop.close()


def first_token(completion_ids, **kwargs):
    return [ids[0] / 30 for ids in completion_ids]


def answers(monkeypatch, *choices):
    """Have TRL's `_post` give these choices, after a way through JSON, and keep what it was asked."""
    asked, left = [], list(choices)

    async def post(self, path, payload, timeout, max_retries=3):
        asked.append((path, payload))
        return json.loads(json.dumps({"choices": [left.pop(0)]}))

    monkeypatch.setattr(_AsyncRolloutLoop, "_post", post)
    return asked


def expected_row(row, token):
    kept = likely_tokens(row, token, K)
    masses = [row[token].double().exp().item(), *(row[i].double().exp().item() for i in kept)]
    log_probs = [row[token].item(), *kept.values(), math.log(1 - sum(masses))]
    return log_probs, list(kept)


def assert_row(actual, row, token, in_top):
    """The sampled token, the most likely others, the rest, the ids; a slot is unused if the token is a likely one."""
    log_probs, ids = expected_row(row, token)
    if in_top:  # vLLM has given one token less
        log_probs, ids = [*log_probs[: K - 1], -math.inf, None], [*ids[: K - 2], -1]
        log_probs[-1] = math.log(1 - np.exp(np.array(log_probs[:-1])).sum())
    np.testing.assert_allclose(actual[: K + 1], log_probs, rtol=2e-6)
    assert actual[:K].tolist() == [float(np.float32(x)) for x in log_probs[:K]], "not bit for bit"
    assert actual[K + 1 :].tolist() == ids


def test_an_answer_becomes_the_old_policy_of_its_tokens(loop, monkeypatch):
    """Two turns in one row, whose context has none; a second conversation is rewritten, so that TRL forks it."""
    log_probs = distributions(12)
    tokens = [
        row.argsort(descending=True)[place].item() for row, place in zip(log_probs, [0, 9, 2, 20] * 3, strict=True)
    ]
    turns = [slice(0, 4), slice(4, 6), slice(6, 9), slice(9, 12)]
    asked = answers(monkeypatch, *[vllm_choice(tokens[turn], log_probs[turn], K - 1) for turn in turns])
    outputs = [asyncio.run(loop._generate_one_turn([5, 6])) for _ in turns]
    assert [ids for ids, _ in outputs] == [tokens[turn] for turn in turns]
    path, payload = asked[0]
    assert path == "/v1/completions" and payload["logprobs"] == K - 1 and payload["return_tokens_as_token_ids"] is True
    assert payload["return_token_ids"] is True and payload["prompt"] == [5, 6]

    prompts = [[5, 6], [5, 6, *tokens[turns[0]], 8, 9], [5, 6], [5, 6, 7]]
    records = [TurnRecord(prompt, *output) for prompt, output in zip(prompts, outputs, strict=True)]
    sequences = [_chain_to_sequences(pair, "id", 1)[0] for pair in (records[:2], records[2:])]
    assert [len(rows) for rows in sequences] == [1, 2]
    group = RolloutGroup(
        prompts=["p", "p"], reward_kwargs={}, completions=["c", "c"], completions_sequences=sequences,
        completions_ids=[tokens[:6], tokens[6:]], tool_call_counts=[0, 0], tool_failure_counts=[0, 0], model_version=3,
        group_id=7, env_rewards=[None, None], rollout_rewards=[None, None],
    )  # fmt: skip
    samples = asyncio.run(loop._score_group(group))
    wrong = sequences[1][1].old_log_probs
    wrong.append(wrong.pop(3))
    with pytest.raises(ValueError, match="`logprobs` of a sample of group 7 are misaligned: 3 of 3 numbers"):
        asyncio.run(loop._score_group(group))
    assert [sample.input_ids.tolist() for sample in samples] == [
        [5, 6, *tokens[:4], 8, 9, *tokens[4:6]],
        [5, 6, *tokens[6:9]],
        [5, 6, 7, *tokens[9:12]],
    ]
    in_top = [
        token in row.argsort(descending=True)[: K - 1].tolist() for token, row in zip(tokens, log_probs, strict=True)
    ]
    assert True in in_top and False in in_top
    place = 0
    for sample in samples:
        sample = pickle.loads(pickle.dumps(sample))  # through the queue between the processes
        assert sample.old_log_probs.dtype == np.float32 and sample.old_log_probs.shape == (len(sample.input_ids), 2 * K)
        assert sample.model_version == 3
        for old, trained in zip(sample.old_log_probs, sample.completion_mask, strict=True):
            if trained:
                assert_row(old, log_probs[place], tokens[place], in_top[place])
                place += 1
            else:
                assert not old.any()
    assert place == 12


def spoilt(change):
    choice = vllm_choice([1, 2, 3], distributions(3), K - 1)
    change(choice)
    return choice


@pytest.mark.parametrize(("change", "bad"), [
    (lambda c: c["logprobs"]["token_logprobs"].__setitem__(1, None), [1]),
    (lambda c: c["logprobs"]["token_logprobs"].__setitem__(1, -9999.0), [1]),
    (lambda c: c["logprobs"]["token_logprobs"].pop(), [2]),
    (lambda c: c["logprobs"]["top_logprobs"].__setitem__(0, None), [0]),
    (lambda c: c["logprobs"]["top_logprobs"][0].popitem(), []),  # one more than asked for was given
    (lambda c: [c["logprobs"]["top_logprobs"][0].popitem() for _ in range(2)], [0]),
    (lambda c: c["logprobs"]["top_logprobs"][2].update({"token_id:29": -9999.0, "token_id:28": -0.1}), []),
    (lambda c: c["logprobs"]["top_logprobs"].__setitem__(2, {"token_id:3": -1.0, "token_id:4": -9999.0,
                                                             "token_id:5": -9999.0}), [2]),
    (lambda c: c.update(logprobs=None), [0, 1, 2]),
])  # fmt: skip
def test_tokens_of_which_the_answer_lacks_a_number_are_nan(change, bad, loop, monkeypatch):
    """Missing, None, vLLM's −9999, or fewer tokens than were asked for: the queue then drops the sample."""
    answers(monkeypatch, spoilt(change))
    ids, log_probs = asyncio.run(loop._generate_one_turn([5]))
    rows = rows_of(log_probs, [1, 1, 1], K)
    assert ids == [1, 2, 3] and np.flatnonzero(np.isnan(rows).any(1)).tolist() == bad


def test_the_rest_of_a_certain_distribution_has_the_floors_mass():
    """Rounding made `1 − Σ` negative, or 0, whose logarithm forbids all other tokens."""
    rows = sample_log_probs([1, 1, 0], [1e-7, -1e-3, -2.0], [{3: -20.0}, {}, {}], 3)
    assert rows[0, :4].tolist() == pytest.approx([1e-7, -20.0, -math.inf, math.log(REST_FLOOR)])
    assert rows[0, 4:].tolist() == [3, -1]
    assert rows[1, 3] == pytest.approx(math.log(1 - math.exp(-1e-3)), rel=1e-6)
    assert not rows[2].any()
    with pytest.raises(ValueError, match="has 2 tokens at position 1, expected at most 1"):
        sample_log_probs([0, 1], [-1.0, -1.0], [{3: -2.0, 4: -2.0}] * 2, 2)


@pytest.mark.parametrize("lengths", [(3, 3, 2), (3, 2, 3), (2, 3, 3)])
def test_lists_of_other_lengths_are_refused(lengths):
    mask, numbers, others = lengths
    said = f"`completion_mask` has {mask} tokens, `log_probs` {numbers} and `others` {others}"
    with pytest.raises(ValueError, match=said):
        sample_log_probs([1] * mask, [-1.0] * numbers, [{}] * others, 3)


def test_tokens_that_cannot_be_sampled_take_no_slot():
    """A worker of one's own passes on −∞ for them: the sample was dropped. With other mass left, it still is."""
    half = math.log(0.5)
    rows = sample_log_probs([1, 1], [half, half], [{3: half, 4: -math.inf}, {3: -2.0, 4: -math.inf}], 4)
    assert rows[0].tolist() == pytest.approx([half, half, -math.inf, -math.inf, math.log(REST_FLOOR), 3, -1, -1])
    assert np.isnan(rows[1]).all()


class Client:
    server_url = "http://localhost:8000"

    def __init__(self, **model_config):
        self.model_config = model_config

    def wait_for_server_ready(self):
        pass

    def get_server_info(self):
        return {"model_config": self.model_config}


@pytest.mark.parametrize(("mode", "most", "support_size", "message"), [
    ("raw_logprobs", 20, 20, "`--logprobs-mode processed_logprobs --max-logprobs 20`"),
    ("processed_logprobs", 20, 64, "`--logprobs-mode processed_logprobs --max-logprobs 63`"),
    ("raw_logprobs", 20, None, "`--logprobs-mode processed_logprobs --max-logprobs 20`"),
    ("processed_logprobs", 19, 20, None),
    ("processed_logprobs", -1, 64, None),
    ("processed_logprobs", 0, None, None),
])  # fmt: skip
def test_the_server_must_say_what_the_trust_region_reads(mode, most, support_size, message):
    client = Client(logprobs_mode=mode, max_logprobs=most)
    if message is None:
        return check_server(client.get_server_info(), client.server_url, support_size)
    with pytest.raises(ValueError, match=f"runs with `--logprobs-mode {mode}` and `--max-logprobs {most}`.*{message}"):
        check_server(client.get_server_info(), client.server_url, support_size)


@pytest.mark.parametrize(("options", "support_size"), [
    ({"support_size": 8}, 8),
    ({"support_size": 500}, 100),  # the vocabulary
    ({"trust_region": "mask"}, None),
])  # fmt: skip
def test_trls_worker_runs_our_loop(options, support_size, monkeypatch, tmp_path):
    """It is pickled for its child process. `train` asks the server first."""
    folder = saved_model(tmp_path / "model")
    monkeypatch.setattr(trl_worker, "is_vllm_available", lambda: True)
    monkeypatch.setattr(trl_worker, "is_aiohttp_available", lambda: True)

    engine = Engine(folder)
    trainer = make_trainer(folder, tmp_path, engine, rollout_worker=None, reward_funcs=[no_reward], **options)
    worker = trainer.rollout_worker
    assert worker._loop_cls is (WatchedRolloutLoop if support_size is None else EngineRolloutLoop)
    assert worker._loop_kwargs.get("support_size") == support_size
    pickle.dumps((worker._loop_cls, worker._loop_kwargs))
    assert worker._loop_kwargs["min_p"] == 0.0, "vLLM would take that of the model's generation_config.json"
    trainer.vllm_client = Client(logprobs_mode="raw_logprobs", max_logprobs=20)
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        trainer.train()


@pytest.mark.parametrize(("given", "message"), [
    ({"top_k": 5}, "`top_k=5` is not supported"),
    ({"min_p": 0.1}, "`min_p=0.1` is not supported"),
    ({"temperature": 0.7}, "`temperature` is 0.7, and the trainer's is 1.0"),
])  # fmt: skip
def test_a_worker_of_trls_class_samples_from_the_policy_too(given, message, monkeypatch, tmp_path):
    """One that a user makes, as for OpenEnv, has sampling options of its own."""
    folder = saved_model(tmp_path / "model")
    for available in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(trl_worker, available, lambda: True)
    make = lambda **options: make_trainer(
        folder, tmp_path, Engine(folder), rollout_worker=trl_worker.AsyncRolloutWorker(**options), trust_region="mask"
    )
    assert make().rollout_worker._loop_kwargs["min_p"] == 0.0
    with pytest.raises(ValueError, match=message):
        make(**given)
