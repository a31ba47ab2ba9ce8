"""Score a samples file, of this or another tool, into an output folder as if it had been generated there."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from tqdm.auto import tqdm

from math_answers.data.columns import column_value
from math_answers.evaluation.arguments import EvaluationArguments
from math_answers.evaluation.output import key_of, library_versions, open_output
from math_answers.evaluation.samples import SAMPLES, Sample, read_lines
from math_answers.evaluation.scoring import score_samples
from math_answers.rewards.answers import written_out
from math_answers.rewards.verifier.choices import Options

logger = logging.getLogger(__name__)

# The first column that the file has is taken. lm-evaluation-harness writes `resps`, `target` and `doc_id`.
COMPLETION_COLUMNS = (
    *("completion", "completions", "resps", "response", "responses", "output", "outputs", "generation", "generations"),
    *("generated_text", "generated_texts", "model_output", "prediction", "predictions"),
    *("text", "texts", "code"),
)
ANSWER_COLUMNS = (
    *("gold", "target", "ground_truth", "reward_model.ground_truth", "gold_answer", "gt", "expected_answer"),
    *("reference_answer", "reference", "answer", "final_answer", "solution", "label", "doc.answer", "doc.solution"),
)
# `idx`, `index` and `id` come last: they may be those of the row, and each sample would be taken for a problem
PROBLEM_COLUMNS = (
    *("problem_id", "doc_id", "unique_id", "question_id", "task_id", "prompt_id", "problem", "question", "prompt"),
    *("idx", "index", "id"),
)
# The name of lm-evaluation-harness's files of samples, without its time: files of one task are one benchmark
_LM_EVAL_NAME = re.compile(r"\Asamples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+\Z")
BATCH = 64


_MISSING = object()


class Columns(NamedTuple):
    """The columns of a samples file that are read. A dot reaches into a nested column."""

    completion: str  # text, chat messages, or a list of these
    answer: str
    problem: str | None  # or its id; samples of one problem have it in common. None: each row is a problem


def score_file(args: EvaluationArguments) -> dict[str, Any]:
    """Score the samples of the file `samples` that `output` does not hold yet, and return what `run.json` says, for
    [`summarize`]. Raises a `FileNotFoundError` without that file, and a `ValueError` for rows that cannot be used."""
    path, folder = Path(args.samples or "").expanduser(), Path(args.output or ".")
    if path.resolve() == (folder / SAMPLES).resolve():
        raise ValueError(f"`samples` {path} would be written over. Give another `output`.")
    first = next(read_rows(path), None)
    if first is None:
        raise ValueError(f"{path} holds no sample.")
    columns = _find_columns(path, first, args)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    wanted: dict[str, Any] = {
        "settings": {"samples": str(path.resolve())},
        "models": {},
        "benchmarks": {"samples": {"source": str(path), "digest": f"{digest} {columns}"}},
    }
    with open_output(folder, wanted, args.overwrite) as output:
        output.begin()
        if output.done:
            logger.info(f"Samples of {path} that are scored in {folder} already: {len(output.done)}.")
        missing = (pair for pair in _unscored(path, columns, first) if key_of(pair[0]) not in output.done)
        with tqdm(desc=f"scoring {path.name}", initial=len(output.done), unit="sample") as bar:
            while batch := list(islice(missing, BATCH)):
                output.append(score_samples(*map(list, zip(*batch, strict=True))))
                bar.update(len(batch))
        output.content["versions"] = library_versions()
        output.save()
    return output.content


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet or JSON-lines file, one at a time."""
    if path.suffix != ".parquet":
        with path.open("rb") as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                raise ValueError(f"{path} is one JSON array. Write its items on a line each, as `jq -c '.[]'` does.")
        yield from read_lines(path, parse_float=_exact)  # all digits that were written
        return
    # A row group may be the whole file, and `datasets` reads it at once: here its pages one by one
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            yield from batch.to_pylist()


def _exact(written: str) -> Decimal | str:
    """A number with all its digits; as text beyond the exponents of a `Decimal`, some 10^18."""
    try:
        return Decimal(written)
    except InvalidOperation:
        return written


