"""Numbers that are not finite stay out of the weights, and masked positions out of the loss."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tiny import saved_model, tiny_tokenizer, token_reward
from torch import nn
from transformers import TrainerCallback
from trl_comparison import logged, make_trainer, micro_batch, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.resilience.finite_guard import FiniteGuard

# Momentum and weight decay would move weights without a gradient; the schedule would move the learning rate
OPTIONS = {"weight_decay": 0.1, "lr_scheduler_type": "linear", "learning_rate": 2e-2, "max_steps": 6, "kl_bound": 0.01}


def grpo(folder, **options):
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, **OPTIONS | options)


def rloo(folder, **options):
    return make_trainer(TrollRLOOTrainer, TrollRLOOConfig, folder, **OPTIONS | {"beta": 0.0} | options)


class Snapshots(TrainerCallback):
    """Weights and optimizer state after every update, and before the first."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        trainer.add_callback(self)

    def on_step_begin(self, *args, **kwargs):
        if not self.seen:
            self.on_step_end()

    def on_step_end(self, *args, **kwargs):
        self.seen.append((weights(self.trainer), copy.deepcopy(self.trainer.optimizer.state_dict())))

    def moved(self) -> list[bool]:
        """Whether anything changed, update by update."""
        return [not same(a, b) for a, b in zip(self.seen, self.seen[1:], strict=False)]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def before_update(trainer, update, do):
    """Call `do(inputs)` on the micro-batches of one update, before the loss."""
    compute_loss = trainer.compute_loss

    def inject(model, inputs, **kwargs):
        if trainer.state.global_step + 1 == update:
            do(inputs)
        return compute_loss(model, inputs)

    trainer.compute_loss = inject


def assert_only_update_3_is_skipped(trainer, caplog):
    """Of the six updates of a training."""
    snapshots = Snapshots(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert snapshots.moved() == [True, True, False, True, True, True]
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 0, 0, 0]


def first_live(inputs) -> tuple[int, int]:
    return tuple(inputs["completion_mask"].nonzero()[0].tolist())


