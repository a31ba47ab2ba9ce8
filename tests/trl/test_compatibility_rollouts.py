"""Rollouts that do not come from `generate` alone: a fake vLLM, a rollout function, tools and environments."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import trl
from datasets import Dataset
from tiny import tiny_model, token_reward
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl_comparison import EQUIVALENT, assert_same_movement, logged, make_trainer, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


class FakeVLLM:
    """Stands where TRL's `VLLMGeneration` does, for what a real engine cannot be made to do: one in seven of the
    sampler's log-probabilities is missing, as vLLM reports a NaN. Completions and log-probabilities, which differ from
    the policy's, depend on the number of calls alone. The real engine is in `test_vllm_colocate.py`."""

    missing = True

    def __init__(self, **settings):
        self.calls = 0
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=64)))

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        generator = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        lengths = torch.randint(3, 9, (len(prompts),), generator=generator).tolist()
        completions = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
        # Around those of the tiny model, some −4.6
        log_probs = [(-4.2 - 0.8 * torch.rand(length, generator=generator)).tolist() for length in lengths]
        missing = [[self.missing and (7 * i + t) % 7 == 3 for t in range(n)] for i, n in enumerate(lengths)]
        log_probs = [
            [[None if gone else value] for value, gone in zip(row, gaps, strict=True)]
            for row, gaps in zip(log_probs, missing, strict=True)
        ]
        return prompts, completions, log_probs, None


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)


CORRECTIONS = {
    "token_truncate": {"vllm_importance_sampling_clip_max": 1.2},
    "token_mask": {"vllm_importance_sampling_clip_max": 1.5},
    "sequence_truncate": {"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": 0.1},
    "sequence_mask": {"vllm_importance_sampling_cap": 3.0},
}


@pytest.mark.parametrize(
    ("mode", "steps_per_generation"),
    [("token_truncate", 2), ("sequence_mask", 2)]
    + [pytest.param(mode, 1, marks=pytest.mark.slow) for mode in ("token_mask", "sequence_truncate")],
)
def test_missing_log_probs(mode, steps_per_generation, vllm, tmp_path):
    options = {"use_vllm": True, "vllm_importance_sampling_mode": mode, **CORRECTIONS[mode]}
    options |= {"steps_per_generation": steps_per_generation, "max_steps": 4}
    start, trl_run, troll = train_both("grpo", tmp_path, **options)
    assert_same_movement(start, weights(trl_run), weights(troll))
    assert troll.vllm_generation.calls == 4 // steps_per_generation == trl_run.vllm_generation.calls
    for key in ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean"):
        assert logged(troll, key) == pytest.approx(logged(trl_run, key), rel=1e-3)
    assert min(logged(troll, "sampling/importance_sampling_ratio/min")) < 0.9, "the sampler differs from the policy"
    # The correction needs the old policy, so that it is kept in an idle run too
    assert "old_sparse_logps" in troll._buffered_inputs[0]


def test_missing_log_probs_do_not_enter_the_projection(vllm, tmp_path, monkeypatch):
    """What vLLM reports weighs the loss; the trust region is around the weights that scored the rollout."""
    options = {"use_vllm": True, "max_steps": 2, "vllm_importance_sampling_mode": "token_truncate"}
    metrics = []
    for missing in (True, False):
        monkeypatch.setattr(FakeVLLM, "missing", missing)
        trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, learning_rate=0.0, **options)
        trainer.train()
        metrics.append([logged(trainer, key) for key in ("troll/policy_kl_max", "troll/rest_mass_mean")])
    assert metrics[0] == metrics[1]
    assert max(metrics[0][0]) < 1e-6, "the weights have not moved"


def rollout_function(prompts, trainer):
    """Token ids of one's own, a column for the reward, and every third token from elsewhere than the policy."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    completions = torch.randint(3, 100, (len(prompts), 6), generator=generator).tolist()
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": [[int(t % 3 != 2) for t in range(6)] for _ in prompts],
        "target": list(range(len(prompts))),
    }


def target_reward(completion_ids, target, **kwargs):
    return [float((ids[0] + goal) % 7) for ids, goal in zip(completion_ids, target, strict=True)]


def test_rollout_function_with_a_mask(tmp_path):
    options = {"rollout_func": rollout_function, "reward": target_reward, "steps_per_generation": 2, "max_steps": 4}
    start, trl_run, troll = train_both("grpo", tmp_path, **options)
    assert_same_movement(start, weights(trl_run), weights(troll))


# -- Tools and environments -------------------------------------------------------------------------------------------

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def byte_tokenizer():
    """A token for each byte, and Qwen3's chat template, which renders and parses tool calls."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL[:3])
    tokenizer.add_tokens(SPECIAL[3:])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer


