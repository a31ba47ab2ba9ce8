"""Every YAML of configs/ is parsed strictly, and says what the paper says."""

from itertools import cycle

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from transformers import TrainingArguments

from tests.support.training_args import parse_training_args
from troll_trl.cli.arguments import training_parser
from troll_trl.cli.command_line import OptionParser, config_names, configs_folder, read_config
from troll_trl.evaluation.arguments import EvaluationArguments

CONFIGS = configs_folder()
PAPER = {
    "kl_bound": 0.05,
    "regression_coef": 1.0,
    "support_size": 64,
    "tail_mass": 1e-5,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "beta": 0.0,
    "temperature": 1.0,
    "loss_type": "bnpo",
    "scale_rewards": "group",
    "num_generations": 8,
    "max_steps": 8008,
    "metric_for_best_model": "eval_reward",
    "greater_is_better": True,
    "vllm_importance_sampling_mode": "token_truncate",
}
MODELS, DATA = (sorted(file.stem for file in (CONFIGS / part).iterdir()) for part in ("models", "data"))


@pytest.fixture
def parse(monkeypatch):
    """Parse a config as one of `processes` processes would. bf16 needs a GPU, or word that a CPU is meant."""

    def parse(name: str, processes: int, *flags: str):
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
        return parse_training_args(["--config", name, "--use_cpu", *flags])

    return parse


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_config_is_parsed_strictly(name):
    values = read_config(name)
    algorithm = values.get("algorithm", "grpo")
    evaluates = name.startswith("eval/")
    parser = OptionParser((EvaluationArguments,), "x") if evaluates else training_parser(algorithm, "x")
    assert parser.read(values, []).keys() == values.keys()


@pytest.mark.parametrize("name", [f"{model}/{data}" for model, data in zip(MODELS, cycle(DATA), strict=False)])
def test_a_combination_has_the_papers_settings(parse, name):
    script_args, args, model_args = parse(name, 8)
    assert args.updates_per_rollout_batch == 8 and args.generation_batch_size == 256 * 8
    assert {name: getattr(args, name) for name in PAPER} == PAPER
    assert args.vllm_max_model_length > args.max_completion_length and model_args.dtype == "float32"
    assert script_args.method == "troll" and r"\boxed{}" in script_args.instruction
    assert args.output_dir == f"outputs/{name.replace('/', '-')}"


@pytest.mark.parametrize(
    ("name", "processes", "flags", "completions"),
    [
        ("qwen3-8b/dapo", 1, ("--gradient_accumulation_steps", "32"), 2048),
        ("qwen3-0.6b/gsm8k-rloo", 8, (), 2048),
        ("qwen3-0.6b/gsm8k-one-gpu", 1, (), 256),
        ("quickstart", 1, (), 1024),
        ("smollm2-gsm8k-cpu", 1, (), 32),
    ],
)
def test_a_rollout_batch_serves_eight_updates(parse, name, processes, flags, completions):
    args = parse(name, processes, *flags)[1]
    assert args.steps_per_generation * args.num_iterations == 8 * args.gradient_accumulation_steps
    assert args.generation_batch_size == completions


def test_the_recipe_with_reuse_makes_as_many_updates_from_a_quarter_of_the_completions(parse):
    without, reuse = (parse(f"qwen3-0.6b/gsm8k-{name}", 1)[1] for name in ("one-gpu", "reuse"))
    assert reuse.updates_per_rollout_batch == 4 * without.updates_per_rollout_batch == 32
    assert (reuse.max_steps, reuse.generation_batch_size) == (without.max_steps, without.generation_batch_size)


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero3", "DEEPSPEED")])
def test_accelerate_reads_its_files(name, kind):
    config = load_config_from_file(str(CONFIGS / "accelerate" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == (kind, 8, "bf16")
