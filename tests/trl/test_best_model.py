"""The best checkpoint is the one with the highest reward, unless the user names another metric."""

import itertools
import json
import logging
import math
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_prompts
from training_args import parse_training_args
from trl import GRPOConfig, RLOOConfig
from trl_comparison import logged, make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
CHOOSES = [
    {"load_best_model_at_end": True},
    {"save_strategy": "best"},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy"},
]
CONFIGS = {"grpo": TrollGRPOConfig, "rloo": TrollRLOOConfig}


@pytest.mark.parametrize("algorithm", CONFIGS)
@pytest.mark.parametrize("chooses", CHOOSES, ids=str)
def test_the_reward_chooses_and_more_is_better(tmp_path, algorithm, chooses):
    args = CONFIGS[algorithm](str(tmp_path), **CPU | EACH_STEP | chooses)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_reward", True)
    schedule = (args.lr_scheduler_kwargs or {}).get("mode")
    assert schedule == ("max" if "lr_scheduler_type" in chooses else None)


@pytest.mark.parametrize(
    ("algorithm", "method", "chooses"),
    [(*pair, chooses) for pair, chooses in zip(itertools.product(CONFIGS, ("troll", "clip")), CHOOSES, strict=True)],
)
def test_so_it_does_for_the_commands(tmp_path, algorithm, method, chooses):
    flags = {"algorithm": algorithm, "method": method, "dataset_name": "x", "model_name_or_path": "x"}
    flags |= {"output_dir": tmp_path, "use_cpu": True, "bf16": False} | EACH_STEP | chooses
    _, args, _ = parse_training_args([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_reward", True)
    own = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    _, args, _ = parse_training_args([*own, "--metric_for_best_model", "loss"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)


@pytest.mark.parametrize(
    "metric, greater",
    [("loss", False), ("eval_loss", False), ("entropy", True), ("eval_completions/mean_length", True)],
)
def test_a_metric_of_the_user_stays(tmp_path, metric, greater):
    options = {"metric_for_best_model": metric, "load_best_model_at_end": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        args = TrollGRPOConfig(str(tmp_path), **CPU | EACH_STEP | options)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)
    args = TrollGRPOConfig(str(tmp_path), greater_is_better=not greater, **CPU | EACH_STEP | options)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, not greater)


def test_a_run_that_chooses_nothing_has_no_metric(tmp_path):
    """transformers would keep the best checkpoint of a run with one."""
    assert TrollGRPOConfig(str(tmp_path), **CPU | EACH_STEP).metric_for_best_model is None


def test_a_schedule_keeps_the_users_settings(tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": '{"patience": 3}'}
    args = TrollGRPOConfig(str(tmp_path), **CPU | EACH_STEP | options)
    assert args.lr_scheduler_kwargs == {"patience": 3, "mode": "max"}
    options["lr_scheduler_kwargs"] = {"mode": "min"}
    assert TrollGRPOConfig(str(tmp_path), **CPU | EACH_STEP | options).lr_scheduler_kwargs == {"mode": "min"}
    by_loss = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
    assert not TrollGRPOConfig(str(tmp_path), **CPU | EACH_STEP | by_loss).lr_scheduler_kwargs


def test_less_of_an_unnamed_metric_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`greater_is_better` is False without a `metric_for_best_model`"):
        TrollGRPOConfig(str(tmp_path), greater_is_better=False, load_best_model_at_end=True, **CPU | EACH_STEP)


@pytest.mark.parametrize("plain, ours", [(GRPOConfig, TrollGRPOConfig), (RLOOConfig, TrollRLOOConfig)])
def test_a_plain_config_with_the_loss_is_warned_of(tmp_path, plain, ours):
    for chooses in CHOOSES[:1] + CHOOSES[2:]:
        with pytest.warns(UserWarning, match="`metric_for_best_model` is 'loss': .* set `metric_for_best_model="):
            ours.from_trl(plain(str(tmp_path), **CPU | EACH_STEP | chooses))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*metric_for_best_model.*")
        named = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
        ours.from_trl(plain(str(tmp_path), **CPU | EACH_STEP | named))
        ours.from_trl(plain(str(tmp_path), **CPU | EACH_STEP))


def test_a_run_ends_with_the_weights_of_the_highest_reward(tmp_path):
    """Six evaluations with rewards from 1.15 to 6.15 ended with the first checkpoint, whose loss was 0."""
    rewards = dict(enumerate([1.15, 2.15, 6.15, 4.15, 3.15, 2.5], 1))

    def reward(completions, trainer_state, **kwargs):
        level = rewards[max(trainer_state.global_step, 1)]
        return [level + (number % 2) * 0.1 for number in range(len(completions))]

    trainer = make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        tmp_path,
        reward=reward,
        eval_dataset=tiny_prompts(3),
        max_steps=6,
        load_best_model_at_end=True,
        **EACH_STEP,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    assert trainer.state.best_metric == pytest.approx(6.2, abs=1e-5) == max(logged(trainer, "eval_reward"))


def test_each_of_several_sets_has_its_name(tmp_path, caplog):
    """`eval_reward` was that of the last one, and no other name existed."""
    caplog.set_level(logging.WARNING)
    sets = {"math": tiny_prompts(2), "code": tiny_prompts(5)}
    options = {"eval_dataset": sets, "num_generations_eval": 1, "per_device_eval_batch_size": 2} | EACH_STEP
    options |= {"reward": lambda prompts, completions, **_: [float(len(p)) for p in prompts], "max_steps": 1}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, load_best_model_at_end=True, **options)
    assert "the reward of the last set, code, chooses the best checkpoint" in caplog.text
    metrics = trainer.evaluate()
    for name, dataset in sets.items():
        mean = sum(map(len, dataset["prompt"])) / len(dataset)
        assert math.isclose(metrics[f"eval_{name}_reward"], mean, rel_tol=1e-6)
    caplog.clear()
    named = {"metric_for_best_model": "eval_math_reward", "load_best_model_at_end": True}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path / "named", **options, **named)
    trainer.train()
    assert "evaluation sets" not in caplog.text and trainer.state.best_metric == metrics["eval_math_reward"]


MOVES = {"moved": True, "copied": False}


def run_of(folder, updates, rewards, **options):
    """A run whose evaluation after update n gives the n-th reward; the two newest checkpoints and the best are kept."""
    level = lambda trainer_state: rewards[max(trainer_state.global_step, 1) - 1]
    return make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        folder,
        reward=lambda completions, trainer_state, **_: [level(trainer_state) + n % 2 for n in range(len(completions))],
        eval_dataset=tiny_prompts(2),
        max_steps=updates,
        load_best_model_at_end=True,
        save_total_limit=2,
        **EACH_STEP | options,
    )


