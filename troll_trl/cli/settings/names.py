"""The names of all settings, and what to write in place of a name that is none."""

from collections.abc import Iterable
from dataclasses import fields
from functools import cache

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig

from math_answers.evaluation.arguments import EvaluationArguments
from troll_trl.cli.settings.arguments import TrollModelConfig, TrollScriptArguments
from troll_trl.cli.settings.command import describe_nearest, name_of
from troll_trl.trainers.config import MaskOptions, TrollGRPOConfig, TrollRLOOConfig

# The dataclasses of a command. The second one of a training is the trainer's.
DATACLASSES: dict[str, tuple[type, ...]] = {
    "grpo": (TrollScriptArguments, TrollGRPOConfig, TrollModelConfig, DatasetMixtureConfig),
    "rloo": (TrollScriptArguments, TrollRLOOConfig, TrollModelConfig, DatasetMixtureConfig),
    "eval": (EvaluationArguments,),
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
    return frozenset(field.name for kind in DATACLASSES[command] for field in fields(kind) if field.init)


@cache
def launcher_names(algorithm: str) -> frozenset[str]:
    """The names of the options of `accelerate launch` that are not settings of the run, and not `env`, which means the
    variables of a TPU."""
    names = {name_of(option) for option in launch_command_parser()._option_string_actions if option.startswith("--")}
    return frozenset(names | {"accelerate_config"}) - declared_names(algorithm) - {"help", "env"}


def describe_unknown(name: str, valid: Iterable[str], settings: str, prefix: str = "") -> str:
    """What to write in place of a name that is not one of the `valid` ones of `"grpo"`, `"rloo"` or `"eval"`."""
    if settings != "eval" and name not in declared_names(settings):  # `-kl_bound` has a valid name
        if settings == "rloo" and name in MaskOptions.__dataclass_fields__:
            return (
                "It is an option of grpo alone: a mask decides token by token, and RLOO's ratio belongs to a whole "
                "completion. Remove it: RLOO has TROLL's projection, and a penalty."
            )
        other = "grpo" if settings == "rloo" else "rloo"
        if name in declared_names(other):
            return f"It is an option of {other}: set `algorithm: {other}`, or remove it."
        if name in launcher_names(settings):
            return "It belongs to the launcher: give it to `troll grpo`, `troll rloo` or `accelerate launch`."
    if advice := (EVALUATION if settings == "eval" else RENAMED).get(name):
        return advice
    return describe_nearest(name, valid, prefix)
