"""Every metric of an evaluation counts each completion once, whatever the batches and the number of ranks."""

import json
import statistics

import pytest
import torch
from counted_evaluations import CLASSES, MOST, completion, evaluate, evaluate_all, number_of
from ranks import in_ranks
from tiny import saved_model, tiny_prompts
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.trainers.trl_compat import EVALUATION

TIMINGS = ("runtime", "per_second", "preparation_time")


def expected(prompts, generations=1):
    """What the stored completions of prompts 0, 1, … say, counted one by one."""
    numbers = [number for number in range(prompts) for _ in range(generations)]
    thirds = [10.0 * number for number in numbers if number % 3 == 0]
    total = [number + (5.0 * number if number % 3 == 0 else 0.0) for number in numbers]
    lengths = [number + 1 for number in numbers]
    ended = [number + 1 for number in numbers if number % 2 == 0]
    metrics = {
        "reward": statistics.mean(total),
        "reward_std": statistics.stdev(total),
        "rewards/value/mean": statistics.mean(numbers),
        "rewards/value/std": statistics.stdev(numbers),
        "rewards/of_thirds/mean": statistics.mean(thirds),
        "rewards/of_thirds/std": statistics.stdev(thirds),
        "frac_reward_zero_std": 1.0,
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    for infix, values in {"": lengths, "terminated_": ended}.items():
        metrics |= {f"completions/{f.__name__}_{infix}length": f(values) for f in (statistics.mean, min, max)}
    return {f"eval_{name}": pytest.approx(value, rel=1e-6) for name, value in metrics.items()}


def per_token(model, reference, prompts):
    """Entropy and TRL's KL to the reference of each completion's tokens, by the plain models."""
    rows = []
    for number in range(prompts):
        ids = torch.tensor([[3 + number, *completion(number)]])
        with torch.no_grad():
            own, other = (m(ids).logits[0, :-1].log_softmax(-1) for m in (model, reference))
        of_sampled = (other - own).gather(1, ids[0, 1:, None]).squeeze(1)
        rows.append((-(own.exp() * own).sum(-1), of_sampled.exp() - of_sampled - 1))
    return rows


# 9 prompts in batches of 4, 4 and 1 gave 4.75 for 4.0; 3 prompts in batches of 2 and 1 gave 1.25 for 1.0
@pytest.mark.parametrize(
    ("algorithm", "prompts", "generations", "batch"),
    [
        *(("grpo", 9, 2, 8), ("grpo", 6, 1, 1), ("grpo", 8, 2, 16), ("rloo", 5, 4, 12), ("rloo", 4, 1, 3)),
        *(("grpo clip", 7, 2, 6), ("rloo clip", 9, 2, 8)),
    ],
)
def test_every_completion_counts_once(tmp_path, algorithm, prompts, generations, batch):
    options = {"num_generations_eval": generations, "per_device_eval_batch_size": batch}
    _, line = evaluate(algorithm, prompts, tmp_path, **options)
    assert {name: line[name] for name in expected(prompts)} == expected(prompts, generations)
    assert any("troll/" in name for name in line) != algorithm.endswith("clip")
    assert line["eval_of_my_own"] == pytest.approx((prompts - 1) / 2)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo"])
def test_entropy_and_kl_are_over_tokens_and_the_loss_as_its_type_says(tmp_path, loss_type):
    options = {"per_device_eval_batch_size": 3, "beta": 0.5, "loss_type": loss_type, "learning_rate": 0.0}
    trainer, line = evaluate("grpo", 7, tmp_path, **options)
    rows = per_token(trainer.model, trainer.ref_model, 7)
    entropy, kl = (torch.cat(values) for values in zip(*rows, strict=True))
    assert line["eval_entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert line["eval_kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    kls = [kl for _, kl in rows]
    means = {
        "grpo": torch.stack([kl.mean() for kl in kls]).mean(),
        "dr_grpo": torch.stack([kl.sum() for kl in kls]).mean() / MOST,
        "luspo": torch.stack([kl.sum() for kl in kls]).mean(),
        "dapo": kl.mean(),
        "bnpo": kl.mean(),
    }
    assert line["eval_loss"] == pytest.approx(0.5 * means[loss_type].item(), rel=1e-4)


def test_equal_groups_are_counted_over_the_evaluation(tmp_path):
    """Three of four groups were equal, in batches of three and one: 0.83 instead of 0.75."""
    rewards = iter([[1, 1, 2, 2, 3, 4], [5, 5]])
    trainer = make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        tmp_path,
        reward=lambda prompts, **_: [float(x) for x in next(rewards)],
        eval_dataset=tiny_prompts(4),
        num_generations_eval=2,
        per_device_eval_batch_size=6,
    )
    assert trainer.evaluate()["eval_frac_reward_zero_std"] == 0.75


@pytest.mark.parametrize("others", ["prediction", "failure"])
def test_nothing_else_enters_an_evaluation(tmp_path, others):
    """TRL leaves the numbers of a prediction, and of a cut-off evaluation, to the next one."""
    trainer, first = evaluate("grpo", 5, tmp_path, per_device_eval_batch_size=2)
    if others == "prediction":
        trainer.predict(trainer.eval_dataset.select([4]))
    else:
        generate, calls = trainer._generate_single_turn, iter([1, 2, 3])
        trainer._generate_single_turn = lambda *args: generate(*args) if next(calls) < 2 else 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate()
        trainer._generate_single_turn = generate
    trainer.evaluate()
    second = trainer.state.log_history[-1]
    assert comparable(second) == comparable(first)
    assert "_generate" not in vars(trainer) and "_calculate_rewards" not in vars(trainer)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_tokens_that_leave_the_loss_after_the_rollout_do_not_weigh(tmp_path, loss_type, monkeypatch):
    """`old_policy: engine` masks the tokens that its engine did not score: here all tokens of prompts 0, 1 and 2."""

    class Unscored(TrollGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            scored = torch.tensor([[number_of(row["prompt"]) >= 3] for row in inputs])
            output["tool_mask"] = output["completion_mask"] * scored
            output["num_items_in_batch"] = output["tool_mask"].sum().clamp(min=1)
            return output

    options = {"per_device_eval_batch_size": 3, "beta": 0.5, "loss_type": loss_type, "learning_rate": 0.0}
    monkeypatch.setitem(CLASSES, "grpo", (Unscored, TrollGRPOConfig))
    trainer, line = evaluate("grpo", 7, tmp_path, **options)
    rows = per_token(trainer.model, trainer.ref_model, 7)[3:]
    entropy, kl = (torch.cat(values) for values in zip(*rows, strict=True))
    assert line["eval_entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert line["eval_loss"] == pytest.approx(0.5 * kl.mean().item(), rel=1e-4)


def test_the_rewards_of_a_subclass_count(tmp_path):
    class Doubled(TrollGRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return 2 * super()._calculate_rewards(*args, **kwargs)

    trainer = make_trainer(
        Doubled,
        TrollGRPOConfig,
        tmp_path,
        reward=lambda prompts, **_: [1.0] * len(prompts),
        eval_dataset=tiny_prompts(3),
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    )
    assert trainer.evaluate()["eval_reward"] == 2.0


def test_without_the_private_parts_the_metrics_are_trls(tmp_path):
    trainer, _ = evaluate("grpo", 3, tmp_path, per_device_eval_batch_size=2)
    trainer.switched_off = frozenset({EVALUATION})
    trainer._metrics["eval"].clear()
    assert "eval_runtime" in trainer.evaluate()


def comparable(line):
    return {name: value for name, value in line.items() if not any(timing in name for timing in TIMINGS)}


# Prompts and generations, and the batch of each rank; few of them fill the last batch of all ranks
CASES = {
    "five": {"algorithm": "grpo", "prompts": 5, "per_device_eval_batch_size": 2},
    "seven": {"algorithm": "grpo", "prompts": 7, "per_device_eval_batch_size": 2, "num_generations_eval": 2},
    "one": {"algorithm": "grpo", "prompts": 4, "per_device_eval_batch_size": 4, "loss_type": "grpo"},
    "rloo": {"algorithm": "rloo", "prompts": 7, "per_device_eval_batch_size": 2},
    "kl": {"algorithm": "grpo", "prompts": 5, "per_device_eval_batch_size": 2, "beta": 0.5, "loss_type": "dr_grpo"},
    "dapo": {"algorithm": "grpo", "prompts": 7, "per_device_eval_batch_size": 2, "beta": 0.5, "loss_type": "dapo"},
    "bnpo": {"algorithm": "grpo", "prompts": 7, "per_device_eval_batch_size": 2, "beta": 0.5, "loss_type": "bnpo"},
    "stream": {"algorithm": "grpo", "prompts": 5, "per_device_eval_batch_size": 2, "stream": True},
    "split": {
        "algorithm": "grpo",
        "prompts": 8,
        "per_device_eval_batch_size": 6,
        "accelerator_config": {"split_batches": True},
    },
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return {name: comparable(evaluate(out=out / name, **case)[1]) for name, case in CASES.items()}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_completion_counts_once_on_several_ranks(tmp_path, alone, ranks):
    """accelerate fills the last batches with the first prompts once more; TRL counted those twice."""
    said = in_ranks(ranks, evaluate_all, CASES, tmp_path, saved_model(tmp_path / "model"), log=tmp_path / "log")
    for name, case in CASES.items():
        files = [tmp_path / name / f"rank-{rank}.json" for rank in range(ranks)]
        assert all(file.exists() for file in files), said
        lines = [comparable(json.loads(file.read_text())) for file in files]
        assert all(line == lines[0] for line in lines), f"{name}: ranks report other metrics"
        right = expected(case["prompts"], case.get("num_generations_eval", 1))
        assert {key: lines[0][key] for key in right} == right, name
        assert lines[0].keys() == alone[name].keys()
        for key in lines[0].keys() - {"eval_of_my_own"}:  # a function's own mean includes repeated prompts
            assert lines[0][key] == pytest.approx(alone[name][key], rel=1e-4, abs=1e-6), (name, key)
