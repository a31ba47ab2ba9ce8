"""Numbers that are not finite stay out of the weights: the update is skipped, bit for bit, and its cause is named."""

import functools
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainerCallback

from tests.tiny import tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from tests.trl_comparison import OURS, logged, make_trainer, weights

# Momentum and weight decay would move weights without a gradient; the schedule would move the learning rate
OPTIONS = {"weight_decay": 0.1, "lr_scheduler_type": "linear", "learning_rate": 2e-2, "max_steps": 6, "kl_bound": 0.01}


grpo = functools.partial(make_trainer, *OURS["grpo"], **OPTIONS)
rloo = functools.partial(make_trainer, *OURS["rloo"], **OPTIONS, beta=0.0)


class Snapshots(TrainerCallback):
    """Weights, moments and learning rate after every update, and before the first."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        trainer.add_callback(self)

    def on_step_begin(self, *args, **kwargs):
        if not self.seen:
            self.on_step_end()

    def on_step_end(self, *args, **kwargs):
        optimizer = self.trainer.optimizer
        moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
        rate = torch.tensor(optimizer.param_groups[0]["lr"])
        self.seen.append([*weights(self.trainer).values(), *moments, rate])

    def moved(self) -> list[bool]:
        """Whether anything changed, update by update."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [len(a) != len(b) or not all(map(torch.equal, a, b)) for a, b in pairs]


def before_update(trainer, update, do):
    """Call `do(inputs)` on the micro-batches of one update, before the loss."""
    compute_loss = trainer.compute_loss

    def inject(model, inputs, **kwargs):
        if trainer.state.global_step + 1 == update:
            do(inputs)
        return compute_loss(model, inputs)

    trainer.compute_loss = inject


def assert_only_update_3_is_skipped(trainer, caplog) -> str:
    """Train for six updates, and return what was logged of the third."""
    snapshots = Snapshots(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert snapshots.moved() == [True, True, False, True, True, True]
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 0, 0, 0]
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    return caplog.text.partition("Update 3 skipped")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("make", "column", "value"),
    [
        (grpo, "old_sparse_logps", math.nan),
        (functools.partial(grpo, trust_region="mask"), "old_per_token_logps", math.nan),
        (rloo, "advantages", math.inf),
    ],
)
def test_a_bad_value_in_the_rollout_batch_skips_its_update(make, column, value, tmp_path, caplog):
    def poison(inputs):
        row, token = inputs["completion_mask"].nonzero()[0].tolist()
        inputs[column][row if inputs[column].dim() == 1 else (row, token)] = value

    trainer = make(tmp_path)
    before_update(trainer, 3, poison)
    assert "rank 0: loss" in assert_only_update_3_is_skipped(trainer, caplog)


@pytest.mark.parametrize(
    ("make", "value", "cause"),
    [(grpo, math.nan, "loss"), (rloo, math.nan, "logits"), (grpo, math.inf, "gradient")],
)
def test_a_bad_value_on_the_way_skips_the_update(make, value, cause, tmp_path, caplog):
    trainer = make(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.0 if value == math.nan else 1.0)
    in_update_3 = lambda: trainer.state.global_step + 1 == 3 and torch.is_grad_enabled()
    if cause == "loss":
        compute_loss = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: compute_loss(model, inputs) * (value if in_update_3() else 1.0)
    elif cause == "logits":

        def poison(module, args, output):
            if in_update_3():
                output.last_hidden_state[0, -2] = value

        trainer.model.model.register_forward_hook(poison)
    else:
        weight = trainer.model.get_output_embeddings().weight
        weight.register_hook(lambda gradient: gradient + (value if trainer.state.global_step == 2 else 0.0))
    assert cause in assert_only_update_3_is_skipped(trainer, caplog)


# -- Rewards ----------------------------------------------------------------------------------------------------------


def spoiled(value, call=2, row=5):
    calls = []

    def spoiled_reward(completion_ids, **kwargs):
        calls.append(1)
        rewards = token_reward(completion_ids)
        if len(calls) == call:
            rewards[row] = value
        yield from rewards  # a generator is a list to TRL

    return spoiled_reward


