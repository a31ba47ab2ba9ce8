"""Completions from a model, by vLLM or by transformers, each sample with a seed of its own."""

import contextlib
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from math_answers.evaluation.arguments import EvaluationArguments
from math_answers.evaluation.loading import load_model, vllm_ignores
from math_answers.models import adapter_settings, base_of, end_ids


class Completion(NamedTuple):
    """A completion of a prompt."""

    text: str  # without special tokens
    tokens: int  # the end-of-sequence token included
    truncated: bool  # at `max_new_tokens`


def sample_seed(seed: int, model: str, benchmark: str, problem: str, sample: int) -> int:
    """Seed of one sample, below 2^63. It stays the same, whatever else is sampled."""
    key = json.dumps([seed, model, benchmark, problem, sample]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


class SeededSampling(LogitsProcessor):
    """
    Draws each row's token from its own random numbers, and leaves that token alone for `generate` to take.

    `generate` draws for the whole batch from one stream: a sample would depend on its neighbours. Here each row takes
    the token at which the cumulative probability passes its number of this step. That is a draw from the distribution
    that temperature, top-k and top-p leave. Each row has a seed, and a number for each of its `max_new_tokens` steps;
    the padded prompts have `prompt_length` tokens.
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


class TransformersGenerator:
    """
    Batches through `transformers`' `generate`, padded on the left: 64 rows on a GPU and 16 on a CPU by default.

    Its continuous batching (`generate_batch`) draws all requests from one random stream. No sample could then be
    generated again alone, and a resumed run would differ.
    """

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, args: EvaluationArguments, max_length: int):
        self._tokenizer, self._args = tokenizer, args
        self.batch_size = args.batch_size or (64 if torch.cuda.is_available() else 16)
        loaded = load_model(model, args.revision, args.dtype, trust_remote_code=args.trust_remote_code)
        self.revision: str | None = getattr(loaded.config, "_commit_hash", None)  # on the hub
        self._end_ids = end_ids(loaded.generation_config, tokenizer)
        # `generate` would fill in the model's own repetition penalty and the like
        loaded.generation_config = GenerationConfig()
        self._virtual_tokens = (adapter_settings(model) or {}).get("num_virtual_tokens")
        self._model = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        """Completions of tokenized prompts, each drawn by its own seed."""
        if self._virtual_tokens and len(set(map(len, prompts))) > 1:  # padding after them would change the completion
            rows = groupby(zip(prompts, seeds, strict=True), lambda row: len(row[0]))
            return [one for _, group in rows for one in self.generate(*map(list, zip(*group, strict=True)))]
        width = max(map(len, prompts))
        pad = self._end_ids[0] if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=self._args.max_new_tokens, do_sample=False, eos_token_id=self._end_ids, pad_token_id=pad
        )
        device = self._model.device
        processors = LogitsProcessorList(self._processors(seeds, width))
        inputs = {"attention_mask": mask.to(device), "generation_config": config, "logits_processor": processors}
        output = self._model.generate(input_ids=ids.to(device), **inputs)
        return [self._completion(row) for row in output[:, width:].tolist()]

    def _processors(self, seeds: Sequence[int], width: int) -> Iterator[LogitsProcessor]:
        args = self._args
        if args.temperature == 0:
            return
        yield TemperatureLogitsWarper(float(args.temperature))
        if args.top_k > 0:
            yield TopKLogitsWarper(args.top_k)
        if args.top_p < 1:
            yield TopPLogitsWarper(args.top_p)
        yield SeededSampling(seeds, width, args.max_new_tokens)

    def _completion(self, row: list[int]) -> Completion:
        ends = [position for position, token in enumerate(row) if token in self._end_ids]
        tokens = row[: ends[0] + 1] if ends else row
        return Completion(self._tokenizer.decode(tokens, skip_special_tokens=True), len(tokens), not ends)


def lora_room(rank: int) -> int:
    """The rank that vLLM reserves for a LoRA adapter: a power of two, 8 or more."""
    return 1 << (max(8, rank) - 1).bit_length()


class VllmGenerator:
    """Batches through vLLM, which schedules the rows by itself. Each request carries its own seed."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, args: EvaluationArguments, max_length: int):
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._tokenizer, self._args = tokenizer, args
        self.batch_size = args.batch_size or 512
        adapter = adapter_settings(model)
        base, revision = base_of(model, args.revision)
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=args.trust_remote_code)
        self.revision: str | None = getattr(config, "_commit_hash", None)  # on the hub
        # vLLM's own "auto" makes bfloat16 of float32
        own = args.dtype == "auto" and config.dtype is not None
        dtype = str(config.dtype).removeprefix("torch.") if own else args.dtype
        self._adapter = LoRARequest("adapter", 1, model) if adapter else None
        own_config = None
        with contextlib.suppress(OSError):  # not every model has one
            own_config = GenerationConfig.from_pretrained(base, revision=revision)
        self._end_ids = end_ids(own_config, tokenizer)
        lora = {"enable_lora": True, "max_lora_rank": lora_room(adapter["r"])} if adapter else {}
        # Without `max_model_len`, vLLM reserves memory for the whole context. With another `generation_config`, it adds
        # the model's own repetition penalty and similar options
        options = {"max_model_len": max_length, "generation_config": "vllm", **lora}
        options |= {"trust_remote_code": args.trust_remote_code}
        self._model = LLM(model=base, revision=revision, dtype=dtype, **options)

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        """Completions of tokenized prompts, each drawn by its own seed."""
        from vllm import SamplingParams

        args = self._args
        params = [
            SamplingParams(
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k or -1,
                max_tokens=args.max_new_tokens,
                stop_token_ids=self._end_ids,
                seed=seed,
                detokenize=False,  # vLLM's text may begin with a blank, and lacks the end
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._model.generate(requests, params, lora_request=self._adapter, use_tqdm=False)
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        choices = (output.outputs[0] for output in outputs)
        return [Completion(decode(one.token_ids), len(one.token_ids), one.finish_reason == "length") for one in choices]


def resolve_backend(backend: str, models: Mapping[str, str]) -> str:
    """The name of a backend: `"auto"` is vLLM if it is installed, there is a GPU, and it can serve all models, else
    transformers. `models` maps their names to what is loaded."""
    ignored = {model: what for model, place in models.items() if (what := vllm_ignores(place))}
    installed = importlib.util.find_spec("vllm") is not None
    if backend == "vllm" and not installed:
        raise ValueError(
            "`backend` is 'vllm', which is not installed. Leave it out, or install it: "
            'pip install "troll-trl[vllm] @ git+https://github.com/troll-trl/troll_trl"'
        )
    for model, what in ignored.items() if backend == "vllm" else ():
        raise ValueError(
            f"`backend` is 'vllm', which does not apply {what} of the adapter {model}. Use the backend 'transformers', "
            "or merge the adapter into its model: `merge_and_unload` and `save_pretrained` of PEFT."
        )
    if backend == "auto":
        return "vllm" if installed and torch.cuda.is_available() and not ignored else "transformers"
    return backend
