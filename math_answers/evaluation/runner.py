"""An evaluation from its settings to the samples on disk: generates what is missing and keeps the rest."""

import gc
import hashlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from math_answers.evaluation.arguments import SAMPLING_SETTINGS, EvaluationArguments
from math_answers.evaluation.benchmarks import Benchmark, load_benchmark
from math_answers.evaluation.generation import TransformersGenerator, VllmGenerator, resolve_backend, sample_seed
from math_answers.evaluation.loading import check_weights
from math_answers.evaluation.output import Key, Output, describe_device, library_versions, open_output
from math_answers.evaluation.prompts import check_thinking, load_tokenizer, tokenize_prompt
from math_answers.evaluation.samples import Sample
from math_answers.evaluation.scoring import score_samples
from math_answers.models import check_model, context_of, model_digest

logger = logging.getLogger(__name__)


def generate_samples(args: EvaluationArguments) -> dict[str, Any]:
    """Generate and score the samples that `output` does not hold yet, and return what `run.json` says, for
    [`summarize`]. Raises an `OSError` or a `ValueError` for what a user can correct."""
    if args.n > 1 and args.temperature == 0:
        logger.warning(f"`temperature` is 0: the {args.n} samples of a problem will be the same.")
    places = {model: check_model(model, revision=args.revision) for model in args.model}
    backend = resolve_backend(args.backend, places)
    tokenizers = {
        model: load_tokenizer(place, args.revision, args.trust_remote_code) for model, place in places.items()
    }
    check_thinking(tokenizers, args.enable_thinking)
    columns = args.problem_column, args.answer_column
    benchmarks = [
        load_benchmark(spec, most, args.instruction or None, args.system_prompt, *columns)
        for spec, most in zip(args.benchmarks, cycle(args.max_problems or [None]), strict=False)
    ]
    wanted = {
        "settings": {name: getattr(args, name) for name in SAMPLING_SETTINGS} | {"backend": backend, "samples": None},
        "models": {model: {"digest": model_digest(place, args.revision)} for model, place in places.items()},
        "benchmarks": {
            benchmark.name: {
                "source": benchmark.source,
                "problems": len(benchmark.ids),
                "digest": hashlib.sha256("\n".join(benchmark.ids).encode()).hexdigest()[:16],
            }
            for benchmark in benchmarks
        },
    }
    with open_output(Path(args.output or "."), wanted, args.overwrite) as output:
        # All models are checked before the first is loaded: a mistake with the last would otherwise show hours later,
        # or after `overwrite` has discarded what was there
        runs = [
            ModelRun(model, place, args, backend, benchmarks)
            for model, place in places.items()
            if _is_incomplete(model, args.n, benchmarks, output)
        ]
        output.begin()
        for run in runs:
            run.write(output)
    return output.content


def _is_incomplete(model: str, n: int, benchmarks: list[Benchmark], output: Output) -> bool:
    keys = {(model, benchmark.name, id, i) for benchmark in benchmarks for id in benchmark.ids for i in range(n)}
    missing = len(keys - output.done)
    if missing < len(keys):
        logger.info(f"{model}: {len(keys) - missing} of {len(keys)} samples are in {output.folder} already.")
    return missing > 0


