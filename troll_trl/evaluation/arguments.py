"""The arguments of an evaluation, a dataclass that the command line fills from YAML files and flags."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# The training configs have the same text
DEFAULT_INSTRUCTION = "Let's think step by step and put the final answer in \\boxed{}."

# A sample depends on these, on its problem and on its number
SAMPLING_SETTINGS = (
    "model",
    "revision",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "seed",
    "instruction",
    "system_prompt",
    "enable_thinking",
    "dtype",
)


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help} | metadata)


@dataclass
class EvaluationArguments:
    """Arguments of [`~troll_trl.evaluation.evaluate`]. They are also the keys of a YAML file and the flags of `troll
    eval`, whose `--help` describes each of them."""

    model: str | None = _option(None, "Model: a hub name or a folder. Adapters work too.")
    benchmarks: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks: names, or name=path for a local file or folder."}
    )
    output: str | None = _option(None, "Folder for the samples, the summary and the table.")
    n: int = _option(1, "Samples for each problem.")
    temperature: float = _option(0.0, "Sampling temperature; 0 is greedy.")
    top_p: float = _option(1.0, "Sample from the most likely tokens that together have this probability.")
    top_k: int = _option(0, "Sample from this many of the most likely tokens; 0 means all.")
    max_new_tokens: int = _option(4096, "Maximum number of tokens in a completion.")
    seed: int = _option(0, "Seed of the samples and of the bootstrap.")
    max_problems: int | None = _option(None, "Evaluate only this many problems of each benchmark, the first ones.")
    instruction: str = _option(
        DEFAULT_INSTRUCTION, "Text after every problem. The default asks for a box; an empty text adds nothing."
    )
    system_prompt: str | None = _option(None, "System message before every problem.")
    enable_thinking: bool | None = _option(
        None, "Whether the chat template turns thinking on. Set it if the template reads it."
    )
    backend: str = _option(
        "auto",
        "What generates: 'vllm' or 'transformers'. 'auto' uses vLLM if it is installed and there is a GPU.",
        choices=["auto", "vllm", "transformers"],
    )
    batch_size: int | None = _option(None, "Number of completions generated at once.")
    dtype: str = _option(
        "auto",
        "dtype of the weights. 'auto' keeps the checkpoint's.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    revision: str | None = _option(None, "Revision of the model on the hub.")
    trust_remote_code: bool = _option(
        False, "Run the code that comes with a model or a tokenizer. By default such a model is refused."
    )
    k: list[int] | None = _option(None, "Values of k for pass@k. The default is the powers of two up to n, and n.")
    bootstrap_samples: int = _option(10_000, "Resamples for the confidence intervals.")
    overwrite: bool = _option(False, "Discard the samples in the output folder and start again.")
    samples: str | None = _option(
        None, "Score the column `completion` of this file of problems, instead of generating."
    )
    problem_column: str | None = _option(None, "Column with the problem in a local file, if its name is unusual.")
    answer_column: str | None = _option(None, "Column with the gold answer in a local file, if its name is unusual.")
    compare: list[str] | None = _option(
        None, "Two evaluations to compare, A and B: their folders, or their files of samples."
    )

    def __post_init__(self):
        if self.model is not None:
            self.model = self.model.rstrip("/") or self.model or None
        if self.output is not None:
            self.output = str(Path(self.output).expanduser()) if self.output else None
        _check_numbers(self)
        _check_task(self)


def _check_numbers(args: EvaluationArguments):
    least = {"n": 1, "max_new_tokens": 1, "top_k": 0, "seed": 0, "bootstrap_samples": 1, "batch_size": 1}
    for name, minimum in (least | {"k": 1, "max_problems": 1}).items():
        value = getattr(args, name)
        if value is not None and (min(value, default=0) if isinstance(value, list) else value) < minimum:
            raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"`temperature` must be 0 (greedy) or more, got {args.temperature}.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1 (all tokens), got {args.top_p}.")
    for name in ("backend", "dtype"):
        choices = next(option.metadata["choices"] for option in fields(args) if option.name == name)
        if getattr(args, name) not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(args, name)!r}.")


def _check_task(args: EvaluationArguments):
    generates = args.model is not None or bool(args.benchmarks)
    if args.compare is not None and len(args.compare) != 2:
        raise ValueError(f"`compare` takes two evaluations, got {len(args.compare)}.")
    if sum((generates, args.samples is not None, args.compare is not None)) != 1:
        raise ValueError("Nothing to do, or too much: set `model` and `benchmarks`, or `samples`, or `compare`.")
    if generates and (args.model is None or not args.benchmarks):
        raise ValueError(f"`{'model' if args.model is None else 'benchmarks'}` is not set.")
    if args.compare is None and args.output is None:
        raise ValueError("`output` is not set. Give a folder for the samples and the summary.")
    if args.k is not None and generates and max(args.k) > args.n:
        raise ValueError(f"pass@{max(args.k)} needs at least {max(args.k)} samples of a problem, but `n` is {args.n}.")
    if without := [benchmark for benchmark in args.benchmarks if benchmark.endswith("=")]:
        raise ValueError(f"`benchmarks`: {without[0]!r} has no path. Write name=path, without spaces.")
    names = [benchmark.partition("=")[0] for benchmark in args.benchmarks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"`benchmarks` has {twice[0]!r} twice. Remove one.")
