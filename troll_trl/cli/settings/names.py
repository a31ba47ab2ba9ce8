"""
The names of all settings, read from the source of the dataclasses that declare them. Importing the dataclasses takes
many seconds, and the command should refuse a mistyped name at once.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Package, file and class
_TRAINER = (
    ("troll_trl", "trainers/config.py", "TrustRegionOptions"),
    ("troll_trl", "trainers/config.py", "TrollOptions"),
    ("troll_trl", "cli/settings/arguments.py", "TrollScriptArguments"),
    ("troll_trl", "cli/settings/arguments.py", "TrollModelConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
SOURCES = {
    "grpo": (
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
        ("troll_trl", "trainers/config.py", "MaskOptions"),
        *_TRAINER,
    ),
    "rloo": (("trl", "trainer/rloo_config.py", "RLOOConfig"), *_TRAINER),
    "eval": (("math_answers", "evaluation/arguments.py", "EvaluationArguments"),),
}


_ENV = "Set the environment variable {} instead, for instance under `env`."
# What to write in place of a name of TRL, transformers or open-r1, if the nearest valid name misleads or is none
RENAMED = {
    # TRL and transformers
    "torch_dtype": "Write `dtype`.",
    "no_cuda": "Write `use_cpu`.",
    "max_prompt_length": "Write `max_prompt_tokens`, which drops longer prompts and cuts none.",
    "use_liger_loss": "Write `use_liger_kernel`.",
    "vllm_guided_decoding_regex": "Write `vllm_structured_outputs_regex`.",
    "vllm_device": "Remove it: with `vllm_mode: colocate` vLLM shares the training GPUs.",
    "warmup_ratio": "Write `warmup_steps`; a number below 1 is a share of all updates.",
    "overwrite_output_dir": "Remove it: no run overwrites `output_dir`; `--resume` continues the run there.",
    "logging_dir": _ENV.format("TENSORBOARD_LOGGING_DIR"),
    "push_to_hub_token": "Write `hub_token`.",
    "divergence_topk": "Write `support_size`, which counts the sampled token too.",
    "clip_ratio_c": "Write `ratio_cap`.",
    # open-r1
    "dataset_mixture": "Write `datasets`, a list of mappings with path, name, split, columns and fraction.",
    "dataset_prompt_column": "Write `problem_column`.",
    "hub_model_revision": "Write `hub_revision`, the branch that is pushed to; `model_revision` loads another model.",
    "push_to_hub_revision": "Write `push_to_hub`.",
    "chat_template": "Remove it, and save the template with the model's tokenizer; for its options there is "
    "`chat_template_kwargs`.",
    "wandb_entity": _ENV.format("WANDB_ENTITY"),
    "wandb_project": _ENV.format("WANDB_PROJECT"),
    "max_completion_len": "It is an argument of `get_soft_overlong_punishment(...)`, which `reward_funcs` may call.",
}
# The same for `troll eval`: the names of training
EVALUATION = {
    "model_name_or_path": "Write `model`.",
    "dataset_name": "Write `benchmarks: [name=path]`.",
    "max_completion_length": "Write `max_new_tokens`.",
    "num_generations": "Write `n`.",
    "per_device_eval_batch_size": "Write `batch_size`.",
    "use_vllm": "Write `backend: vllm`.",
}


@cache
def declared_names(command: str) -> frozenset[str]:
    """The names of the settings of a command: `"grpo"`, `"rloo"` or `"eval"`."""
    return frozenset(name for source in SOURCES[command] for name in fields_of(*source))


@cache
def fields_of(package: str, file: str, class_name: str) -> dict[str, ast.AnnAssign]:
    """The fields of a dataclass that an argument can set, with their source."""
    for node in ast.parse((find_package(package) / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {
                statement.target.id: statement
                for statement in node.body
                if isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and "ClassVar" not in ast.unparse(statement.annotation)
                and not (statement.value is not None and "init=False" in ast.unparse(statement.value))
            }
    raise ImportError(f"{package}/{file} has no class {class_name}. Install the versions of constraints.txt.")


def find_package(package: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@cache
def launcher_names(algorithm: str) -> set[str]:
    """The names of the options of `accelerate launch` that are not settings of the run."""
    source = (find_package("accelerate") / "commands" / "launch.py").read_text(encoding="utf-8")
    names = {name.replace("-", "_") for name in re.findall(r'"--([a-z][\w-]+)"', source)}
    return (names | {"accelerate_config"}) - declared_names(algorithm) - {"help"}


def name_of(flag: str) -> str:
    """`--max-steps=3` is `max_steps`."""
    return flag.partition("=")[0].lstrip("-").replace("-", "_")


def is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def describe_unknown(name: str, valid: Iterable[str], settings: str, prefix: str = "") -> str:
    """What to write in place of a name that is not one of the `valid` ones of `"grpo"`, `"rloo"` or `"eval"`."""
    if settings != "eval":
        if settings == "rloo" and name in fields_of("troll_trl", "trainers/config.py", "MaskOptions"):
            return (
                "It is an option of grpo alone: a mask decides token by token, and RLOO's ratio belongs to a whole "
                "completion. Remove it: RLOO has TROLL's projection."
            )
        other = "grpo" if settings == "rloo" else "rloo"
        if name in declared_names(other):
            return f"It is an option of {other}: set `algorithm: {other}`, or remove it."
        if name in launcher_names(settings):
            return "It belongs to the launcher: give it to `troll grpo`, `troll rloo` or `accelerate launch`."
    if advice := (EVALUATION if settings == "eval" else RENAMED).get(name):
        return advice
    # Below this ratio, the nearest name is seldom the one that was meant
    near = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.75)
    return f"The nearest valid name is {prefix}{near[0]}." if near else "No valid name is near it."
