"""
The scripts of the pages and of examples/ run as they stand, on a CPU: only the model, the number of updates, the
engine, the rewards' values and the size of a micro-batch's sum are replaced. The number of updates per rollout batch is
each script's own. `test_vllm_async.py` runs asynchronous_cpu.py, with a real engine.
"""

import runpy
import sys
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

import troll_trl
from tests.pages.page_texts import SCRIPTS
from tests.support.real_problems import DATA
from tests.support.repository import ROOT
from tests.tiny import saved_model, tiny_model, tiny_tokenizer, token_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.rewards import math_accuracy_reward

ON_A_CPU = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "max_steps": 9,  # a rollout batch of eight, and the first of the next one
    "learning_rate": 1e-2,
    "max_completion_length": 8,
}
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Engine:
    """In place of TRL's `VLLMGeneration`: random tokens."""

    vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=3072)))

    def __init__(self, **settings):
        self.generator = torch.Generator().manual_seed(0)

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        completions = torch.randint(3, 100, (len(prompts), 8), generator=self.generator).tolist()
        return prompts, completions, [[[-4.6]] * len(row) for row in completions], None


def learnable(reward):
    """The script's own reward, which must find its columns. A model that solves nothing learns from another one."""

    @wraps(reward)
    def learnt(completion_ids, **columns):
        assert all(value is not None for value in reward(**columns))
        return token_reward(completion_ids)

    return learnt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a script, for which the hub has a sample of GSM8K."""
    file = str(DATA / "gsm8k" / "train.jsonl")
    sample = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    sample = datasets.concatenate_datasets([sample.select(range(40))] * 7)  # a script takes the first 256 rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: sample)
    for name, code in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test
    return tmp_path


def assert_it_trained(trainer, distance):
    """The policy is the old policy at the first update of a rollout batch, and then moves. The model is saved."""
    moved = [line[distance] for line in trainer.state.log_history if "loss" in line]
    assert len(moved) == 9 and moved[0] < 1e-5 < 1e-3 < max(moved)
    assert list(Path(trainer.args.output_dir).glob("*model.safetensors"))


@pytest.mark.parametrize(
    "name",
    [
        *("train", "train_lora", "train_server", "train_length"),
        *("examples/gsm8k_one_gpu", "examples/vllm_server", "examples/lora"),
    ],
)
def test_a_script_trains(name, folder, monkeypatch):
    trainers, layers = [], 21 if name == "examples/lora" else 2  # whose adapter is for those from 20 on
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    tiny_model(num_hidden_layers=layers).save_pretrained(folder / "model")

    def configure(**options):
        one_pass = options.pop("gradient_accumulation_steps", 1)
        for size in {"generation_batch_size", "steps_per_generation"} & options.keys():
            options[size] //= one_pass
        return TrollGRPOConfig(**options | ON_A_CPU)

    def start(model, reward_funcs, **arguments):
        model = str(folder / "model")
        trainers.append(TrollGRPOTrainer(model=model, reward_funcs=learnable(reward_funcs), **arguments))
        return trainers[-1]

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    client = "trl.generation.vllm_client.VLLMClient"
    monkeypatch.setattr(f"{client}.__init__", lambda self, base_url, connection_timeout: None)
    monkeypatch.setattr(f"{client}.get_server_info", lambda self: Engine.vllm_client.get_server_info())
    monkeypatch.setattr(troll_trl, "TrollGRPOConfig", configure)
    monkeypatch.setattr(troll_trl, "TrollGRPOTrainer", start)
    path = (ROOT if "/" in name else folder) / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    [trainer] = trainers
    assert trainer.args.updates_per_rollout_batch == 8
    assert_it_trained(trainer, "troll/policy_kl_max")


def test_the_asynchronous_example_trains(folder, monkeypatch):
    async_grpo = pytest.importorskip("troll_trl.experimental.async_grpo", exc_type=ImportError)
    from tests.engines import async_engine

    trainers = []

    def start(model, reward_funcs, args, train_dataset):
        assert reward_funcs is math_accuracy_reward
        tiny = saved_model(folder / "model")
        engine = async_engine.Engine(tiny, age=2)
        options = args | ON_A_CPU | {"per_device_train_batch_size": 8}
        trainers.append(async_engine.make_trainer(tiny, engine=engine, **options, output=args["output_dir"]))
        return trainers[-1]

    monkeypatch.setattr(async_grpo, "AsyncTrollGRPOConfig", dict)
    monkeypatch.setattr(async_grpo, "AsyncTrollGRPOTrainer", start)
    runpy.run_path(str(ROOT / "examples" / "asynchronous.py"), run_name="__main__")
    assert_it_trained(trainers[0], "troll/divergence_max")


def test_the_picture_of_the_method_is_drawn(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simplex.py", "--output", "figures/simplex.png"])
    runpy.run_path(str(ROOT / "examples" / "simplex.py"), run_name="__main__")
    assert Path("figures/simplex.png").stat().st_size > 0
