"""
The scripts in examples/ run as they stand, on a CPU, with a tiny model, a sample of GSM8K and smaller batches. An
engine in memory takes the place of vLLM. The number of updates per rollout batch is each script's own.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import async_engine
import datasets
import pytest
from real_problems import DATA
from repository import ROOT, TESTS
from test_compatibility_rollouts import FakeVLLM, byte_tokenizer
from tiny import saved_model, tiny_model, token_reward

import troll_trl
from math_answers import math_accuracy_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.experimental import async_grpo

EXAMPLES = ROOT / "examples"
ON_A_CPU = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "max_steps": 9,
    "learning_rate": 1e-2,
    "max_completion_length": 8,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 128,
}
EIGHT_UPDATES = ON_A_CPU | {"generation_batch_size": 64, "gradient_accumulation_steps": 1}  # as 256 and 4


def save_chat_model(folder, layers):
    """A tiny model with a chat template."""
    tokenizer = byte_tokenizer()
    size = {"vocab_size": len(tokenizer), "num_hidden_layers": layers}
    tiny_model(**size, pad_token_id=0, eos_token_id=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a script, for which the hub has a sample of GSM8K."""
    file = str(DATA / "gsm8k" / "train.jsonl")
    sample = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    sample = datasets.concatenate_datasets([sample.select(range(40))] * 7)  # a script takes the first 256 rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: sample)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward_of_any_tokens(completions, completion_ids, solution, **kwargs):
    """The script's own reward must be able to read the solutions. A model that solves nothing learns from this one."""
    assert set(math_accuracy_reward(completions, solution)) <= {0.0, 1.0}
    return token_reward(completion_ids)


@pytest.fixture
def run(folder, monkeypatch):
    """Runs a script with some settings replaced, and returns its trainer."""
    trainers = []

    def run(name, settings, layers=2):
        def start(model, reward_funcs, **arguments):
            assert reward_funcs is math_accuracy_reward
            tiny = save_chat_model(folder / "model", layers)
            trainers.append(TrollGRPOTrainer(model=tiny, reward_funcs=reward_of_any_tokens, **arguments))
            return trainers[-1]

        monkeypatch.setattr(troll_trl, "TrollGRPOConfig", lambda **options: TrollGRPOConfig(**options | settings))
        monkeypatch.setattr(troll_trl, "TrollGRPOTrainer", start)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return trainers[-1]

    return run


class FakeServer(FakeVLLM):
    """Answers what the trainer asks a server before it trains."""

    vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})


@pytest.fixture
def vllm(monkeypatch):
    """The addresses of the servers that were asked for."""
    asked = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeServer)

    def connect(url, **options):
        asked.append(url)
        return FakeServer.vllm_client

    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient", connect)
    return asked


def assert_it_trained(trainer, capsys, distance="troll/policy_kl_max"):
    """The policy is the old policy at the first update of a rollout batch, and then moves. The model is saved."""
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 9
    assert lines[0][distance] < 1e-5
    assert max(line[distance] for line in lines) > 1e-3
    *_, printed = capsys.readouterr().out.splitlines()
    assert printed.endswith(f" is in {trainer.args.output_dir}.")
    assert list(Path(trainer.args.output_dir).glob("*model.safetensors"))


def test_gsm8k_one_gpu(run, vllm, capsys):
    trainer = run("gsm8k_one_gpu.py", EIGHT_UPDATES | {"eval_steps": 9})
    assert trainer.args.updates_per_rollout_batch == 8
    assert_it_trained(trainer, capsys)


def test_vllm_server(run, vllm, capsys):
    trainer = run("vllm_server.py", EIGHT_UPDATES)
    assert trainer.args.updates_per_rollout_batch == 8
    assert vllm == ["http://127.0.0.1:8000"]
    assert_it_trained(trainer, capsys)


def test_lora(run, capsys):
    trainer = run("lora.py", ON_A_CPU | {"eval_steps": 9}, layers=21)  # the adapter is for those from 20 on
    assert trainer.args.updates_per_rollout_batch == 8
    adapted = {name for name, weights in trainer.model.named_parameters() if weights.requires_grad}
    assert adapted and all("layers.20." in name and "lora_" in name for name in adapted)
    assert_it_trained(trainer, capsys)


def test_asynchronous(folder, monkeypatch, capsys):
    trainers = []

    def start(model, reward_funcs, args, train_dataset):
        texts = [row["solution"].replace("####", "Answer:") for row in train_dataset]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        assert set(reward_funcs(completions=completions, **train_dataset[:])) == {1.0}
        tiny = saved_model(folder / "model")
        engine = async_engine.Engine(tiny, age=2)
        trainers.append(async_engine.make_trainer(tiny, engine=engine, **args | ON_A_CPU, output=args["output_dir"]))
        return trainers[-1]

    monkeypatch.setattr(async_grpo, "AsyncTrollGRPOConfig", dict)
    monkeypatch.setattr(async_grpo, "AsyncTrollGRPOTrainer", start)
    runpy.run_path(str(EXAMPLES / "asynchronous.py"), run_name="__main__")
    assert trainers[0].args.trust_region == "mask" and trainers[0].args.divergence_type == "binary_tv"
    assert_it_trained(trainers[0], capsys, "troll/divergence_max")


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_every_script_is_run(script):
    assert any(f'"{script.name}"' in test.read_text(encoding="utf-8") for test in TESTS.rglob("test_*.py"))
