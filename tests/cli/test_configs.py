"""Every YAML of configs/ is parsed strictly, and says what the paper says."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from repository import ROOT
from training_args import parse_training_args
from transformers import TrainingArguments

from math_answers.evaluation.arguments import EvaluationArguments
from troll_trl import TrollRLOOConfig
from troll_trl.cli.arguments import training_parser
from troll_trl.cli.command_line import OptionParser, config_names, read_config

CONFIGS = ROOT / "configs"
MODELS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "apertus-8b": "swiss-ai/Apertus-8B-Instruct-2509",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}
DATASETS = {  # training data, completion length, evaluation data and split
    "gsm8k": ("openai/gsm8k", 2048, None, "test"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", 4096, "HuggingFaceH4/MATH-500", "test"),
    "eurus": ("PRIME-RL/Eurus-2-RL-Data", 4096, "HuggingFaceH4/MATH-500", "test"),
    "dapo": ("open-r1/DAPO-Math-17k-Processed", 4096, "HuggingFaceH4/aime_2024", "train"),
}
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
    "save_steps": 80,
    "save_total_limit": 2,
    "metric_for_best_model": "eval_reward",
    "greater_is_better": True,
    "eval_steps": 80,
    "num_generations_eval": 1,
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
}


@pytest.fixture
def parse(monkeypatch):
    """Parse a config as one of `processes` processes would. bf16 needs a GPU, or word that a CPU is meant."""

    def parse(path: Path, processes: int, *flags: str):
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
        return parse_training_args(["--config", str(path), "--use_cpu", *flags])

    return parse


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_config_is_parsed_strictly(name):
    values = read_config(name)
    evaluates = name.startswith("eval/")
    algorithm = values.get("algorithm", "grpo")
    parser = OptionParser((EvaluationArguments,), "x") if evaluates else training_parser(algorithm, "x")
    assert parser.read(values, []).keys() == values.keys()


def test_each_model_goes_with_each_dataset():
    names = {name for name in config_names() if "/" in name and not name.startswith("eval/")}
    combinations = {f"{model}/{dataset}" for model in MODELS for dataset in DATASETS}
    assert names == combinations | {"qwen3-0.6b/gsm8k-rloo", "qwen3-0.6b/gsm8k-one-gpu"}
    assert not [name for name in combinations if (CONFIGS / f"{name}.yaml").exists()], "one file for each is too many"


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("model", MODELS)
def test_paper_settings_whatever_the_number_of_processes(parse, model, dataset, processes):
    flags = () if processes == 8 else ("--gradient_accumulation_steps", str(32 // processes))
    script_args, args, model_args = parse(CONFIGS / model / f"{dataset}.yaml", processes, *flags)

    assert args.updates_per_rollout_batch == 8
    assert not args.trust_region_idle
    assert args.generation_batch_size == 256 * 8
    assert args.per_device_train_batch_size * processes * args.gradient_accumulation_steps == 256
    assert {name: getattr(args, name) for name in PAPER} == PAPER

    name, length, evaluation, split = DATASETS[dataset]
    assert (script_args.dataset_name, args.max_completion_length) == (name, length)
    assert (script_args.eval_dataset_name, script_args.dataset_test_split) == (evaluation, split)
    assert args.vllm_max_model_length > length
    assert script_args.method == "troll"
    assert r"\boxed{}" in script_args.instruction
    assert model_args.model_name_or_path == MODELS[model]
    assert model_args.dtype == "float32"
    assert args.output_dir == f"outputs/{model}-{dataset}"
    assert ("enable_thinking" in (args.chat_template_kwargs or {})) == model.startswith(("qwen3", "smollm3"))


def test_rloo_config_shares_the_papers_batch(parse):
    script_args, args, _ = parse(CONFIGS / "qwen3-0.6b" / "gsm8k-rloo.yaml", 8)
    assert script_args.algorithm == "rloo" and type(args) is TrollRLOOConfig
    assert args.updates_per_rollout_batch == 8 and args.generation_batch_size == 256 * 8
    shared = {name: value for name, value in PAPER.items() if hasattr(args, name)}
    assert {name: getattr(args, name) for name in shared} == shared and shared


def test_one_gpu_takes_as_many_updates_of_a_smaller_batch(parse):
    _, args, _ = parse(CONFIGS / "qwen3-0.6b" / "gsm8k-one-gpu.yaml", 1)
    assert args.updates_per_rollout_batch == 8 and args.generation_batch_size == 256
    # What TRL gives vLLM as the most sequences at a time; at 2048 its first, empty run takes some 7 GB
    assert args.per_device_train_batch_size * args.steps_per_generation == 256
    assert {name: getattr(args, name) for name in PAPER} == PAPER


def test_clip_takes_the_same_file(parse):
    script_args, args, _ = parse(CONFIGS / "qwen3-8b" / "dapo.yaml", 8, "--method", "clip")
    assert script_args.method == "clip" and args.steps_per_generation == 8 * args.gradient_accumulation_steps


@pytest.mark.parametrize("name", ["quickstart", "smollm2-gsm8k-cpu"])
def test_configs_for_a_cpu_are_off_policy(name):
    args = parse_training_args(["--config", name])[1]
    assert args.use_cpu
    assert args.updates_per_rollout_batch > 1
    assert not args.trust_region_idle


@pytest.mark.parametrize(
    ("name", "distributed_type"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero3", "DEEPSPEED")]
)
def test_accelerate_reads_its_files(name, distributed_type):
    path = CONFIGS / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == distributed_type
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "bf16")
    assert not config.use_cpu
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3
    assert yaml.safe_load(path.read_text())["compute_environment"] == "LOCAL_MACHINE"