@pytest.mark.parametrize("moved", MOVES.values(), ids=MOVES)
def test_a_run_that_moves_keeps_its_best_checkpoint(tmp_path, caplog, moved):
    """It was ignored, deleted as an old one, and the run ended with the weights of the last update."""
    rewards = [1.0, 9.0, 2.0, 3.0, 2.0]
    run_of(tmp_path / "first", 3, rewards).train()
    before = tmp_path / "first" / "checkpoint-2"
    best = load_file(before / "model.safetensors")
    assert json.loads((before / "trainer_state.json").read_text())["best_model_checkpoint"] == str(before)
    (shutil.move if moved else shutil.copytree)(str(tmp_path / "first"), str(tmp_path / "second"))
    caplog.set_level(logging.WARNING)
    trainer = run_of(tmp_path / "second", 5, rewards)
    trainer.train(resume_from_checkpoint=True)
    after = tmp_path / "second" / "checkpoint-2"
    assert f"The best checkpoint so far is {after}, since the run has moved from {before}." in caplog.text
    assert trainer.state.best_model_checkpoint == str(after) and after.is_dir()
    state = json.loads((tmp_path / "second" / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(after)
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in best.items()), "not the best weights"


def test_a_best_checkpoint_that_is_gone_is_said_and_another_chosen(tmp_path, caplog):
    rewards = [1.0, 9.0, 2.0, 3.0, 2.0]
    run_of(tmp_path, 3, rewards).train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    caplog.set_level(logging.WARNING)
    trainer = run_of(tmp_path, 5, rewards)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2 (eval_reward: 9.5), is gone" in caplog.text
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_a_run_that_stays_says_nothing_and_one_that_starts_from_another_keeps_its_best(tmp_path, caplog):
    rewards = [1.0, 9.0, 2.0, 3.0, 2.0]
    run_of(tmp_path / "first", 3, rewards).train()
    caplog.set_level(logging.WARNING)
    for folder in ("other", "first"):
        trainer = run_of(tmp_path / folder, 4, rewards)
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
        assert trainer.state.best_model_checkpoint == str(tmp_path / "first" / "checkpoint-2")
    assert "best checkpoint" not in caplog.text
