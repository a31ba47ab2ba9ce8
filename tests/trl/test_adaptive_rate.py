"""The learning rate that follows the trust region: its rule, a closed loop, what is refused, skips and resuming."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from tests.trl_comparison import OURS, logged, make_trainer, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.resilience import checkpoints
from troll_trl.trainers import adaptive_rate
from troll_trl.trainers.adaptive_rate import AdaptiveLearningRate
from troll_trl.trainers.grpo import TrustRegionGRPO

ADAPTIVE = {"adaptive_learning_rate": True, "kl_bound": 0.05, "steps_per_generation": 4, "max_steps": 16}
HIGH_RATE = 0.1


def rule():
    device, args = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(updates_per_rollout_batch=8)
    return AdaptiveLearningRate(SimpleNamespace(accelerator=device, args=args))


def factors(signals, warmed_up=True, learning=1.0, moved=100, tokens=1000, cut=None):
    """The factor after each update of one rollout batch with these `signals`, in 0.05 nats, of `moved` tokens. Before
    update `cut`, the run is saved and resumed."""
    own, found = rule(), []
    own.updates = len(signals)
    for i, signal in enumerate(signals):
        if i == cut:
            saved, own = own.state_dict(), rule()
            own.load_state_dict(saved)
            own.updates = len(signals)
        k = 0.05 * signal  # of each token that moved
        sums = moved * k, moved * k * k, tokens, tokens * learning
        own.follow(*sums, warmed_up=warmed_up)
        found.append(own.factor)
    return found


def test_the_rule():
    assert factors([0, 5, 11, 12]) == [1, 1, 0.5, 0.25]
    assert factors([0, 12, 11, 11]) == [1, 0.5, 0.5, 0.5], "it has stopped rising"
    assert factors([0, 1, 2.9]) == [1, 1, 1.5]
    assert factors([0, 1, 0.5])[-1] == pytest.approx(math.sqrt(3)), "the square root of the distance to 3"
    assert factors([0, 0.5, 0.5])[-1] == 2
    assert factors([0, 3.1, 1]) == [1, 1, 1], "the largest one decides"
    assert factors([0, 1, 1], warmed_up=False) == factors([0, 1, 1], learning=0.04) == [1, 1, 1]
    assert factors([0, 0, 0], learning=0.05)[-1] == 2
    assert factors(range(10, 40))[-1] == 0.01
    assert factors([0, math.nan, 1]) == [1, 0.5, 0.5], "a KL that is not finite"
    assert factors([0, 11, 1], moved=9) == [1, 1, 2], "few tokens say nothing"
    assert factors([0, 11, 1], moved=11)[1] == factors([0, 11, 1], moved=2, tokens=50)[1] == 0.5
    assert factors([0, 11, 1], moved=1, tokens=50)[1] == factors([0, 11, 1], moved=9, tokens=299)[1] == 1
    own = rule()
    own.follow(0.0, 0.0, 100, 100, warmed_up=True)
    assert own.factor == 1, "seven of its eight updates were not measured"
    own.updates = 1
    for _ in range(12):
        own.begin_batch()
        own.follow(0.0, 0.0, 100, 100, warmed_up=True)
    assert own.factor == 10


@pytest.mark.parametrize("signals", [[0, 12, 11, 11], [0, 3.1, 1], [0, 1, 2.9]])
def test_a_saved_state_continues_the_rollout_batch(signals):
    """Without the largest signal so far, the second one would let the factor grow. So would a count that is lost, or it
    would keep the factor from growing."""
    for cut in range(1, len(signals)):
        for learning in (0.04, 0.05):
            assert factors(signals, cut=cut, learning=learning) == factors(signals, learning=learning)


def test_the_tokens_of_the_loss_count_and_no_kl_is_negative():
    own = rule()
    own.add(torch.tensor([[True, True, False]]), torch.tensor([[0.5, -0.25, math.nan]]), torch.tensor([[-1.0]]))
    assert own.sums.tolist() == [0.5, 0.25, 2, 2]


def test_a_loss_that_counts_nothing_is_refused():
    """Without a token, nothing moves, and the factor would grow to its limit."""
    with pytest.raises(RuntimeError, match="counted no token"):
        rule().follow(0.0, 0.0, 0, 0, warmed_up=True)


def settled(start, noise=0.3, batches=40, updates=8, seed=0):
    """The rates of a closed loop after half of its batches: KL is `c·(sum of the batch's rates)²`, with noise."""
    generator, own, rates = torch.Generator().manual_seed(seed), rule(), []
    for _ in range(batches):
        moved = 0.0
        for i in range(updates):
            k = 2e4 * moved**2 * math.exp(noise * torch.randn((), generator=generator).item())
            own.follow(100 * k, 100 * k * k, 100, 100, warmed_up=True)
            if i == updates - 1:
                own.begin_batch()
            moved += start * own.factor
            rates.append(start * own.factor)
    return rates[len(rates) // 2 :]


@pytest.mark.parametrize("start", [5e-5, 4e-4, 6.4e-3, 2e-2])
def test_a_closed_loop_settles_from_both_sides(start):
    """The signal reaches 0.15 at a rate of 3.9e-4, and 0.5 at 7.1e-4."""
    rates = settled(start)
    assert min(rates) > 2e-4 and max(rates) < 1.3e-3
    assert max(rates) / min(rates) < 3.5, "it oscillates"


@pytest.mark.parametrize(("name", "value"), [("LOW", 1.5), ("HIGH", 0.05), ("LEAST_GROWTH", 4.0)])
def test_a_wrong_constant_fails_the_closed_loop(name, value, monkeypatch):
    monkeypatch.setattr(adaptive_rate, name, value)
    with pytest.raises(AssertionError):
        for start in (5e-5, 4e-4, 6.4e-3, 2e-2):
            test_a_closed_loop_settles_from_both_sides(start)


def replayed(trainer):
    """The factor after each update, by the rule in plain Python, from the logged signals."""
    factor, found = 1.0, []
    updates = int(trainer.args.updates_per_rollout_batch)
    signals = logged(trainer, "troll/rate_signal")
    for start in range(0, len(signals), updates):
        before = largest = 0.0
        for i, signal in enumerate(signals[start : start + updates]):
            if signal > 0.5 and signal > before:
                factor /= 2
            before, largest = signal, max(largest, signal)
            if i == updates - 1 and largest < 0.15:
                factor *= max(math.sqrt(0.15 / max(largest, 0.0375)), 1.5)
            found.append(factor)
    return found


@pytest.mark.parametrize(("algorithm", "region"), [("grpo", "projection"), ("grpo", "penalty"), ("rloo", "projection")])
def test_a_run_follows_the_rule(algorithm, region, tmp_path):
    options = ADAPTIVE | {
        "trust_region": region,
        "learning_rate": HIGH_RATE,
        "beta": 0.0,
        "lr_scheduler_type": "linear",
    }
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.train()
    factors, scheduled = logged(trainer, "troll/rate_factor"), [HIGH_RATE * (1 - i / 16) for i in range(16)]
    assert factors == replayed(trainer) and min(factors) < 1
    assert logged(trainer, "learning_rate") == pytest.approx([f * x for f, x in zip(factors, scheduled, strict=True)])


def test_the_signal_is_the_self_weighted_kl(tmp_path, monkeypatch):
    """Over all tokens of an update's two micro-batches."""
    seen, add = [], AdaptiveLearningRate.add

    def recording(self, mask, policy_kl, advantages):
        assert advantages.shape[1] == 1, "without the regression"
        seen.append(policy_kl[mask])
        add(self, mask, policy_kl, advantages)

    monkeypatch.setattr(AdaptiveLearningRate, "add", recording)
    options = ADAPTIVE | {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-2}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    trainer.train()
    k = torch.cat(seen[2:]).double().clamp(min=0)
    assert logged(trainer, "troll/rate_signal")[1] == pytest.approx(
        (k.square().sum() / k.sum() * 8 / 2).item(), rel=1e-5
    )