class ModelRun:
    """The missing samples of one `model`, loaded from a `place`, by the backend `"vllm"` or `"transformers"`. Raises a
    `ValueError` before anything is loaded if a prompt cannot be written, or leaves too little room for an answer."""

    def __init__(self, model: str, place: str, args: EvaluationArguments, backend: str, benchmarks: list[Benchmark]):
        self.model, self.place, self.args, self.backend, self.benchmarks = model, place, args, backend, benchmarks
        loaded_from = place, args.revision, args.trust_remote_code
        check_weights(*loaded_from)
        self.tokenizer = load_tokenizer(*loaded_from)
        # If the prompt ends with the tag, completions lack it, and a thought that is cut off would pass for an answer
        opens = self._first_prompt(benchmarks[0]).rstrip().endswith("<think>")
        self.opened_by_prompt = "<think>\n" if opens else ""
        self.lengths = {
            benchmark.name: [len(self._tokens(row)) for row in benchmark.problems] for benchmark in benchmarks
        }
        longest_prompt = max(map(max, self.lengths.values()))
        self.longest = longest_prompt + args.max_new_tokens
        context = context_of(*loaded_from)
        if context is not None and self.longest > context:
            raise ValueError(self._no_room(longest_prompt, context))

    def _no_room(self, longest_prompt: int, context: int) -> str:
        """What to do about a `longest_prompt` that leaves less than `max_new_tokens` of the `context`."""
        benchmark = next(one for one in self.benchmarks if longest_prompt in self.lengths[one.name])
        row = self.lengths[benchmark.name].index(longest_prompt)
        *_, last = (message["content"] for message in benchmark.problems[row]["prompt"])
        instruction = self.args.instruction
        if longest_prompt < context:
            cure = f"Lower `max_new_tokens` to {context - longest_prompt} or less"
        else:
            cure = "Remove such rows"
        if instruction and last.endswith(instruction):
            tokens = len(self.tokenizer(instruction, add_special_tokens=False)["input_ids"])
            cure += f'. Without the `instruction` (`--instruction ""`) the prompt has {tokens} tokens less'
        return (
            f"The longest prompt has {longest_prompt} tokens and `max_new_tokens` is {self.args.max_new_tokens}, but "
            f"{self.model} was made for {context} in all. The prompt is row {row} of {benchmark.source}. {cure}. It "
            f"begins with {last[:80]!r}."
        )

    def write(self, output: Output):
        """Generate and score what is missing."""
        kind = VllmGenerator if self.backend == "vllm" else TransformersGenerator
        generator = kind(self.place, self.tokenizer, self.args, self.longest)
        self._note_session(output, generator)
        initial = sum(key[0] == self.model and key[1] in self.lengths for key in output.done)
        total = self.args.n * sum(map(len, self.lengths.values()))
        right = new = 0
        with tqdm(desc=self.model, initial=initial, total=total, unit="sample", smoothing=0.05) as bar:
            for benchmark in self.benchmarks:
                for samples in self._batches(benchmark, output.done, generator):
                    output.append(samples)
                    new += len(samples)
                    right += sum(sample["reward"] == 1 for sample in samples)
                    bar.set_postfix_str(f"{benchmark.name}, right {right / new:.1%}", refresh=False)
                    bar.update(len(samples))
        del generator  # the next model needs the memory
        gc.collect()
        torch.cuda.empty_cache()

    def _tokens(self, problem: dict[str, Any]) -> list[int]:
        return tokenize_prompt(self.tokenizer, problem["prompt"], self.args.enable_thinking)

    def _first_prompt(self, benchmark: Benchmark) -> str:
        return self.tokenizer.decode(self._tokens(benchmark.problems[0]))

    def _note_session(self, output: Output, generator: TransformersGenerator | VllmGenerator):
        content, entry = output.content, output.content["models"][self.model]
        before = entry.setdefault("revision", generator.revision)
        if before != generator.revision:
            raise ValueError(
                f"{self.model} was at revision {before} when its first samples were made and is at "
                f"{generator.revision} now. Set `revision` in a new `output`, or `overwrite`."
            )
        prompts = content["first_prompts"].setdefault(self.model, {})
        for benchmark in self.benchmarks:
            prompt = self._first_prompt(benchmark)
            if prompts.setdefault(benchmark.name, prompt) != prompt:  # Llama 3's templates hold today's date
                logger.warning(f"{benchmark.name}: the prompts of {self.model} have changed since its earlier samples.")
        entry["chat_template"] = self.tokenizer.chat_template is not None
        content.setdefault("sessions", []).append(
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": self.model,
                "batch_size": generator.batch_size,
                "device": describe_device(),
                "versions": library_versions(),
            }
        )
        output.save()

    def _batches(
        self, benchmark: Benchmark, done: set[Key], generator: TransformersGenerator | VllmGenerator
    ) -> Iterator[list[Sample]]:
        """Batches of prompts of about one length. The longest come first: memory runs short at the start or never. A
        resumed run cuts the batches at the same places, and generates a half-written batch again, so each sample keeps
        its neighbours."""
        lengths = self.lengths[benchmark.name]
        rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        jobs = [(row, (self.model, benchmark.name, benchmark.ids[row], i)) for row in rows for i in range(self.args.n)]
        for start in range(0, len(jobs), generator.batch_size):
            batch = jobs[start : start + generator.batch_size]
            if done.issuperset(key for _, key in batch):
                continue
            problems = [benchmark.problems[row] for row, _ in batch]
            seeds = [sample_seed(self.args.seed, *key) for _, key in batch]
            completions = generator.generate(list(map(self._tokens, problems)), seeds)
            samples, options = [], []
            for (row, key), problem, completion in zip(batch, problems, completions, strict=True):
                if key in done:
                    continue
                options.append(problem.get("options"))
                samples.append(
                    Sample(
                        model=self.model,
                        benchmark=benchmark.name,
                        problem=key[2],
                        index=row,
                        sample=key[3],
                        gold=problem["solution"],
                        completion=self.opened_by_prompt + completion.text,
                        tokens=completion.tokens,
                        truncated=completion.truncated,
                    )
                )
            yield score_samples(samples, options)
