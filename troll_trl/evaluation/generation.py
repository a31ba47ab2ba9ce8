"""Completions of a model, by vLLM or by transformers, and the loop that samples and scores what a folder lacks."""

import contextlib
import hashlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import AutoPeftModelForCausalLM
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from troll_trl.evaluation.arguments import SAMPLING_SETTINGS, EvaluationArguments
from troll_trl.evaluation.model_facts import adapter_settings, base_of, check_model, context_of, end_ids, saved_at
from troll_trl.evaluation.problems import Problem, load_problems
from troll_trl.evaluation.samples import SAMPLES, Sample, append, begin, key_of, read_finished, read_samples, replace
from troll_trl.evaluation.scoring import score
from troll_trl.rewards.answers import opened_thought, thought_decoder

logger = logging.getLogger(__name__)


class Completion(NamedTuple):
    """A completion of a prompt."""

    text: str  # without special tokens, except for the tags of thoughts
    tokens: int  # the end-of-sequence token included
    truncated: bool  # at `max_new_tokens`


class Job(NamedTuple):
    """A sample that is still to be made."""

    problem: Problem
    prompt: list[int]
    number: int


def generate_samples(args: EvaluationArguments, folder: Path) -> tuple[dict[str, Any], list[Sample]]:
    """Generate and score the samples that the folder lacks. Return the settings that made them, and the samples that
    `args` ask for: the folder may have more. Raises an `OSError` or a `ValueError` for what a user can correct, before
    anything is generated."""
    place = check_model(str(args.model), revision=args.revision)
    tokenizer = load_tokenizer(place, args)
    if args.enable_thinking is None and "enable_thinking" in str(tokenizer.chat_template):
        raise ValueError(
            f"`enable_thinking` is not set, and the chat template of {args.model} reads it. Set it as in the training "
            "(the shipped configs have false), or to true if a model of the hub should think."
        )
    settings = {name: getattr(args, name) for name in SAMPLING_SETTINGS} | {"saved_at": saved_at(place)}
    finished = read_finished(folder, settings, args.overwrite)
    benchmarks = load_problems(args)
    corrected = _correct_golds(finished, benchmarks, folder)
    problems = [problem for own in benchmarks.values() for problem in own[: args.max_problems]]
    prompts = [tokenize_prompt(tokenizer, problem.prompt, args.enable_thinking) for problem in problems]
    longest = check_lengths(problems, prompts, place, args)
    asked = {
        (problem.benchmark, problem.text, number): Job(problem, prompt, number)
        for problem, prompt in zip(problems, prompts, strict=True)
        for number in range(args.n * len(problem.golds))
    }
    done = asked.keys() & {key_of(sample) for sample in finished}
    jobs = [job for key, job in asked.items() if key not in done]
    if finished:
        logger.info(f"{folder} already has {len(done)} of the samples; adding {len(jobs)}.")
    if corrected:
        begin(folder, settings, args.overwrite)
        score(corrected)
        replace(folder, finished)
        logger.info(f"{len(corrected)} samples are scored anew, because their gold answers have changed.")
    if args.temperature == 0 and any(job.number > 0 for job in jobs):
        logger.warning("`temperature` is 0: all samples of a problem will be the same.")
    if jobs:
        kind = VllmGenerator if uses_vllm(args.backend) else TransformersGenerator
        generator = kind(place, tokenizer, args, longest)
        begin(folder, settings, args.overwrite)
        # Longest first: memory runs short at the start or never, and a batch has little padding
        jobs.sort(key=lambda job: -len(job.prompt))
        opened = opened_thought(tokenizer.decode(jobs[0].prompt))
        with tqdm(desc=args.model, initial=len(done), total=len(asked), unit="sample") as bar:
            for start in range(0, len(jobs), generator.batch_size):
                batch = jobs[start : start + generator.batch_size]
                append(folder, _samples_of(batch, generator, args.seed, opened))
                bar.update(len(batch))
    samples = {key_of(sample): sample for sample in read_samples(folder / SAMPLES)}
    return settings, [samples[key] for key in asked]