@pytest.mark.parametrize(("make", "value"), [(grpo, math.nan), (rloo, math.inf)])
def test_a_bad_reward_skips_its_rollout_batch(make, value, tmp_path, caplog):
    """TRL loses the group of an infinite reward, and the row of a NaN, without a word."""
    trainer = make(tmp_path, steps_per_generation=2, reward=spoiled(value))
    snapshots = Snapshots(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert snapshots.moved() == [True, True, False, False, True, True]
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 1, 0, 0]
    assert "'spoiled_reward' at row 5" in caplog.text
    assert all(math.isfinite(reward) for reward in logged(trainer, "reward"))


async def async_reward(completion_ids, **kwargs):
    return [math.nan, *token_reward(completion_ids)[1:]]


class RewardModel(nn.Module):
    config = type("Config", (), {"_name_or_path": "reward_model", "pad_token_id": 0})

    def forward(self, input_ids, **kwargs):
        return type("Output", (), {"logits": torch.full((len(input_ids), 1), torch.nan)})


@pytest.mark.parametrize(("reward", "name"), [(async_reward, "async_reward"), (RewardModel(), "reward_model")])
def test_async_functions_and_models_are_named(reward, name, tmp_path):
    options = {"reward": reward, "reward_processing_classes": [tiny_tokenizer()], "max_skipped_updates": 1}
    with pytest.raises(FloatingPointError, match=f"reward '{name}' at row 0"):
        grpo(tmp_path, **options).train()


@pytest.mark.parametrize("rewards", [{"accuracy": 1.0, "format": 0.5}, [[0.5]], None])
def test_what_is_no_list_of_numbers_is_refused(rewards, tmp_path):
    """TRL would train on the keys of a dictionary if they are numbers."""
    with pytest.raises(TypeError, match=r"'own_reward' must return a list .* got "):

        def own_reward(completions, **kwargs):
            return rewards

        grpo(tmp_path, reward=own_reward).train()


def test_a_bad_reward_of_an_evaluation_skips_nothing(tmp_path, caplog):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tiny_prompts(2), "max_steps": 2}
    trainer = grpo(tmp_path, reward=spoiled(math.nan, call=2), **options)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert logged(trainer, "troll/skipped_updates") == [0, 0]
    assert "Evaluation at step 2" in caplog.text


# -- The end of a run -------------------------------------------------------------------------------------------------


def spoil_losses(trainer, updates):
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (
        compute_loss(model, inputs) * (math.nan if trainer.state.global_step + 1 in updates else 1.0)
    )
    return trainer


def test_a_run_stops_after_so_many_skipped_updates_in_a_row(tmp_path):
    """Counted in a row, also over a resume: the good update in between starts the count over."""
    options = {"max_skipped_updates": 3, "save_strategy": "steps", "save_steps": 1}
    spoil_losses(grpo(tmp_path, **options, max_steps=5), (1, 2, 4, 5)).train()
    resumed = spoil_losses(grpo(tmp_path, **options, max_steps=9), (6,))
    with pytest.raises(FloatingPointError, match="Stopped at update 6: 3 updates in a row"):
        resumed.train(resume_from_checkpoint=True)
    assert all(p.isfinite().all() for p in resumed.model.parameters())


# -- Updates without a token, the scaler, the entropy bonus, other optimizers -----------------------------------------


def mask_all(inputs):
    inputs["completion_mask"].zero_()


def spoil_advantages(inputs):
    inputs["advantages"].fill_(math.nan)


@pytest.mark.parametrize("make", [grpo, rloo])
def test_an_update_without_a_live_token_moves_nothing(make, tmp_path, caplog):
    """Momentum and weight decay would move the weights, with a gradient of zero."""
    trainer = make(tmp_path, max_skipped_updates=1)
    before_update(trainer, 3, mask_all)
    assert "every completion in it is masked" in assert_only_update_3_is_skipped(trainer, caplog)