def _find_columns(path: Path, first: dict[str, Any], args: EvaluationArguments) -> Columns:
    known = {"completion": COMPLETION_COLUMNS, "answer": ANSWER_COLUMNS, "problem": PROBLEM_COLUMNS}
    if {"solution", "advantage", "completion"} <= first.keys():
        known["answer"] = ("solution", *ANSWER_COLUMNS)  # TRL's log of completions: `answer` is what the reward read
    found: dict[str, Any] = {}
    for what, names in known.items():
        given = getattr(args, f"{what}_column")
        candidates = names if given is None else [given]
        found[what] = next((name for name in candidates if column_value(first, name, _MISSING) is not _MISSING), None)
        if found[what] is None and (given is not None or what != "problem"):
            raise ValueError(
                f"{path} has the columns {', '.join(map(str, first))}; its {what} was looked for in "
                f"{', '.join(candidates)}. Name it with `{what}_column`."
            )
    told_apart = f"problems told apart by `{found['problem']}`" if found["problem"] else "each row taken as a problem"
    columns = Columns(**found)
    logger.info(f"{path}: completions from `{columns.completion}`, gold answers from `{columns.answer}`, {told_apart}.")
    return columns


def _unscored(path: Path, columns: Columns, first: dict[str, Any]) -> Iterator[tuple[Sample, Options]]:
    """The samples of a file in its order, not scored yet, each with the options of a multiple choice."""
    counts: Counter[tuple[str, str, str]] = Counter()
    golds: dict[tuple[str, str, str], int] = {}
    told: Counter[str] = Counter()
    for number, row in enumerate(read_rows(path), 1):
        # lm-evaluation-harness repeats the same responses for each of its answer filters
        if "resps" in first and row.get("filter") != first.get("filter"):
            told[f"rows of other filters than {first.get('filter')!r} are left out"] += 1
            continue
        try:
            gold = _gold_text(column_value(row, columns.answer, _MISSING))
            texts = list(_texts(column_value(row, columns.completion, _MISSING)))
        except TypeError:
            raise ValueError(
                f"{path}: row {number} has no `{columns.answer}` or `{columns.completion}` that can be used; it has "
                f"the columns {', '.join(row)}. A completion is text, chat messages or a list of these."
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: row {number}, `{columns.answer}`: {error}") from None
        key = _problem_of(row, number, path, columns)
        if golds.setdefault(key, hash(gold)) != hash(gold):
            raise ValueError(
                f"{path}: row {number} has another gold answer than an earlier row with the same `{columns.problem}` "
                f"({key[2]}). Name a column that tells problems apart with `problem_column`."
            )
        told["rows without a completion are left out"] += not texts
        told["completions are null, and count as wrong"] += texts.count(None)
        tokens, truncated = (row.get("tokens"), row.get("truncated")) if len(texts) == 1 else (None, None)
        for text in texts:
            sample = Sample(
                model=key[0],
                benchmark=key[1],
                problem=key[2],
                index=number - 1,
                sample=counts[key],
                gold=gold,
                completion=text or "",
                tokens=tokens if type(tokens) is int else None,
                truncated=truncated if isinstance(truncated, bool) else None,
            )
            counts[key] += 1
            yield sample, row.get("options")
    for what, count in told.items():
        if count:
            logger.warning(f"{path}: {count} {what}.")


def _problem_of(row: dict[str, Any], number: int, path: Path, columns: Columns) -> tuple[str, str, str]:
    """The model, the benchmark and the problem of row `number`: a short id or text, or the digest of a longer one."""
    name = number if columns.problem is None else column_value(row, columns.problem)
    if name is None:
        raise ValueError(f"{path}: row {number} has no `{columns.problem}`, which tells the problems apart.")
    problem = name if isinstance(name, str) else json.dumps(name, ensure_ascii=False, default=str)
    if len(problem) > 64:
        problem = hashlib.sha256(problem.encode("utf-8", "replace")).hexdigest()[:12]
    benchmark = row.get("benchmark") or row.get("task") or _LM_EVAL_NAME.sub(r"\1", path.stem)
    return str(row.get("model") or path.stem), str(benchmark), problem


def _texts(value: Any) -> Iterator[str | None]:
    """Completions in a cell: text, null, chat messages, or a list of these, nested as deep as it may be."""
    match value:
        case str() | None:
            yield value
        case {"text": inner} | {"content": inner} | {"message": inner}:
            yield from _texts(inner)
        case [{"role": _}, *_]:  # chat messages; one may be in several parts
            contents = ["", *(item.get("content") for item in value if item.get("role") == "assistant")]
            yield "".join(part or "" for part in _texts(contents[-1]))
        case list():
            for item in value:
                yield from _texts(item)
        case _:
            raise TypeError


def _gold_text(gold: Any) -> str:
    if gold is _MISSING:
        raise TypeError
    if isinstance(gold, list):
        return ", ".join(map(_gold_text, gold))
    if isinstance(gold, (float, Decimal)) and Decimal(gold).is_finite():
        return written_out(gold)
    return "" if gold is None else str(gold)