def _correct_golds(finished: list[Sample], benchmarks: dict[str, list[Problem]], folder: Path) -> list[Sample]:
    """Give the samples of a folder the current gold answers, and return those that must be scored again. Raises a
    `ValueError` if a benchmark no longer has one of their problems: its row would mix two benchmarks."""
    problems = {(problem.benchmark, problem.text): problem for own in benchmarks.values() for problem in own}
    corrected = []
    for sample in finished:
        if sample["benchmark"] not in benchmarks:
            continue
        problem = problems.get((sample["benchmark"], sample["problem"]))
        if problem is None or problem.digest != sample.get("digest"):
            raise ValueError(
                f"{folder} has samples of another {sample['benchmark']!r}: this one lacks, or words differently, the "
                f"problem {sample['problem'][:80]!r}. Give the benchmark another name or another `output`, or "
                "`overwrite` to discard the samples."
            )
        gold = _gold(problem, sample["sample"])
        if gold != sample["gold"]:
            sample["gold"] = gold
            corrected.append(sample)
    return corrected


def _gold(problem: Problem, number: int) -> str:
    return problem.golds[number % len(problem.golds)]


def _samples_of(batch: list[Job], generator: Any, seed: int, opened_by_prompt: str) -> list[Sample]:
    seeds = [sample_seed(seed, job.problem.benchmark, job.problem.text, job.number) for job in batch]
    completions = generator.generate([job.prompt for job in batch], seeds)
    samples = [
        Sample(
            benchmark=job.problem.benchmark,
            problem=job.problem.text,
            sample=job.number,
            gold=_gold(job.problem, job.number),
            digest=job.problem.digest,
            # Without the tag that ends the prompt, a thought that is cut off would pass for an answer
            completion=opened_by_prompt + completion.text,
            tokens=completion.tokens,
            truncated=completion.truncated,
        )
        for job, completion in zip(batch, completions, strict=True)
    ]
    score(samples)
    return samples


def sample_seed(seed: int, benchmark: str, problem: str, sample: int) -> int:
    """Make the seed of one sample, below 2^63. It stays the same, whatever else is sampled."""
    key = json.dumps([seed, benchmark, problem, sample]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


# -- Prompts ----------------------------------------------------------------------------------------------------------


def load_tokenizer(model: str, args: EvaluationArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. An adapter may have its own; otherwise it is the base model's."""
    source = model, args.revision
    if adapter_settings(model) and not Path(model, "tokenizer_config.json").is_file():
        source = base_of(model, args.revision)
    try:
        return AutoTokenizer.from_pretrained(source[0], revision=source[1], trust_remote_code=args.trust_remote_code)
    except json.JSONDecodeError as error:  # it names no file
        raise ValueError(f"`model`: a tokenizer's file of {source[0]} is not JSON: {error}.") from None


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], enable_thinking: bool | None = None
) -> list[int]:
    """
    Tokenize a prompt, up to where the answer begins.

    A chat template writes the messages and opens the assistant's turn. Without one, as for a base model, an empty line
    follows the text of each message, and the tokenizer adds its special tokens, except for one that ends the text.
    """
    if tokenizer.chat_template is None:
        ids = tokenizer("".join(f"{message['content']}\n\n" for message in messages))["input_ids"]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # `add_eos_token`
            ids.pop()
    else:
        thinking: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **thinking)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:  # transformers may make up an empty tokenizer for a folder without one
        raise ValueError("A prompt has no tokens. Save the model's tokenizer in its folder.")
    return ids


def check_lengths(
    problems: Sequence[Problem], prompts: Sequence[list[int]], model: str, args: EvaluationArguments
) -> int:
    """Return the maximum length of a prompt with its completion. Raises a `ValueError` if it exceeds the context."""
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    needed = len(prompts[longest]) + args.max_new_tokens
    context = context_of(model, args.revision, args.trust_remote_code)
    if context is not None and needed > context:
        raise ValueError(
            f"The longest prompt has {len(prompts[longest])} tokens and `max_new_tokens` is {args.max_new_tokens}, but "
            f"{args.model} was made for {context} in all. Lower `max_new_tokens`, or remove the problem that begins "
            f"with {problems[longest].text[:80]!r}."
        )
    return needed


