"""The arguments of an evaluation, from a YAML file or flags: `troll_trl.cli.evaluate` parses them."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from math_answers.settings import setting

# The training configs have the same text. The verifier and the strict comparison both read the box
DEFAULT_INSTRUCTION = "Let's think step by step and put the final answer in \\boxed{}."

# A sample depends on these, on its model and on its problem
SAMPLING_SETTINGS = (
    *("n", "temperature", "top_p", "top_k", "max_new_tokens", "seed"),
    *("instruction", "system_prompt", "enable_thinking", "dtype", "revision"),
)


@dataclass
class EvaluationArguments:
    """Arguments of an evaluation, in a YAML file or as flags. `troll eval --help` describes each of them."""

    model: list[str] = setting(help="Models: hub names or folders. Adapters work too.", default_factory=list)
    benchmarks: list[str] = setting(
        help="Benchmarks: names, or name=path for a local file or folder.", default_factory=list
    )
    output: str | None = setting(None, "Folder for the samples and the summary.")
    n: int = setting(1, "Samples for each problem.")
    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.")
    top_p: float = setting(1.0, "Sample from the most likely tokens that together have this probability.")
    top_k: int = setting(0, "Sample from this many of the most likely tokens; 0 means all.")
    max_new_tokens: int = setting(4096, "Most tokens in a completion.")
    seed: int = setting(0, "Seed of the samples and of the bootstrap.")
    max_problems: list[int] | None = setting(
        None, "Evaluate only the first problems: their number, one for all benchmarks or one for each."
    )
    instruction: str = setting(
        DEFAULT_INSTRUCTION, "Text after every problem. The default asks for a box; an empty text adds nothing."
    )
    system_prompt: str | None = setting(None, "System message before every problem.")
    enable_thinking: bool | None = setting(
        None, "Whether the chat template turns thinking on. Set it if a template reads it, and only then."
    )
    backend: str = setting(
        "auto",
        "What generates: 'vllm' or 'transformers'. 'auto' uses vLLM if it is installed and there is a GPU.",
        choices=["auto", "vllm", "transformers"],
    )
    batch_size: int | None = setting(None, "Number of completions generated at once.")
    dtype: str = setting(
        "auto",
        "dtype of the weights. 'auto' keeps the checkpoint's.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    revision: str | None = setting(None, "Revision of the models on the hub.")
    trust_remote_code: bool = setting(
        False, "Run the code that comes with a model or a tokenizer. By default such a model is refused."
    )
    k: list[int] | None = setting(None, "Values of k for pass@k. The default is the powers of two up to n, and n.")
    bootstrap_samples: int = setting(10_000, "Resamples for the confidence intervals.")
    overwrite: bool = setting(False, "Discard the samples in the output folder and start again.")
    samples: str | None = setting(None, "Score this file of samples, from this or another tool, instead of generating.")
    completion_column: str | None = setting(None, "Column with the completions in `samples`, if its name is unusual.")
    problem_column: str | None = setting(
        None, "Column with the problem, or with its id in `samples`, if its name is unusual."
    )
    answer_column: str | None = setting(None, "Column with the gold answer, if its name is unusual.")
    compare: list[str] | None = setting(
        None, "Two evaluations to compare, A and B: folders, files of samples, or models of this evaluation."
    )

    def __post_init__(self):
        self.model = [name.rstrip("/") or name for name in self.model]
        if self.output is not None:
            self.output = str(Path(self.output).expanduser())
            if Path(self.output).is_file():
                raise ValueError(f"`output`: {self.output} is a file; give a folder.")
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
    if args.k is not None and args.samples is None and args.model and max(args.k) > args.n:
        raise ValueError(f"pass@{max(args.k)} needs at least {max(args.k)} samples of a problem, but `n` is {args.n}.")
    if args.max_problems is not None and len(args.max_problems) not in (1, len(args.benchmarks)):
        counts = f"{len(args.max_problems)} numbers for {len(args.benchmarks)} benchmarks"
        raise ValueError(f"`max_problems` has {counts}: give one number for all, or one for each.")


def _refuse(args: EvaluationArguments, ignored: Collection[str], reason: str):
    for option in fields(args):
        if option.name in ignored and (value := getattr(args, option.name)) != option.default:
            raise ValueError(f"`{option.name}` is {value!r}, but {reason}. Leave it out.")


def _check_task(args: EvaluationArguments):
    if args.compare is not None and len(args.compare) != 2:
        raise ValueError(f"`compare` takes two evaluations, got {len(args.compare)}.")
    if args.samples is not None and (args.model or args.benchmarks):
        raise ValueError("`samples` scores a file; `model` and `benchmarks` generate one. Give one or the other.")
    columns = ("problem_column", "answer_column", "completion_column")
    generates = bool(args.model or args.benchmarks)
    if generates and not (args.model and args.benchmarks):
        missing = "benchmarks" if args.model else "model"
        raise ValueError(f"`{missing}` is not set. An evaluation needs `model` and `benchmarks`.")
    if not generates:
        ignored = {*SAMPLING_SETTINGS, "max_problems", "backend", "batch_size", "trust_remote_code"}
        ignored -= {"seed"}  # the bootstrap has this limit
        ignored |= {"overwrite", *columns} if args.samples is None else set()
        _refuse(args, ignored, "nothing is generated" if args.samples else "nothing is generated or read but scores")
    else:
        if any("=" in benchmark for benchmark in args.benchmarks):  # files, with columns
            _refuse(args, ["completion_column"], "it is for `samples`")
        else:
            _refuse(args, columns, "it is for `samples`, or for benchmarks name=path")
    if not generates and args.samples is None and args.compare is None:
        raise ValueError("Nothing to do: set `model` and `benchmarks`, or `samples`, or `compare`.")
    if (generates or args.samples) and args.output is None:
        raise ValueError("`output` is not set. Give a folder for the samples and the summary.")
    for name in args.compare or () if generates else ():  # checked before hours of generation
        if name not in args.model and not Path(name).expanduser().exists():
            raise ValueError(f"`compare`: {name} is neither a model of this evaluation nor a folder or file.")
    names = [benchmark.partition("=")[0] for benchmark in args.benchmarks]
    for key, values in (("model", args.model), ("benchmarks", names)):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"`{key}` has {twice[0]!r} twice. Remove one.")