def test_the_rate_falls_in_the_update_that_measures_it(tmp_path):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **ADAPTIVE, learning_rate=HIGH_RATE)
    rates, step = [], trainer.create_optimizer().step

    def recording(*args, **kwargs):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        return step(*args, **kwargs)

    trainer.optimizer.step = recording
    trainer.train()
    for of_groups in zip(*rates, strict=True):  # with and without weight decay
        assert of_groups == pytest.approx(logged(trainer, "learning_rate"))
    first = next(i for i, signal in enumerate(logged(trainer, "troll/rate_signal")) if signal > 0.5)
    assert rates[first] == [pytest.approx(HIGH_RATE / 2)] * 2


def test_a_rollout_batch_of_two_passes_ends_with_the_second(tmp_path):
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 8, "learning_rate": 1e-5}
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE | options)  # four updates per rollout batch
    trainer.train()
    assert logged(trainer, "troll/rate_factor") == [1.0] * 3 + [2.0] * 4 + [4.0]


def test_an_evaluation_does_not_count(tmp_path):
    """Its tokens have not moved, so the next update's signal would come from a smaller share of the tokens."""
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE | {"eval_strategy": "steps", "max_steps": 2})
    trainer.train()
    assert "eval_loss" in trainer.evaluate() and not trainer.adaptive_rate.sums.any()


