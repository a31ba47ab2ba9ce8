"""An evaluation from its settings to the samples on disk: what is missing is generated, what is there is kept."""

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from troll_trl.evaluation.arguments import SAMPLING_SETTINGS, EvaluationArguments
from troll_trl.evaluation.benchmarks import Benchmark, Problem, load_benchmark
from troll_trl.evaluation.generation import (
    Generator,
    Sampling,
    TransformersGenerator,
    VllmGenerator,
    resolve_backend,
    sample_seed,
)
from troll_trl.evaluation.models import check_model, context_of, model_digest
from troll_trl.evaluation.prompts import check_thinking, load_tokenizer, tokenize_prompt
from troll_trl.evaluation.provenance import Output, describe_device, library_versions
from troll_trl.evaluation.samples import Sample, read_lines
from troll_trl.evaluation.scoring import score_samples

logger = logging.getLogger(__name__)


def generate_samples(args: EvaluationArguments) -> dict[str, Any]:
    """
    Generate and score the samples that `output` does not hold yet, and return what `run.json` says, for [`summarize`].
    Raises a `FileNotFoundError` if a model, a benchmark or a file is missing, and a `ValueError` for anything else that
    a user can set right.
    """
    backend = resolve_backend(args.backend)
    if args.n > 1 and args.temperature == 0:
        logger.warning(
            f"`temperature` is 0: the {args.n} samples of a problem will be the same. Set it above 0, or n to 1."
        )
    for model in args.model:
        check_model(model)
    check_thinking({model: load_tokenizer(model, args.revision) for model in args.model}, args.enable_thinking)
    benchmarks = _load_benchmarks(args)
    wanted = {
        "settings": {name: getattr(args, name) for name in SAMPLING_SETTINGS} | {"backend": backend, "samples": None},
        "models": {model: {"digest": model_digest(model, args.revision)} for model in args.model},
        "benchmarks": {
            benchmark.name: {"source": benchmark.source, "problems": len(benchmark), "digest": benchmark.digest}
            for benchmark in benchmarks
        },
    }
    folder = Path(args.output or ".")
    with Output(folder, wanted, args.overwrite) as output:
        done = find_done(output.samples, args, benchmarks)
        runs = []
        for model in args.model:
            missing = sum(int((~done[model, benchmark.name]).sum()) for benchmark in benchmarks)
            total = args.n * sum(map(len, benchmarks))
            if not missing:
                logger.info(f"{model}: all {total} samples are in {folder}; nothing is run again (`overwrite` would).")
                continue
            if missing < total:
                logger.info(f"{model}: {total - missing} of {total} samples are in {folder}; the others follow.")
            runs.append(ModelRun(model, args, backend, benchmarks))
        # All are looked at before the first is loaded: a mistake with the last would otherwise show hours later, or
        # after `overwrite` has discarded what was there
        output.begin()
        for run in runs:
            run.write(done, output)
    return output.content


def _load_benchmarks(args: EvaluationArguments) -> list[Benchmark]:
    limits: Sequence[int | None] = args.max_problems or [None]
    limits = [*limits] * len(args.benchmarks) if len(limits) == 1 else limits
    return [
        load_benchmark(
            spec,
            limit,
            args.instruction or None,
            args.system_prompt,
            problem_column=args.problem_column,
            answer_column=args.answer_column,
        )
        for spec, limit in zip(args.benchmarks, limits, strict=True)
    ]


def find_done(path: Path, args: EvaluationArguments, benchmarks: list[Benchmark]) -> dict[tuple[str, str], np.ndarray]:
    """
    Which samples a file holds: by model and benchmark a boolean `(problems, n)` array, all False if they are to be
    overwritten. A sample that this run did not make, or one that is there twice, is a ValueError.
    """
    rows = {benchmark.name: {id: row for row, id in enumerate(benchmark.ids)} for benchmark in benchmarks}
    done = {
        (model, benchmark.name): np.zeros((len(benchmark), args.n), dtype=bool)
        for model in args.model
        for benchmark in benchmarks
    }
    for number, line in enumerate(() if args.overwrite else read_lines(path), 1):
        key = (str(line.get("model")), str(line.get("benchmark")))
        if key not in done:
            continue
        problem, sample = line.get("problem"), line.get("sample")
        row = rows[key[1]].get(str(problem))
        if row is None or sample not in range(args.n) or done[key][row, sample]:
            raise ValueError(
                f"{path}: sample {number} (problem {problem!r}, sample {sample!r}) is not one of this run, or is there "
                "twice. Was the file changed? Remove the line, or give another `output`, or `overwrite`."
            )
        done[key][row, sample] = True
    return done


