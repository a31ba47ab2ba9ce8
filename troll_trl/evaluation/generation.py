"""Completions from a model, by vLLM or by transformers, each sample with a seed of its own."""

import gc
import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from troll_trl.evaluation.models import adapter_settings, end_ids

# What vLLM takes for `max_lora_rank`
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float  # 0 takes the most likely token
    top_p: float  # from the most likely tokens that hold this probability; 1 for all
    top_k: int  # from the most likely so many tokens; 0 for all
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt."""

    text: str  # without special tokens
    tokens: int  # the end-of-sequence token included
    truncated: bool  # at `max_new_tokens`


class Generator:
    """A loaded model, folder or hub name, that completes prompts, `batch_size` at a time. `max_length` is that of the
    longest prompt and completion, in tokens: vLLM would reserve memory for the model's whole context."""

    revision: str | None  # the model's commit on the hub, if it came from there

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        dtype: str,
        batch_size: int | None = None,
        revision: str | None = None,
        max_length: int | None = None,
    ):
        self.tokenizer, self._sampling = tokenizer, sampling
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_size = batch_size or self._default_batch_size()
        self._model = self._load(model, dtype, revision, max_length)

    def _default_batch_size(self) -> int:
        raise NotImplementedError

    def _load(self, model: str, dtype: str, revision: str | None, max_length: int | None) -> Any:
        raise NotImplementedError

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        """Completions of tokenized prompts, each drawn by its own seed."""
        raise NotImplementedError

    def close(self):
        """Free the memory of the model."""
        del self._model
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def sample_seed(seed: int, model: str, benchmark: str, problem: str, sample: int) -> int:
    """Seed of one sample, below 2^63. It stays the same, whatever else is sampled."""
    key = json.dumps([seed, model, benchmark, problem, sample]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


class SeededSampling(LogitsProcessor):
    """
    Draws each row's token from its own random numbers, and leaves that token alone for `generate` to take.

    `generate` draws for the whole batch from one stream, so that a sample would depend on its neighbours. Here row `i`
    takes the token at which the cumulative probability passes its number of this step: a draw from the distribution
    that the temperature, top-k and top-p leave. There is a seed for each row, and a number for each of its
    `max_new_tokens` steps; the padded prompts have `prompt_length` tokens.
    """

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int):
        numbers = [np.random.default_rng(seed).random(max_new_tokens) for seed in seeds]
        self._numbers = torch.from_numpy(np.stack(numbers))
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # input_ids: (rows, length); scores: (rows, vocabulary). float64, or a long tail would add up to nothing.
        cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
        step = input_ids.shape[1] - self._prompt_length
        number = self._numbers[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, number, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


class TransformersGenerator(Generator):
    """
    Batches through `transformers`' `generate`, padded on the left: 64 rows on a GPU and 16 on a CPU by default.

    Its continuous batching (`generate_batch`) draws all requests from one random stream: no sample could be made again
    by itself, and a resumed run would differ.
    """

    def _default_batch_size(self) -> int:
        return 64 if self.device == "cuda" else 16

    def _load(self, model: str, dtype: str, revision: str | None, max_length: int | None) -> Any:
        # A folder with an adapter loads its base model and the adapter on it
        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=dtype)
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # torn weights, or of other shapes
            raise ValueError(f"`model`: {model} cannot be loaded: {error}") from error
        self.revision = getattr(loaded.config, "_commit_hash", None)
        self._end_ids = end_ids(loaded.generation_config, self.tokenizer)
        # Or `generate` would fill in the model's own repetition penalty and the like
        loaded.generation_config = GenerationConfig()
        return loaded.to(self.device).eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        width = max(map(len, prompts))
        pad = self._end_ids[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=self._sampling.max_new_tokens, do_sample=False, eos_token_id=self._end_ids, pad_token_id=pad
        )
        output = self._model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=config,
            logits_processor=self._processors(seeds, width),
        )
        return [self._completion(row) for row in output[:, width:].tolist()]

    def _processors(self, seeds: Sequence[int], width: int) -> LogitsProcessorList:
        sampling = self._sampling
        processors = LogitsProcessorList()
        if sampling.temperature == 0:
            return processors
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(SeededSampling(seeds, width, sampling.max_new_tokens))
        return processors

    def _completion(self, row: list[int]) -> Completion:
        ends = [position for position, token in enumerate(row) if token in self._end_ids]
        tokens = row[: ends[0] + 1] if ends else row
        return Completion(self.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens), not ends)


def lora_room(adapter: dict[str, Any]) -> int:
    """The rank that vLLM reserves for a LoRA adapter with these settings: the next one that it has, for the largest of
    a layer."""
    largest = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    return next((rank for rank in _VLLM_LORA_RANKS if rank >= largest), largest)


class VllmGenerator(Generator):
    """Batches through vLLM, which schedules the rows by itself. Each request carries its own seed."""

    def _default_batch_size(self) -> int:
        return 512

    def _load(self, model: str, dtype: str, revision: str | None, max_length: int | None) -> Any:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        adapter = adapter_settings(model)
        base = adapter["base_model_name_or_path"] if adapter else model
        base_revision = None if adapter else revision
        config = AutoConfig.from_pretrained(base, revision=base_revision)
        self.revision = getattr(config, "_commit_hash", None)
        if dtype == "auto" and config.dtype is not None:
            # vLLM's own "auto" makes bfloat16 of float32
            dtype = str(config.dtype).removeprefix("torch.")
        self._adapter = LoRARequest("adapter", 1, model) if adapter else None
        self._end_ids = end_ids(_generation_config(base, base_revision), self.tokenizer)
        lora = {"enable_lora": True, "max_lora_rank": lora_room(adapter)} if adapter else {}
        # generation_config="vllm": or the model's own repetition penalty and the like would be filled in
        options = {"max_model_len": max_length, "generation_config": "vllm", **lora}
        return LLM(model=base, revision=base_revision, dtype=dtype, **options)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        from vllm import SamplingParams

        sampling = self._sampling
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=self._end_ids,
                seed=seed,
                detokenize=False,  # below, as with transformers: vLLM's text may begin with a blank, and lacks the end
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._model.generate(requests, params, lora_request=self._adapter, use_tqdm=False)
        return [
            Completion(
                self.tokenizer.decode(choice.token_ids, skip_special_tokens=True),
                len(choice.token_ids),
                choice.finish_reason == "length",
            )
            for choice in (output.outputs[0] for output in outputs)
        ]


def _generation_config(model: str, revision: str | None) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:  # not every model has one
        return None


def resolve_backend(backend: str) -> str:
    """`"auto"` is vLLM where it is installed and there is a GPU, else transformers."""
    installed = importlib.util.find_spec("vllm") is not None
    if backend == "vllm" and not installed:
        raise ValueError("`backend` is 'vllm', which is not installed. `pip install troll-trl[vllm]`, or leave it out.")
    if backend == "auto":
        return "vllm" if installed and torch.cuda.is_available() else "transformers"
    return backend