def test_what_an_earlier_training_left_unfinished_does_not_count(tmp_path):
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE | {"learning_rate": 1e-5})
    trainer.adaptive_rate.sums += 100  # of an update
    trainer.adaptive_rate.taken = 1  # of a rollout batch, which could then not let the factor grow
    trainer.train()
    assert logged(trainer, "troll/rate_signal")[0] < 1e-4 and logged(trainer, "troll/rate_factor")[3] == 2


def test_without_a_guard_it_is_the_same(tmp_path):
    options = ADAPTIVE | {"learning_rate": HIGH_RATE}
    trained = []
    for kind in (TrollGRPOTrainer, TrustRegionGRPO):
        trainer = make_trainer(kind, TrollGRPOConfig, tmp_path, **options)
        trainer.train()
        assert min(logged(trainer, "troll/rate_factor")) < 1
        trained.append(weights(trainer))
    assert all(torch.equal(x, trained[1][name]) for name, x in trained[0].items())


def test_a_batch_without_rewards_and_a_skipped_update_change_nothing(tmp_path):
    options = ADAPTIVE | {"learning_rate": 1e-5, "max_steps": 8}
    for reward in (1.0, 0.1):  # of eight rewards of 0.1 TRL makes advantages of 0.001
        same = lambda completions, reward=reward, **_: [reward] * len(completions)
        nothing = make_trainer(*OURS["grpo"], tmp_path, reward=same, **options, num_generations=8)
        nothing.train()
        assert set(logged(nothing, "troll/rate_factor")) == {1.0}

    def late(completions, **_):  # no reward of the first rollout batch is finite
        late.calls += 1
        return [math.nan if late.calls == 1 else float(len(x) % 3) for x in completions]

    late.calls = 0
    trainer = make_trainer(*OURS["grpo"], tmp_path, reward=late, **options)
    trainer.train()
    assert logged(trainer, "troll/rate_factor") == [1.0] * 7 + [2.0]


def test_the_logged_rate_of_a_skipped_update_has_the_factor(tmp_path):
    """It was the scheduled one, a spike in the plot."""

    def reward(completions, **_):
        reward.calls += 1
        return [math.nan if reward.calls == 2 else float(len(x) % 3) for x in completions]

    reward.calls = 0
    options = {"reward": reward, "learning_rate": HIGH_RATE, "lr_scheduler_type": "linear"}
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE, **options)
    trainer.train()
    factors, steps = logged(trainer, "troll/rate_factor"), [*range(4), *[4] * 4, *range(4, 12)]
    scheduled = [HIGH_RATE * (1 - step / 16) for step in steps]
    assert logged(trainer, "learning_rate") == pytest.approx([f * x for f, x in zip(factors, scheduled, strict=True)])
    assert len(set(factors[3:8])) == 1 and factors[3] < 1