# -- Backends ---------------------------------------------------------------------------------------------------------


def uses_vllm(backend: str) -> bool:
    """Return whether vLLM generates. Raises a `ValueError` if it should and is not installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if backend == "vllm" and not installed:
        raise ValueError(
            "`backend` is 'vllm', but vLLM is not installed. Leave `backend` out, or install vLLM: "
            'pip install "troll-trl[vllm] @ git+https://github.com/troll-trl/troll_trl"'
        )
    return backend == "vllm" or (backend == "auto" and installed and torch.cuda.is_available())


def load_model(model: str, args: EvaluationArguments) -> Any:
    """Load a model, or its base model with an adapter, on the CPU. Raises a `ValueError` for a checkpoint that lacks
    weights: transformers would draw them at random."""
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    if adapter_settings(model):
        return AutoPeftModelForCausalLM.from_pretrained(model, **options)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        model, revision=args.revision, output_loading_info=True, **options
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"`model`: {model} lacks {len(missing)} weights that its config asks for: {missing[:3]}.")
    return loaded


class TransformersGenerator:
    """Batches through `transformers`' `generate`, padded on the left: 64 rows on a GPU and 16 on a CPU by default. A
    batch is drawn from one random stream."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, args: EvaluationArguments, max_length: int):
        self._decode = thought_decoder(tokenizer)
        self.batch_size = args.batch_size or (64 if torch.cuda.is_available() else 16)
        loaded = load_model(model, args)
        self._end_ids = end_ids(loaded.generation_config, tokenizer)
        pad = self._end_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        self._config = GenerationConfig(
            max_new_tokens=args.max_new_tokens,
            eos_token_id=self._end_ids,
            pad_token_id=pad,
            do_sample=args.temperature > 0,
            **(sampling if args.temperature > 0 else {}),
        )
        # `generate` would fill in the model's own repetition penalty and the like
        loaded.generation_config = GenerationConfig()
        self._model = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        """Complete tokenized prompts; the first seed is the batch's."""
        torch.manual_seed(seeds[0])
        width = max(map(len, prompts))
        pad = self._config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._model.device
        output = self._model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self._config
        )
        return [self._completion(row) for row in output[:, width:].tolist()]

    def _completion(self, row: list[int]) -> Completion:
        ends = [position for position, token in enumerate(row) if token in self._end_ids]
        tokens = row[: ends[0] + 1] if ends else row
        return Completion(self._decode(tokens), len(tokens), not ends)


class VllmGenerator:
    """Batches through vLLM, which schedules the rows by itself. Each request carries its own seed. An adapter is merged
    into its base model, since vLLM serves only plain LoRA."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, args: EvaluationArguments, max_length: int):
        from vllm import LLM

        self._decode = thought_decoder(tokenizer)
        self._args = args
        self.batch_size = args.batch_size or 512
        self._merged = tempfile.TemporaryDirectory(prefix="merged-")
        revision = args.revision
        if adapter_settings(model):
            load_model(model, args).merge_and_unload().save_pretrained(self._merged.name)
            tokenizer.save_pretrained(self._merged.name)
            model = self._merged.name
            revision = None
        trusted = args.trust_remote_code
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trusted)
        # vLLM's own "auto" turns float32 into bfloat16
        own = args.dtype == "auto" and config.dtype is not None
        own_config = None
        with contextlib.suppress(OSError):  # not every model has one
            own_config = GenerationConfig.from_pretrained(model, revision=revision)
        self._end_ids = end_ids(own_config, tokenizer)
        self._model = LLM(
            model=model,
            revision=revision,
            dtype=str(config.dtype).removeprefix("torch.") if own else args.dtype,
            max_model_len=max_length,  # or vLLM reserves memory for the whole context
            generation_config="vllm",  # or it adds the model's own repetition penalty and the like
            trust_remote_code=trusted,
        )

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        """Complete tokenized prompts, each drawn by its own seed."""
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
        choices = (output.outputs[0] for output in self._model.generate(requests, params, use_tqdm=False))
        return [
            Completion(self._decode(one.token_ids), len(one.token_ids), one.finish_reason == "length")
            for one in choices
        ]