def chats():
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i} x {i}?"}] for i in range(32)]})


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: First number.
        b: Second number.

    Returns:
        Their product.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return a * b


multiply_later.__doc__ = multiply.__doc__  # which the chat template shows


class Counter:
    """An environment with a state, a tool and a reward of its own."""

    def reset(self, **kwargs):
        self.total = 0
        return "Count."

    def add(self, amount: int) -> str:
        """
        Adds to the count.

        Args:
            amount: What to add.

        Returns:
            The count.
        """
        self.total += amount
        return f"The count is {self.total}."

    def get_reward(self) -> float:
        return float(self.total % 3)


def speak_tool_calls(trainer, call):
    """Make `generate` answer every second prompt with a tool call, and those with a tool's answer with words."""
    tokenizer, calls = trainer.processing_class, []

    def generate(input_ids, **kwargs):
        texts = tokenizer.batch_decode(input_ids)
        replies = []
        for i, text in enumerate(texts):
            again = "<tool_response>" in text.rpartition("</tools>")[2]
            arguments = call[1] % (2 + i, 3 + len(calls)) if call[1].count("%d") == 2 else call[1] % (2 + i)
            wanted = f'<tool_call>\n{{"name": "{call[0]}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
            replies.append(f"It is {i + len(calls)}.<|im_end|>" if again or i % 2 else wanted)
        calls.append(len(texts))
        ids = tokenizer(replies, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids], 1)

    trainer.model.generate = generate
    return calls


@pytest.mark.parametrize("kind", ["tool", pytest.param("asynchronous_tool", marks=pytest.mark.slow), "environment"])
def test_tools(kind, tmp_path):
    environment = kind == "environment"
    tool = multiply_later if kind == "asynchronous_tool" else multiply
    call = ("add", '{"amount": %d}') if environment else (tool.__name__, '{"a": %d, "b": %d}')
    options = {
        "tools": None if environment else [tool],
        "environment_factory": Counter if environment else None,
        "reward": None if environment else token_reward,
        "dataset": chats(),
        "max_completion_length": 256,
        "max_tool_calling_iterations": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "steps_per_generation": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
    }
    runs = []
    for trainer_class, config_class, extra in EQUIVALENT["grpo"]:
        tokenizer = byte_tokenizer()
        model = tiny_model(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=2)
        trainer = make_trainer(
            trainer_class, config_class, tmp_path, model=model, tokenizer=tokenizer, **options, **extra
        )
        start = weights(trainer)
        calls = speak_tool_calls(trainer, call)
        trainer.train()
        assert len(calls) == 4, "two rollout batches, each with answers to tool calls"
        runs.append(trainer)
    trl_run, troll = runs
    assert_same_movement(start, weights(trl_run), weights(troll))
    assert logged(troll, "tools/call_frequency") == logged(trl_run, "tools/call_frequency")
    assert max(logged(troll, "tools/call_frequency")) == 0.5
    assert max(logged(troll, "tools/failure_frequency")) == 0.0
    # The tool's words are context, not actions: neither projected nor regressed on
    for inputs in troll._buffered_inputs:
        trained = (inputs["tool_mask"] * inputs["completion_mask"]).sum()
        assert trained < inputs["completion_mask"].sum()
        kept = inputs["old_token_ids"][..., 1:] >= 0
        assert kept.any(-1)[inputs["completion_mask"] == 1].all() and not kept[inputs["completion_mask"] == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["use_transformers_continuous_batching", "use_transformers_paged"])
def test_continuous_batching(option, tmp_path):
    options = {option: True, "transformers_continuous_batching_config": {"max_memory_percent": 0.2}, "max_steps": 2}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    with patch.object(trainer.model, "generate_batch", wraps=trainer.model.generate_batch) as generate:
        trainer.train()
    (call,) = generate.call_args_list  # one rollout batch
    assert call.kwargs["continuous_batching_config"].max_memory_percent == 0.2
    assert len(logged(trainer, "troll/kl_max")) == 2