class SkipsTheFourth(TrollGRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * math.nan if self.state.global_step == 3 else loss


def test_a_skipped_update_changes_no_rate(tmp_path):
    found = []
    for kind in (TrollGRPOTrainer, SkipsTheFourth):
        trainer = make_trainer(kind, TrollGRPOConfig, tmp_path, **ADAPTIVE | {"max_steps": 4}, learning_rate=HIGH_RATE)
        trainer.train()
        rates = {group["lr"] for group in trainer.optimizer.param_groups}
        assert rates == {HIGH_RATE}, "a checkpoint has the scheduled rate"
        found.append(logged(trainer, "troll/rate_factor"))
    assert found[0][3] < found[0][2] < 1, "the fourth update would change it"
    assert found[1] == [*found[0][:3], found[0][2]]


def test_no_growth_during_the_warm_up(tmp_path):
    options = ADAPTIVE | {
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 11,  # ends within a rollout batch, at its last update
    }
    trainer = make_trainer(*OURS["grpo"], tmp_path, **options)
    trainer.train()
    factors = logged(trainer, "troll/rate_factor")
    assert factors[:11] == [1.0] * 11 and factors[11:] == [2.0] * 4 + [4.0]


@pytest.mark.parametrize("save_steps", [6, 8])
def test_resume(save_steps, tmp_path):
    """In the middle of a rollout batch and at its end: the rates of the uninterrupted run, bit for bit."""
    options = ADAPTIVE | {"learning_rate": HIGH_RATE, "save_strategy": "steps", "save_steps": save_steps}
    whole = make_trainer(*OURS["grpo"], tmp_path, **options)
    whole.train()
    resumed = make_trainer(*OURS["grpo"], tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
    for name in ("learning_rate", "troll/rate_factor", "troll/rate_signal"):
        assert logged(resumed, name)[-(16 - save_steps) :] == logged(whole, name)[save_steps:]
    assert all(torch.equal(x, weights(resumed)[name]) for name, x in weights(whole).items())
    # With the option off the schedule's own rates return
    off = make_trainer(*OURS["grpo"], tmp_path, **options | {"adaptive_learning_rate": False})
    off.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
    assert set(logged(off, "learning_rate")[save_steps:]) == {HIGH_RATE}


class OnTwoRanks(TrollGRPOTrainer):
    """Looks for the state of a run on two ranks."""

    def _state_file(self, folder):
        return folder / "rollout-state-0-of-2.pt"


def test_no_growth_in_a_batch_that_a_resume_began_anew(tmp_path):
    """A fresh batch for the last of four updates has a signal of 0: nothing has moved."""
    options = ADAPTIVE | {"learning_rate": 1e-5, "save_strategy": "steps", "save_steps": 7, "max_steps": 8}
    before = make_trainer(*OURS["grpo"], tmp_path, **options)
    before.train()
    assert logged(before, "troll/rate_factor")[6:] == [2.0, 4.0]
    resumed = make_trainer(OnTwoRanks, TrollGRPOConfig, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert logged(resumed, "troll/rate_factor")[-1] == 2.0


@pytest.mark.parametrize("had_factor", [True, False])
def test_a_resume_on_another_number_of_ranks_keeps_the_factor(had_factor, tmp_path, caplog):
    """A rank whose own state is missing began with a factor of 1: with the rate that was too high."""
    options = ADAPTIVE | {"learning_rate": HIGH_RATE, "save_strategy": "steps", "save_steps": 8, "max_steps": 9}
    before = make_trainer(*OURS["grpo"], tmp_path, **options | {"adaptive_learning_rate": had_factor})
    before.train()
    resumed = make_trainer(OnTwoRanks, TrollGRPOConfig, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert ("no factor of the adaptive learning rate" in caplog.text) == (not had_factor)
    if had_factor:
        factor = logged(before, "troll/rate_factor")[7]
        assert factor < 1 and logged(resumed, "troll/rate_factor")[-1] == factor


def test_every_rank_takes_the_factor_of_the_first(tmp_path, monkeypatch):
    """On a node without the file, ranks began with a factor of 1, and trained with other rates than the first node."""
    options = ADAPTIVE | {"learning_rate": HIGH_RATE, "save_strategy": "steps", "save_steps": 8, "max_steps": 9}
    make_trainer(*OURS["grpo"], tmp_path, **options).train()
    monkeypatch.setattr(
        checkpoints, "broadcast_object_list", lambda found: [{"adaptive_rate": {"": {"factor": 0.0625}}}]
    )
    resumed = make_trainer(OnTwoRanks, TrollGRPOConfig, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert logged(resumed, "troll/rate_factor")[-1] == 0.0625


REFUSED = [
    ({"steps_per_generation": 1}, "at least 2 updates per rollout batch, got 1"),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, "got 1.5"),
    ({"trust_region": "mask"}, "masked beyond a binary_tv of 0.15\\) does not report it"),
    ({"trust_region": "evidence.peer_methods.Ipo"}, "`policy_kl` in its `token_stats` and `mean_metrics`"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE | options)


def test_a_scheduler_that_keeps_its_last_rate_is_refused(tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 4}
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE | options)
    with pytest.raises(ValueError, match="ReduceLROnPlateau sets the rates"):
        trainer.train()


@pytest.mark.parametrize(("attribute", "value"), [("optim", "lomo"), ("distributed_type", DistributedType.DEEPSPEED)])
def test_a_step_inside_of_the_backward_pass_is_refused(attribute, value, tmp_path):
    """The log showed rates that no step had taken."""
    trainer = make_trainer(*OURS["grpo"], tmp_path, **ADAPTIVE)
    args, accelerator = SimpleNamespace(optim="adamw_torch"), SimpleNamespace(distributed_type=DistributedType.NO)
    setattr(args if attribute == "optim" else accelerator, attribute, value)
    trainer.adaptive_rate.trainer = SimpleNamespace(guard=None, accelerator=accelerator)
    with pytest.raises(ValueError, match="takes the step inside of the backward pass"):
        trainer.adaptive_rate.on_train_begin(args, None, None, lr_scheduler=None)