class ModelRun:
    """
    The missing samples of one model, by the backend `"vllm"` or `"transformers"`. A prompt that cannot be written, or
    that leaves too little room for an answer, is a ValueError before anything is loaded.
    """

    def __init__(self, model: str, args: EvaluationArguments, backend: str, benchmarks: list[Benchmark]):
        self.model, self.args, self.backend, self.benchmarks = model, args, backend, benchmarks
        self.tokenizer = load_tokenizer(model, args.revision)
        # Such a template leaves the tag to the prompt: without it a thought that is cut off would pass for an answer
        opens = self._first_prompt(benchmarks[0]).rstrip().endswith("<think>")
        self.opened_by_prompt = "<think>\n" if opens else ""
        self.lengths = {benchmark.name: self._prompt_lengths(benchmark) for benchmark in benchmarks}
        longest_prompt = max(int(lengths.max()) for lengths in self.lengths.values())
        self.longest = longest_prompt + args.max_new_tokens
        context = context_of(model, args.revision)
        if context is not None and longest_prompt >= context:
            raise ValueError(
                f"The longest prompt has {longest_prompt} tokens, and {model} was made for {context}, with the answer. "
                "Leave such problems or the benchmark out, or take a model with a longer context."
            )
        if context is not None and self.longest > context:
            raise ValueError(
                f"`max_new_tokens` is {args.max_new_tokens} and the longest prompt has {longest_prompt} tokens, but "
                f"{model} was made for {context} in all. Set it to at most {context - longest_prompt}."
            )

    def write(self, done: dict[tuple[str, str], np.ndarray], output: Output):
        """Generate and score what is not `done`, as [`find_done`] returns it."""
        generator = self._load()
        self._note_session(output, generator)
        held = [done[self.model, benchmark.name] for benchmark in self.benchmarks]
        initial, total = sum(int(rows.sum()) for rows in held), sum(rows.size for rows in held)
        right = new = 0
        with tqdm(desc=self.model, initial=initial, total=total, unit="sample", smoothing=0.05) as bar:
            for benchmark, rows in zip(self.benchmarks, held, strict=True):
                for samples in self._batches(benchmark, rows, generator):
                    output.append(samples)
                    new += len(samples)
                    right += sum(sample["reward"] == 1 for sample in samples)
                    bar.set_postfix_str(f"{benchmark.name}, right {right / new:.1%}", refresh=False)
                    bar.update(len(samples))
        generator.close()

    def _prompt_lengths(self, benchmark: Benchmark) -> np.ndarray:
        return np.array([len(self._tokens(benchmark.problem(row))) for row in range(len(benchmark))])

    def _tokens(self, problem: Problem) -> list[int]:
        return tokenize_prompt(self.tokenizer, problem.messages, self.args.enable_thinking)

    def _first_prompt(self, benchmark: Benchmark) -> str:
        return self.tokenizer.decode(self._tokens(benchmark.problem(0)))

    def _load(self) -> Generator:
        args = self.args
        sampling = Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)
        backend = VllmGenerator if self.backend == "vllm" else TransformersGenerator
        settings = (args.dtype, args.batch_size, args.revision, self.longest)
        return backend(self.model, self.tokenizer, sampling, *settings)

    def _note_session(self, output: Output, generator: Generator):
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
                logger.warning(
                    f"{benchmark.name}: the prompts of {self.model} are no longer those of its earlier samples: its "
                    "chat template says something else today, such as the date."
                )
        entry["chat_template"] = self.tokenizer.chat_template is not None
        content["sessions"].append(
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": self.model,
                "batch_size": generator.batch_size,
                "device": describe_device(),
                "versions": library_versions(),
            }
        )
        output.save()

    def _batches(self, benchmark: Benchmark, held: np.ndarray, generator: Generator) -> Iterator[list[Sample]]:
        """
        Batches of prompts of about one length, the longest first: memory runs short at the start or never. A batch is
        cut at the same places whatever is done already, and one that a kill left half written is generated whole, so
        that no sample has other neighbours than in a run without a kill.
        """
        lengths, n = self.lengths[benchmark.name], self.args.n
        order = np.repeat(np.argsort(-lengths, kind="stable"), n)
        jobs = np.stack([order, np.tile(np.arange(n), len(lengths))], axis=1)
        for start in range(0, len(jobs), generator.batch_size):
            batch = jobs[start : start + generator.batch_size]
            if held[batch[:, 0], batch[:, 1]].all():
                continue
            problems = [benchmark.problem(int(row)) for row in batch[:, 0]]
            prompts = [self._tokens(problem) for problem in problems]
            seeds = [
                sample_seed(self.args.seed, self.model, benchmark.name, problem.id, int(sample))
                for problem, sample in zip(problems, batch[:, 1], strict=True)
            ]
            completions = generator.generate(prompts, seeds)
            missing = [i for i, (row, sample) in enumerate(batch) if not held[row, sample]]
            samples = [
                Sample(
                    model=self.model,
                    benchmark=benchmark.name,
                    problem=problems[i].id,
                    index=int(batch[i, 0]),
                    sample=int(batch[i, 1]),
                    gold=problems[i].gold,
                    completion=self.opened_by_prompt + completions[i].text,
                    tokens=completions[i].tokens,
                    truncated=completions[i].truncated,
                )
                for i in missing
            ]
            yield score_samples(samples, [problems[i].options for i in missing])