def with_scaler(trainer) -> torch.amp.GradScaler:
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    # accelerate has a scaler on a GPU only, and so unscales there only
    trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer.optimizer)
    return scaler


@pytest.mark.parametrize("bad", [mask_all, spoil_advantages])
def test_a_skipped_update_is_none_of_the_scalers(bad, tmp_path, caplog):
    """A bad reward halved the scale, and for an update without a live token the learning rate fell."""
    trainer = grpo(tmp_path)
    scaler = with_scaler(trainer)
    before_update(trainer, 3, bad)
    assert_only_update_3_is_skipped(trainer, caplog)
    assert scaler.get_scale() == 2.0**16
    assert trainer.lr_scheduler.last_epoch == 5


def test_an_overflow_is_the_scalers(tmp_path):
    """It skips the update and halves its scale, and the guard counts nothing."""
    trainer = grpo(tmp_path, max_skipped_updates=1)
    scaler = with_scaler(trainer)
    trainer.model.get_output_embeddings().weight.register_hook(
        lambda gradient: gradient * (math.inf if trainer.state.global_step < 2 else 1.0)
    )
    trainer.train()
    assert scaler.get_scale() == 2.0**14 and all(p.isfinite().all() for p in trainer.model.parameters())
    assert sum(logged(trainer, "troll/skipped_updates")) == 0


def test_a_skipped_update_leaves_the_adaptive_entropy_bonus(tmp_path):
    adaptive = {"entropy_target": 0.5, "entropy_coef_delta": 0.01, "entropy_coef_min": 0.0, "entropy_coef_max": 0.1}
    trainer = grpo(tmp_path, use_adaptive_entropy=True, gradient_accumulation_steps=2, **adaptive)

    def poison(module, args, output):
        if trainer.state.global_step + 1 == 3 and torch.is_grad_enabled():
            output.last_hidden_state.fill_(math.nan)

    trainer.model.model.register_forward_hook(poison)
    seen = {}
    for update in (3, 4):
        before_update(trainer, update, lambda inputs, update=update: seen.setdefault(update, control()))
    control = lambda: (trainer.entropy_coef, trainer._last_world_entropy, trainer._entropy_window_stats)
    trainer.train()
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 0, 0, 0]
    assert seen[3] == seen[4] and seen[3][1] == pytest.approx(4.4, abs=0.2)


@pytest.mark.parametrize("optim", [None, "galore_adamw_8bit_layerwise"])
def test_what_steps_in_the_backward_is_stopped_before(optim, tmp_path, monkeypatch):
    """There nothing can be skipped any more."""
    trainer = grpo(tmp_path, max_steps=1)
    trainer.train()
    if optim is None:
        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    trainer.args.optim = optim or trainer.args.optim
    inputs = trainer._buffered_inputs[1]
    assert trainer.compute_loss(trainer.model.train(), inputs).isfinite()
    spoil_advantages(inputs)
    who = f"`optim` {optim}" if optim else "DeepSpeed"
    with pytest.raises(FloatingPointError, match=f"Stopped before update 2, which {who} cannot skip.*loss"):
        trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize(
    ("make", "options"),
    [(grpo, {}), (grpo, {"support_size": 100}), (grpo, {"trust_region": "mask"}), (rloo, {})],
)
def test_a_logit_of_minus_infinity_is_a_probability_of_zero(make, options, tmp_path):
    """As of a padded vocabulary. It makes TRL's entropy NaN, for which every update was skipped."""
    model = tiny_model()
    model.lm_head = nn.Linear(16, 100)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.get_input_embeddings().weight)
        model.lm_head.bias.zero_()[90:] = -math.inf
    model.tie_weights()
    trainer = make(tmp_path, model=model, **options | {"max_steps": 3})
    snapshots = Snapshots(trainer)
    trainer.train()
    assert all(snapshots.moved()) and logged(trainer, "troll/skipped_updates") == [0, 0, 0]
    assert all(p.isfinite().all() for name, p in trainer.model.named_parameters() if name != "lm_head.bias")
