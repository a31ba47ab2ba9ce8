"""Rollouts that do not come from `generate` alone: a fake vLLM, a rollout function and tools."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model
from tests.trl_comparison import EQUIVALENT, assert_same_movement, logged, make_trainer, train_both, weights


class FakeVLLM:
    """Stands where TRL's `VLLMGeneration` does, for what a real engine cannot be made to do: one in seven of the
    sampler's log-probabilities is missing, as vLLM reports a NaN. Completions and log-probabilities, which differ from
    the policy's, depend on the number of calls alone. The real engine is in `test_vllm_colocate.py`."""

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
        values = [(-4.2 - 0.8 * torch.rand(length, generator=generator)).tolist() for length in lengths]
        log_probs = [[[None if (7 * i + t) % 7 == 3 else x] for t, x in enumerate(row)] for i, row in enumerate(values)]
        return prompts, completions, log_probs, None


@pytest.mark.parametrize("correction", [
    {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
    # Without it, no pass would score the rollout of a run on its own policy
    {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_cap": 3.0, "steps_per_generation": 1},
])  # fmt: skip
def test_missing_log_probs(correction, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
    options = {"use_vllm": True, "steps_per_generation": 2, "max_steps": 4} | correction
    start, trl_run, troll = train_both("grpo", tmp_path, **options)
    assert_same_movement(start, weights(trl_run), weights(troll))
    for key in ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean"):
        assert logged(troll, key) == pytest.approx(logged(trl_run, key), rel=1e-3)
    assert min(logged(troll, "sampling/importance_sampling_ratio/min")) < 0.9, "the sampler differs from the policy"
    # TRL's ratio divides by it also in a run on its own policy, where dropout would move it without a limit
    assert "old_sparse_logps" in troll._buffered_inputs[0]


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


# -- Tools ------------------------------------------------------------------------------------------------------------

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


def speak_tool_calls(trainer):
    """Make `generate` answer every second prompt with a tool call, and those with a tool's answer with words."""
    tokenizer, calls = trainer.processing_class, []

    def generate(input_ids, **kwargs):
        replies = []
        for i, text in enumerate(tokenizer.batch_decode(input_ids)):
            again = "<tool_response>" in text.rpartition("</tools>")[2]
            call = f'{{"name": "multiply", "arguments": {{"a": {2 + i}, "b": {3 + len(calls)}}}}}'
            wanted = f"<tool_call>\n{call}\n</tool_call><|im_end|>"
            replies.append(f"It is {i + len(calls)}.<|im_end|>" if again or i % 2 else wanted)
        calls.append(len(input_ids))
        ids = tokenizer(replies, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids], 1)

    trainer.model.generate = generate
    return calls


def test_tools(tmp_path):
    options = {"tools": [multiply], "dataset": chats(), "max_completion_length": 256, "max_tool_calling_iterations": 1}
    options |= {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 2, "max_steps": 4}
    runs = []
    for trainer_class, config_class, extra in EQUIVALENT["grpo"]:
        tokenizer = byte_tokenizer()
        model = tiny_model(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=2)
        options |= {"model": model, "tokenizer": tokenizer, "learning_rate": 1e-3}
        trainer = make_trainer(trainer_class, config_class, tmp_path, **options, **extra)
        start = weights(trainer)
        calls = speak_tool_calls(trainer)
        trainer.train()
        assert len(calls) == 4, "two rollout batches, each with answers to tool calls"
        runs.append(trainer)
    trl_run, troll = runs
    assert_same_movement(start, weights(trl_run), weights(troll))
    assert max(logged(troll, "tools/call_frequency")) == 0.5
    assert max(logged(troll, "tools/failure_frequency")) == 0.0
    # The tool's words are context, not actions: neither projected nor regressed on
    for inputs in troll._buffered_inputs:
        trained = (inputs["tool_mask"] * inputs["completion_mask"]).sum()
        assert trained < inputs["completion_mask"].sum()
        kept = inputs["old_token_ids"][..., 1:] >= 0
        assert kept.any(-1)[inputs["completion_mask"] == 1].all() and not kept[inputs["completion_mask"] == 0].any()
