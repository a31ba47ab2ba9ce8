"""
Small runs of a trainer on the device of `fake_cuda.py`, each to a JSON file: what it logged, where it waited, and
what went wrong.

    FAKE_CUDA_LIBRARY=... python tests/kernels/fake_cuda_runs.py OUT kernels torch resume mutant:no_wait
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import fake_cuda  # noqa: I001  first

import inspect
import json
import math
import sys
import textwrap
from pathlib import Path

import torch
import trl.trainer.grpo_trainer
from interpreter import round_as_a_gpu
from ranks import leave_together
from test_compatibility_rollouts import FakeVLLM
from tiny import tiny_model, token_reward
from trl_comparison import make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.lm_head import patch
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trust_region import sparse
from troll_trl.trust_region.ragged import RaggedDistribution

# In bfloat16 as the configs, with vLLM's log-probabilities, of which some are missing, two micro-batches an update
OPTIONS = {
    "use_cpu": False,
    "bf16": True,
    "gradient_checkpointing": True,
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "kl_bound": 1e-3,
    "learning_rate": 1e-2,
    "max_steps": 4,
}
# An edit of the package that must not go unseen: the function, its text, and another one
MUTANTS = {
    "not_pinned": (RaggedDistribution, "to_host_of", "host._each(torch.Tensor.pin_memory)", "host"),
    "host_positions": (patch, "_scatter", "0, positions,", "0, positions.cpu(),"),
    "host_metrics": (TrollMetrics, "_zeros", "self.accelerator.device", "torch.device('cpu')"),
    "host_number": (sparse, "nothing_kept", "log_probs[-1:] = 0.0", "log_probs[-1] = 0.0"),
}


def train(folder: Path, resume: str | None = None, **options):
    nan_at = options.pop("nan_reward_at", None)
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return [math.nan if len(calls) == nan_at else x for x in token_reward(completion_ids)]

    model = tiny_model(spread=3.0, attn_implementation="eager")
    trainer = make_trainer(
        TrollGRPOTrainer, TrollGRPOConfig, folder, model=model, reward=reward, **{**OPTIONS, **options}
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def run(name: str, folder: Path):
    os.environ["TROLL_KERNELS"] = "triton" if name == "kernels" else "torch"
    if name == "on_the_cpu":
        return train(folder, use_cpu=True)
    if name == "nan_reward":
        return train(folder, nan_reward_at=1)
    if name in ("kernels", "mutant"):
        return train(folder, max_steps=2)
    if name == "resume":  # after the first of two updates on a rollout batch, and from what vLLM gave then
        whole = train(folder, save_strategy="steps", save_steps=1)
        resumed = train(folder, resume=str(folder / "checkpoint-3"))
        assert resumed.state.global_step == 4
        expected, actual = weights(whole), weights(resumed)
        different = [x for x in expected if not torch.equal(expected[x].cpu(), actual[x].cpu())]
        fake_cuda.PROBLEMS.extend(f"{name} is another after resuming" for name in different)
        return resumed
    return train(folder, eval_strategy="steps", eval_steps=1, num_generations_eval=2, per_device_eval_batch_size=4)


def mutate(owner, name: str, text: str, other: str):
    """Replace a function by an edited copy; returns what undoes it."""
    function = getattr(owner, name)
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    assert source.count(text) == 1, f"{name} has no longer {text!r}: find where that is now"
    scope: dict = {}
    edited = "\n" * (first - 1) + source.replace(text, other)
    exec(compile(edited, inspect.getsourcefile(function), "exec"), function.__globals__, scope)
    setattr(owner, name, scope[name])
    return lambda: setattr(owner, name, function)


def main(folder: Path, names: list[str]) -> None:
    fake_cuda.interpret_kernels()
    round_as_a_gpu()
    trl.trainer.grpo_trainer.VLLMGeneration = FakeVLLM
    for name in names:
        fake_cuda.WAITS.clear()
        fake_cuda.PROBLEMS.clear()
        kind, _, mutant = name.rpartition(":")
        undo = mutate(*MUTANTS[mutant]) if kind else lambda: None
        log, error = [], ""
        try:
            trainer = run(kind or name, folder / name)
            log = trainer.state.log_history
            device = trainer.accelerator.device.type
            assert {x.device.type for x in trainer.model.parameters()} == {device}
            del trainer
        except (RuntimeError, IndexError) as raised:  # of garbage, too, in place of numbers that were not yet there
            error = str(raised)
        finally:
            undo()
        fake_cuda.collect()
        said = {"log": log, "error": error, "waits": fake_cuda.WAITS, "problems": fake_cuda.PROBLEMS}
        (folder / f"{name}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave_together()  # as in fake_cuda_memory.py