def poison_hidden_state(trainer, value):
    """One hidden state is `value` from now on, so that the logits of its position are not finite."""

    def hook(module, args, output):
        output.last_hidden_state[0, -2] = value
        return output

    return trainer.model.model.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (grpo, "advantages", math.nan),
        (grpo, "old_per_token_logps", -math.inf),
        *((grpo, "troll_old_log_probs", value) for value in (math.nan, math.inf)),  # −inf is an unused slot
        (rloo, "advantages", math.inf),
        (rloo, "old_logps", math.nan),
        (rloo, "troll_old_log_probs", math.nan),
    ],
)
def test_a_bad_value_in_the_rollout_batch_skips_its_update(make, name, value, tmp_path, caplog):
    def poison(inputs):
        row, column = first_live(inputs)
        inputs[name][row if inputs[name].dim() == 1 else (row, column)] = value

    trainer = make(tmp_path)
    before_update(trainer, 3, poison)
    assert_only_update_3_is_skipped(trainer, caplog)
    assert "Update 3 skipped" in caplog.text and f"rank 0: {name}" in caplog.text
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("make", "value", "tensor"),
    [(grpo, math.nan, "loss"), (rloo, math.inf, "loss"), (rloo, math.nan, "logits"), (grpo, math.inf, "gradient")],
)
def test_a_bad_value_on_the_way_skips_the_update(make, tensor, value, tmp_path, caplog):
    trainer = make(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.0 if value == math.nan else 1.0)
    compute_loss, hooks = trainer._compute_loss, []  # TRL's

    def inject(model, inputs):
        if trainer.state.global_step + 1 != 3:
            return compute_loss(model, inputs)
        if tensor == "loss":
            return compute_loss(model, inputs) * value
        if tensor == "logits":
            hook = poison_hidden_state(trainer, value)
        else:
            parameter = trainer.model.get_output_embeddings().weight
            hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
            hooks.append(hook)
            return compute_loss(model, inputs)
        loss = compute_loss(model, inputs)
        hook.remove()
        return loss

    trainer._compute_loss = inject

    class Remove(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            for hook in hooks:
                hook.remove()

    trainer.add_callback(Remove())
    assert_only_update_3_is_skipped(trainer, caplog)
    said = caplog.text.partition("Update 3 skipped")[2]
    assert tensor in said.splitlines()[0]


def test_logits_that_are_not_finite_while_the_rollout_is_scored(tmp_path, caplog):
    """The old policy of one token is then unknown: the update that has its row is skipped, the others are not."""
    trainer = grpo(tmp_path, max_steps=4)
    score = trainer._get_per_token_logps_and_entropies

    def poisoned(model, *args, **kwargs):
        if torch.is_grad_enabled():
            return score(model, *args, **kwargs)
        poisoned.calls += 1
        hook = poison_hidden_state(trainer, math.nan)
        result = score(model, *args, **kwargs)
        hook.remove()
        return result

    poisoned.calls = 0
    trainer._get_per_token_logps_and_entropies = poisoned
    snapshots = Snapshots(trainer)
    trainer.train()
    assert poisoned.calls == 1
    # One row in each of the four chunks that TRL scores is bad, and TRL shuffles the rows
    assert logged(trainer, "troll/skipped_updates") == [0 if moved else 1 for moved in snapshots.moved()]
    assert 1 <= sum(logged(trainer, "troll/skipped_updates")) <= 4
    assert "old_per_token_logps, troll_old_log_probs" in caplog.text


# -- Rewards ----------------------------------------------------------------------------------------------------------


def reward_with(value, call, row=5):
    def spoiled_reward(completion_ids, **kwargs):
        spoiled_reward.calls += 1
        rewards = token_reward(completion_ids)
        if spoiled_reward.calls in call:
            rewards[row] = value
        return rewards

    spoiled_reward.calls = 0
    return spoiled_reward


def with_reward(trainer, function):
    trainer.reward_func_names = ["spoiled_reward"]
    trainer.reward_funcs = trainer.finite_guard.watch_rewards([function], trainer.reward_func_names)
    return trainer


async def async_nan_reward(completion_ids, **kwargs):
    return [math.nan, *token_reward(completion_ids)[1:]]


@pytest.mark.parametrize(("make", "value"), [(grpo, math.nan), (grpo, -math.inf), (rloo, math.inf)])
def test_a_bad_reward_skips_its_rollout_batch(make, value, tmp_path, caplog):
    """TRL loses the group of an infinite reward, and the row of a NaN, without a word."""
    trainer = with_reward(make(tmp_path, steps_per_generation=2), reward_with(value, call=[2]))
    snapshots = Snapshots(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert snapshots.moved() == [True, True, False, False, True, True]
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 1, 0, 0]
    assert "reward 'spoiled_reward' at row 5 of the rollout batch (rank 0, row 5 there)" in caplog.text
    assert all(math.isfinite(reward) for reward in logged(trainer, "reward"))


def test_bad_rewards_of_async_functions_and_of_models_are_named(tmp_path):
    class RewardModel(nn.Module):
        def forward(self, input_ids, **kwargs):
            return type("Output", (), {"logits": torch.full((len(input_ids), 1), torch.nan)})

    trainer = grpo(tmp_path, max_skipped_updates=1, reward=async_nan_reward)
    with pytest.raises(FloatingPointError, match="reward 'async_nan_reward' at row 0 of the rollout batch"):
        trainer.train()
    trainer = with_reward(grpo(tmp_path, max_skipped_updates=1), RewardModel())
    trainer.reward_processing_classes = [tiny_tokenizer()]
    with pytest.raises(FloatingPointError, match=r"reward 'spoiled_reward' at row 0 .* and 29 more"):
        trainer.train()


def test_a_run_stops_after_so_many_skipped_updates_in_a_row(tmp_path):
    """Counted in a row: the good update in between starts the count over."""
    trainer = grpo(tmp_path, max_skipped_updates=2, max_steps=10)
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (
        compute_loss(model, inputs) * (math.nan if trainer.state.global_step + 1 in (2, 4, 5, 6) else 1.0)
    )
    with pytest.raises(FloatingPointError, match=r"Stopped at update 5: 2 updates in a row .* rank 0: loss"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert logged(trainer, "troll/skipped_updates") == [0, 1, 0, 1]


def test_the_count_in_a_row_survives_a_resume(tmp_path):
    options = {"max_skipped_updates": 3, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    for last, outcome in ((2, None), (6, FloatingPointError)):
        trainer = grpo(tmp_path, **options | {"max_steps": last})
        compute_loss = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs, compute_loss=compute_loss: compute_loss(model, inputs) * math.nan
        if outcome is None:
            trainer.train()
        else:
            with pytest.raises(outcome, match="Stopped at update 3: 3 updates in a row"):
                trainer.train(resume_from_checkpoint=True)


# -- Masked positions -------------------------------------------------------------------------------------------------


def gradient_of_loss(trainer, inputs):
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("steps_per_generation", "level"), [(1, "token"), (4, "token"), (4, "sequence")], ids=["idle", "off", "sequence"]
)
def test_masked_positions_never_enter_an_exp(level, steps_per_generation, tmp_path):
    """A masked token with a log-ratio of 200 turns TRL's gradient NaN: 0·exp(200)."""
    trainer = grpo(
        tmp_path,
        learning_rate=1e-5,
        model=saved_model(tmp_path / "model", spread=320.0),
        beta=0.5,
        importance_sampling_level=level,
        steps_per_generation=steps_per_generation,
        off_policy_mask_threshold=0.1,
        entropy_coef=0.01,
        max_steps=3,
        use_bias_correction_kl=steps_per_generation > 1,
    )
    trainer.train()
    inputs = micro_batch(trainer)
    shape = inputs["completion_mask"].shape
    inputs["advantages"] = torch.linspace(-1, 1, shape[0])
    inputs["tool_mask"] = torch.ones(shape, dtype=torch.long)
    inputs["tool_mask"][:, 2:] = 0  # the tokens of a tool are scored, but not trained on
    inputs["completion_ids"] = inputs["completion_ids"].clone()
    inputs["completion_ids"][:, 2] = 7  # some have a log-probability below −90
    inputs["completion_mask"] = inputs["completion_mask"].clone()
    inputs["completion_mask"][3:5] = 0  # two truncated completions
    if "troll_old_token_ids" in inputs:
        masked = (inputs["completion_mask"] == 0).unsqueeze(-1)
        inputs["troll_old_token_ids"] = inputs["troll_old_token_ids"].masked_fill(masked, -1)
        inputs["troll_old_token_ids"][:, 2] = -1
        inputs["troll_old_token_ids"][:, 2, 0] = inputs["completion_ids"][:, 2].where(masked[:, 2, 0] == 0, -1)
    dead = inputs["completion_mask"] * inputs["tool_mask"] == 0
    clean = {**inputs, "advantages": inputs["advantages"].masked_fill(dead.all(1), 0.0)}
    expected_loss, expected = gradient_of_loss(trainer, clean)
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logits = trainer.model(input_ids=ids, attention_mask=ids != 0).logits
        assert logits.log_softmax(-1)[:, -shape[1] + 1, 7].min() < -90
    assert expected_loss.isfinite() and max(g.abs().max() for g in expected.values()) > 0

    names = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "troll_old_log_probs")
    given = {name: inputs[name] for name in names if name in inputs}
    for garbage in (-200.0, 200.0, math.nan, -math.inf):
        spoiled = {name: x.masked_fill(dead[..., None] if x.dim() == 3 else dead, garbage) for name, x in given.items()}
        spoiled["advantages"] = inputs["advantages"].masked_fill(dead.all(1), garbage)
        loss, gradient = gradient_of_loss(trainer, inputs | spoiled)
        assert torch.equal(loss, expected_loss), garbage
        assert all(torch.equal(gradient[name], expected[name]) for name in expected), garbage
        assert not trainer.finite_guard._counts[:-1].any(), "masked values are not counted"


def test_what_is_not_masked_is_left_as_it_is():
    live = torch.tensor([[True, False], [False, False]])
    inputs = {"old_per_token_logps": torch.tensor([[-1.5, math.nan], [0.5, math.inf]]), "prompt_ids": live}
    inputs["advantages"] = torch.tensor([2.0, math.nan])
    inputs["completion_mask"] = live.long()
    guard = FiniteGuard(Accelerator(cpu=True), None)
    with guard.watch_loss(inputs, training=True) as clean:
        pass
    assert clean["old_per_token_logps"].tolist() == [[-1.5, 0.0], [0.0, 0.0]]
    assert clean["advantages"].tolist() == [2.0, 0.0] and clean["prompt_ids"] is live
    assert not guard._counts[:-1].any()
    assert inputs["advantages"].isnan().any(), "the rollout batch itself is used again"


def masked(inputs):
    inputs["completion_mask"].zero_()
    inputs["troll_old_token_ids"].fill_(-1)


def of_no_number(inputs):
    inputs["advantages"].fill_(math.nan)


@pytest.mark.parametrize("make", [grpo, rloo])
def test_an_update_without_a_live_token_moves_nothing(make, tmp_path, caplog):
    """Momentum and weight decay would move the weights, with a gradient of zero."""
    trainer = make(tmp_path, max_skipped_updates=1)
    before_update(trainer, 3, masked)
    assert_only_update_3_is_skipped(trainer, caplog)
    assert "Update 3 skipped: every completion in it is masked" in caplog.text


def test_a_subclass_with_a_loss_of_its_own_trains(tmp_path):
    """The guard sees no loss, and took every update for one without a token."""

    class OwnLoss(TrollGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids, mask = (
                torch.cat([inputs[f"{part}_{name}"] for part in ("prompt", "completion")], 1)
                for name in ("ids", "mask")
            )
            return model(input_ids=ids, attention_mask=mask).logits.square().mean()

    trainer = make_trainer(OwnLoss, TrollGRPOConfig, tmp_path, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert any((value != before[name]).any() for name, value in weights(trainer).items())
    assert logged(trainer, "troll/skipped_updates") == [0, 0]


# -- What a reward function returns -----------------------------------------------------------------------------------


def test_a_reward_function_may_return_a_generator_as_in_trl(tmp_path):
    def lazy(completion_ids, **kwargs):
        return (float(len(ids)) for ids in completion_ids)

    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, reward=lazy, max_steps=1)
    trainer.train()
    assert logged(trainer, "reward")[0] > 0


@pytest.mark.parametrize(
    "make_rewards",
    [lambda ids: None, lambda ids: 0.5, lambda ids: ["good"] * len(ids), lambda ids: [[1.0]] * len(ids)],
    ids=["nothing", "a number", "texts", "lists"],
)
def test_what_a_reward_function_may_not_return_is_named(make_rewards, tmp_path):
    def careless(completion_ids, **kwargs):
        return make_rewards(completion_ids)

    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, reward=careless, max_steps=1)
    with pytest.raises(TypeError, match=r"'careless' must return a list with a number or `None` for each .*, got "):
        trainer.train()


# -- Gradient scaler --------------------------------------------------------------------------------------------------


def test_the_scaler_of_float16_keeps_skipping_what_overflows(tmp_path):
    """It starts with a scale that overflows, by design: uncounted, and the scale halves. A bad loss is counted."""
    trainer = grpo(tmp_path, max_skipped_updates=1)
    scaler = with_scaler(trainer)
    trainer.model.get_output_embeddings().weight.register_hook(
        lambda gradient: gradient * (math.inf if trainer.state.global_step < 2 else 1.0)
    )
    snapshots = Snapshots(trainer)
    trainer.train()
    moved = [not same(a[0], b[0]) for a, b in zip(snapshots.seen, snapshots.seen[1:], strict=False)]
    assert moved == [False, False, True, True, True, True]
    assert scaler.get_scale() == 2.0**14
    assert sum(logged(trainer, "troll/skipped_updates")) == 0
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: compute_loss(model, inputs) * math.nan
    with pytest.raises(FloatingPointError, match="loss"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def with_scaler(trainer) -> torch.amp.GradScaler:
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    # accelerate has a scaler on a GPU only, and so unscales there only
    trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer.optimizer)
    return scaler


@pytest.mark.parametrize("bad", [masked, of_no_number])
def test_a_skipped_update_is_none_of_the_scalers(bad, tmp_path, caplog):
    """A bad reward halved the scale, and for an update without a live token the learning rate fell."""
    trainer = grpo(tmp_path, lr_scheduler_type="linear")
    scaler = with_scaler(trainer)
    before_update(trainer, 3, bad)
    assert_only_update_3_is_skipped(trainer, caplog)
    assert scaler.get_scale() == 2.0**16
    assert trainer.lr_scheduler.last_epoch == 5


def test_a_skipped_update_leaves_the_adaptive_entropy_bonus(tmp_path):
    """Entropies that are not finite are counted as none, which would raise the bonus."""
    adaptive = {"entropy_target": 0.5, "entropy_coef_delta": 0.01, "entropy_coef_min": 0.0, "entropy_coef_max": 0.1}
    trainer = grpo(tmp_path, use_adaptive_entropy=True, **adaptive)

    def poison(module, args, output):
        if trainer.state.global_step + 1 == 3:
            output.last_hidden_state.fill_(math.nan)
        return output

    trainer.model.model.register_forward_hook(poison)
    seen = []
    before_update(trainer, 4, lambda inputs: seen.append((trainer.entropy_coef, trainer._last_world_entropy)))
    trainer.train()
    assert logged(trainer, "troll/skipped_updates") == [0, 0, 1, 0, 0, 0]
    assert seen == [(0.0, pytest.approx(4.4, abs=0.2))], "and not (0.01, 0.0)"


@pytest.mark.parametrize("optim", [None, "lomo", "galore_adamw_8bit_layerwise"])
def test_what_steps_in_the_backward_is_stopped_before(optim, tmp_path, monkeypatch):
    """There nothing can be skipped any more."""
    trainer = grpo(tmp_path)
    if optim is None:
        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    trainer.args.optim = optim or trainer.args.optim
    trainer._compute_loss = lambda model, inputs: torch.tensor(math.nan)
    trainer._old_policy_of = lambda inputs: None
    trainer.model.train()
    who = f"`optim` {optim}" if optim else "DeepSpeed"
    with pytest.raises(FloatingPointError, match=rf"Stopped before update 1, which {who} cannot skip.*loss"):
        trainer.compute_loss(trainer.model, {"completion_mask": torch.ones(1, 1)})
