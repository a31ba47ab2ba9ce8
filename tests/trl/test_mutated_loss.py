"""A TRL whose loss has changed: every trainer refuses one that means something else, and takes the same in other words.

A mutant is the options of a run, and which text of TRL's `_compute_loss` becomes which.
"""

import async_engine
import pytest
import torch
from mutated_trl import TRAINERS, assert_equal, replace, run_of
from tiny import saved_model
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl_comparison import weights

from troll_trl.experimental.async_grpo import trainer as async_trainer
from troll_trl.experimental.async_grpo.arithmetic_check import check_async_arithmetic
from troll_trl.trainers import troll_trainer
from troll_trl.trainers.arithmetic_check import check_arithmetic

MESSAGE = r"does not support trl \d.*`{}`'s loss (averages over tokens, adds|cannot be compared).* tested with trl \d"
GRPO, BNPO, DR_GRPO = ({"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo"))
SEQUENCE = {"importance_sampling_level": "sequence"}
PENALTY, MASK = {"trust_region": "penalty"}, {"trust_region": "mask"}
MASKED = {"off_policy_mask_threshold": 0.5}
BETA = {"beta": 0.1}
CORRECTED = BETA | {"use_bias_correction_kl": True}
# The second pass takes the place of the first one, whose regression has the gradient
SECOND_PASS = """with torch.no_grad():
        self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep)
    """
OTHER_LOSSES = {
    # The average over tokens
    "dapo": ({}, {"normalizer * self.current_gradient_accumulation_steps /": "normalizer /"}),
    "dapo_of_micro_batch": ({}, {'inputs["num_items_in_batch"].clamp': "mask.sum().clamp"}),
    "dapo_of_rollout": ({}, {"steps / self.args.steps_per_generation": "steps"}),
    "grpo": (GRPO, {"(per_token_loss * mask).sum(-1) /": "(per_token_loss * mask).sum(-1) / 2 /"}),
    "grpo_by_width": (
        GRPO,
        {"mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean": "mask).sum(-1) / mask.size(1)).mean"},
    ),
    "bnpo": (BNPO, {"(per_token_loss * mask).sum() / mask.sum()": "(per_token_loss * mask).sum() / 2 / mask.sum()"}),
    "bnpo_by_padding": (BNPO, {".sum() / mask.sum().clamp(min=1.0)": ".sum() / mask.numel()"}),
    "dr_grpo": (DR_GRPO, {"per_token_loss.size(0) * self.max_completion_length": "self.max_completion_length"}),
    "dr_grpo_by_width": (DR_GRPO, {"per_token_loss.size(0) * self.max_completion_length": "per_token_loss.numel()"}),
    "luspo": (
        SEQUENCE | {"loss_type": "luspo"},
        {"(per_token_loss * mask).sum(-1).mean()": "(per_token_loss * mask).sum(-1).sum()"},
    ),
    "accumulation": (GRPO, {"loss = loss / normalizer": "loss = loss / 1"}),
    # The reference KL
    "kl": (BETA, {"self.beta * per_token_kl": "self.beta * per_token_kl / 2"}),
    "kl_estimate": (BETA, {"- (ref_per_token_logps - per_token_logps) - 1": "- 1"}),
    "kl_weight_without_gradient": (CORRECTED, {"per_token_kl * coef_1": "per_token_kl * coef_1.detach()"}),
    "kl_weight_clamped": (CORRECTED, {"per_token_kl * coef_1": "per_token_kl * coef_1.clamp(max=10.0)"}),
    "kl_weight_by_default": (
        BETA | {"use_bias_correction_kl": False},
        {"if self.args.use_bias_correction_kl:": "if True:"},
    ),
    "beta_of_args": (BETA, {"self.beta": "self.args.beta"}),
    "beta_of_args_penalty": (PENALTY | BETA, {"self.beta": "self.args.beta"}),
    "kl_if_there_is_a_reference": (
        BETA,
        {"if self.beta != 0.0": 'if "ref_per_token_logps" in inputs', "self.beta *": "self.args.beta *"},
    ),
    # The clip
    "epsilon_low_of_args": ({}, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {"1 + self.epsilon_high)\n": "1 + (self.args.epsilon_high or self.args.epsilon))\n"}),
    "epsilon_of_args_sequence": (SEQUENCE, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_of_args_mask": (MASK, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
    "one_epsilon": (PENALTY | {"epsilon_high": 0.4}, {"1 + self.epsilon_high)\n": "1 + self.epsilon_low)\n"}),
    "without_clip": (PENALTY, {"torch.min(per_token_loss1, per_token_loss2)": "per_token_loss1"}),
    "the_larger": (PENALTY, {"torch.min(per_token_loss1": "torch.max(per_token_loss1"}),
    "dual_clip": ({}, {"if self.args.delta is not None:": "if True:", "max=self.args.delta": "max=4.0"}),
    "without_delta": (PENALTY | {"delta": 1.5}, {"if self.args.delta is not None:": "if False:"}),
    # The ratio
    "clamped_before_exp": ({}, {"exp(log_importance_weights)": "exp(log_importance_weights.clamp(-5, 5))"}),
    "clamped_above": ({}, {"exp(log_importance_weights)": "exp(log_importance_weights.clamp(max=8.0))"}),
    "first_order": ({}, {"torch.exp(log_importance_weights)": "1 + log_importance_weights"}),
    "without_gradient": (
        {},
        {"exp(log_importance_weights)\n": "exp(log_importance_weights.detach()) + 0 * log_ratio\n"},
    ),
    "of_another_level": ({}, {'self.importance_sampling_level == "token"': "False", '== "sequence"': '!= "sequence"'}),
    "sum_over_a_completion": (
        SEQUENCE,
        {"(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)": "(log_ratio * mask).sum(-1)"},
    ),
    "mean_over_the_padding": (
        SEQUENCE,
        {"(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)": "(log_ratio * mask).mean(-1)"},
    ),
    "old_column_renamed": ({}, {'"old_per_token_logps"': '"old_logps_of_tokens"'}),
    "old_column_renamed_in_the_loss": ({}, {'inputs.get("old_per_token_logps")': 'inputs.get("old_logps_of_tokens")'}),
    "old_column_renamed_penalty": (PENALTY, {'"old_per_token_logps"': '"old_logps_of_tokens"'}),
    "on_policy": ({}, {'inputs.get("old_per_token_logps")': "per_token_logps.detach()"}),
    "old_policy_of_the_engine": ({}, {'inputs.get("old_per_token_logps")': 'inputs.get("sampling_per_token_logps")'}),
    # Advantages
    "advantages_of_columns": ({}, {"advantages.unsqueeze(1)": "advantages.repeat(99)[: mask.size(1)].unsqueeze(0)"}),
    "advantages_of_a_wrong_shape": ({}, {"advantages.unsqueeze(1)": "advantages.unsqueeze(0).repeat(3, 1)"}),
    "advantages_scaled": ({}, {'advantages = inputs["advantages"]': 'advantages = inputs["advantages"] / 2'}),
    "advantages_clamped": ({}, {'advantages = inputs["advantages"]': 'advantages = inputs["advantages"].clamp(min=0)'}),
    # The off-policy mask
    "off_policy_mask_of_the_class": (MASKED, {"self.get_off_policy_mask(": "GRPOTrainer.get_off_policy_mask("}),
    "off_policy_mask_of_the_type": (MASKED, {"self.get_off_policy_mask(": "type(self).get_off_policy_mask("}),
    "off_policy_mask_elsewhere": (
        MASKED,
        {"self.get_off_policy_mask(": "(lambda **k: (k['advantages'] >= 0).to(mask.dtype))("},
    ),
    "off_policy_mask_unused": (MASKED, {"per_token_loss * off_policy_mask": "per_token_loss"}),
    "off_policy_mask_halved": (
        MASKED,
        {"per_token_loss * off_policy_mask": "per_token_loss * (1 + off_policy_mask) / 2"},
    ),
    "off_policy_mask_by_position": (
        MASKED,
        {"advantages=advantages,": "advantages,", "per_token_logps=per_token_logps,": "per_token_logps,"},
    ),
    "scored_twice": ({}, {"if self.top_entropy_quantile < 1.0:": SECOND_PASS + "if self.top_entropy_quantile < 1.0:"}),
}
OTHER_RLOO_LOSSES = {
    "scored_twice": ({}, {"logps = (per_token_logps": SECOND_PASS + "logps = (per_token_logps"}),
    "sum": ({}, {"per_sequence_loss.mean()": "per_sequence_loss.sum()"}),
    "by_length": ({}, {"per_sequence_loss.mean()": "(per_sequence_loss / completion_mask.sum(1)).mean()"}),
    "accumulation": (
        {},
        {"per_sequence_loss.mean()": "per_sequence_loss.mean() / self.args.gradient_accumulation_steps"},
    ),
    "epsilon_low_of_args": ({}, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {"1 + self.epsilon_high)\n": "1 + (self.args.epsilon_high or self.args.epsilon))\n"}),
    "the_larger": (PENALTY, {"torch.min(per_sequence": "torch.max(per_sequence"}),
    "old_column_renamed": ({}, {'"old_logps"': '"old_logps_of_completions"'}),
    "on_policy": ({}, {'old_logps = inputs["old_logps"]': "old_logps = logps.detach()"}),
    "clamped_before_exp": ({}, {"torch.exp(log_ratio)": "torch.exp(log_ratio.clamp(-2, 2))"}),
    "mean_over_tokens": ({}, {"logps = (per_token_logps * completion_mask).sum(1)": "logps = per_token_logps.sum(1)"}),
    "kl_in_the_loss": (
        BETA,
        {"per_sequence_loss.mean()": "per_sequence_loss.mean() + self.args.beta * per_token_logps.mean()"},
    ),
    "kl_of_beta": (BETA, {"per_sequence_loss.mean()": "per_sequence_loss.mean() + self.beta * per_token_logps.mean()"}),
    "advantages_scaled": ({}, {'advantages = inputs["advantages"]': 'advantages = inputs["advantages"] / 2'}),
}
# The same loss in other words, which may stop no run
SAME_LOSSES = {
    "loss_type_of_args": ({}, {"self.loss_type": "self.args.loss_type"}),
    "level_of_args": (SEQUENCE, {"self.importance_sampling_level": "self.args.importance_sampling_level"}),
    "length_of_args": (DR_GRPO, {"self.max_completion_length": "self.args.max_completion_length"}),
    "processes_of_args": ({}, {"self.accelerator.num_processes": "self.args.world_size"}),
    "guard_against_overflow": ({}, {"exp(log_importance_weights)": "exp(log_importance_weights.clamp(-20, 20))"}),
    "a_ratio_of_probabilities": (
        {},
        {"torch.exp(log_importance_weights)": "torch.exp(per_token_logps) / torch.exp(old_per_token_logps)"},
    ),
    "off_policy_mask_where": (
        MASKED,
        {"per_token_loss * off_policy_mask": "torch.where(off_policy_mask.bool(), per_token_loss, 0.0)"},
    ),
    "threshold_of_args": (MASKED, {"=self.off_policy_mask_threshold": "=self.args.off_policy_mask_threshold"}),
    "metrics_of_another_clip": (
        {},
        {
            "coef_1 < 1 - self.epsilon_low": "coef_1 < 1 - self.args.epsilon",
            "coef_1 > 1 + self.epsilon_high": "coef_1 > 1 + self.args.epsilon",
        },
    ),
    "clip_of_args": (PENALTY, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
}
SAME_ELSEWHERE = (
    {"self.num_iterations": "self.args.num_iterations"},
    {'"advantages": advantages,': '"advantages": advantages.unsqueeze(1),'},
    {'"advantages": advantages,': '"advantages": advantages.unsqueeze(1).expand(completion_mask.shape).clone(),'},
)
CASES = [
    *((GRPOTrainer, name, *case) for name, case in OTHER_LOSSES.items()),
    *((RLOOTrainer, name, *case) for name, case in OTHER_RLOO_LOSSES.items()),
]


@pytest.fixture(scope="module")
def first_loss(tmp_path_factory):
    """By trainer and options, a run at its first loss and the micro-batch of it, which the check takes."""
    made = {}

    def at_first_loss(trainer, options):
        key = (trainer, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("first")
            model = AutoModelForCausalLM.from_pretrained(saved_model(folder / "model"))  # and its reference
            once = {"gradient_accumulation_steps": 2, "max_steps": 1, "save_strategy": "no"}
            run = run_of(folder, trainer, model=model, **once | options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(troll_trainer, "check_arithmetic", lambda *given: made.update({key: given}))
                run.train()
        return made[key]

    return at_first_loss


@pytest.mark.parametrize(
    ("trainer", "name", "options", "changes"), CASES, ids=[f"{x[0].__name__}-{x[1]}" for x in CASES]
)
def test_another_loss_is_refused(trainer, name, options, changes, first_loss, monkeypatch):
    given = first_loss(trainer, options)
    check_arithmetic(*given)
    replace(monkeypatch, trainer, changes, only=["_compute_loss"])
    with pytest.raises(RuntimeError, match=MESSAGE.format(trainer.__name__)):
        check_arithmetic(*given)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "options",
    [{}, BETA, PENALTY | BETA, PENALTY | {"epsilon": 3e-4, "epsilon_high": 4e-4}, {"epsilon": 1e-9} | PENALTY],
)
def test_trls_loss_of_completions_of_any_length_is_accepted(options, trainer, first_loss):
    """The sum of a completion's log-probabilities, of which RLOO takes the ratio, rounds to a few thousandths."""
    run, inputs, mode = first_loss(trainer, options)
    shape = inputs["completion_mask"].shape
    of_tokens = lambda value: isinstance(value, torch.Tensor) and value.shape[:2] == shape
    for length in (1, 2, 7, 8, 9, 30_000):
        columns = torch.arange(length) % shape[1]
        check_arithmetic(run, {n: v[:, columns] if of_tokens(v) else v for n, v in inputs.items()}, mode)


@pytest.mark.parametrize("name", SAME_LOSSES)
def test_the_same_loss_in_other_words_is_accepted(name, first_loss, monkeypatch):
    options, changes = SAME_LOSSES[name]
    given = first_loss(GRPOTrainer, options)
    replace(monkeypatch, GRPOTrainer, changes, only=["_compute_loss"])
    check_arithmetic(*given)


def test_the_same_loss_of_other_advantages_and_steps_trains_the_same_weights(tmp_path, monkeypatch):
    ends = []
    for changes in ({}, *SAME_ELSEWHERE):
        with monkeypatch.context() as patch:
            replace(patch, GRPOTrainer, changes, only=["_prepare_inputs", "_generate_and_score_completions"])
            run = run_of(tmp_path, max_steps=3, save_strategy="no")
            run.train()
        assert run.switched_off == frozenset()
        ends.append(weights(run))
        for name, weight in ends[0].items():
            torch.testing.assert_close(ends[-1][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "name", "mode"),
    [
        (GRPOTrainer, "bnpo", "eval"),
        (GRPOTrainer, "beta_of_args", "train"),
        (GRPOTrainer, "off_policy_mask_of_the_type", "train"),
        (GRPOTrainer, "old_column_renamed", "train"),  # also where TRL writes it
        (RLOOTrainer, "epsilon_low_of_args", "train"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_another_loss_stops_before_an_update(trainer, name, mode, tmp_path, monkeypatch):
    options, changes = (OTHER_LOSSES if trainer is GRPOTrainer else OTHER_RLOO_LOSSES)[name]
    options = options | {"eval_strategy": "steps", "per_device_eval_batch_size": 8}
    replace(monkeypatch, trainer, changes, only=vars(trainer).keys() - {"__init__"})  # where TRL reads its settings
    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model"))
    run = run_of(tmp_path, trainer, model=model, **options)
    start = weights(run)
    with pytest.raises(RuntimeError, match=MESSAGE.format(trainer.__name__)):
        run.evaluate() if mode == "eval" else run.train()
    assert run.state.global_step == 0
    assert_equal(start, weights(run))


# -- Asynchronous GRPO ------------------------------------------------------------------------------------------------

OTHER_ASYNC_LOSSES = {
    "sum": ({}, {"loss = loss / tokens_per_rank.to(torch.float32)": "loss = loss / 1"}),
    "of_micro_batch": ({}, {"loss = loss / tokens_per_rank.to(torch.float32)": "loss = loss / log_probs.numel()"}),
    "accumulation": ({}, {"loss = loss / self.current_gradient_accumulation_steps": "loss = loss / 2"}),
    "epsilon_low_of_args": ({}, {"1 - self.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {"1 + self.epsilon_high)\n": "1 + (self.args.epsilon_high or self.args.epsilon))\n"}),
    "the_larger": (PENALTY, {"torch.min(per_token": "torch.max(per_token"}),
    "old_column_renamed": ({}, {'inputs["old_log_probs"]': 'inputs["old_logps"]'}),
    "on_policy": ({}, {"log_probs - old_log_probs": "log_probs - log_probs.detach()"}),
    "clamped_before_exp": ({}, {"torch.exp(log_ratio)": "torch.exp(log_ratio.clamp(-2, 2))"}),
    "advantages_scaled": ({}, {'inputs["advantages"][selected]': 'inputs["advantages"][selected] / 2'}),
    "of_a_running_training": ({}, {"self.current_gradient_accumulation_steps": "self.steps_elsewhere"}),
}


@pytest.fixture(scope="module")
def first_async_loss(tmp_path_factory):
    """As `first_loss`."""
    made = {}

    def at_first_loss(options):
        key = str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("async")
            model = saved_model(folder / "model")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(async_trainer, "check_async_arithmetic", lambda *given: made.update({key: given}))
                run = async_engine.make_trainer(
                    model, folder, async_engine.Engine(model, support_size=6), max_steps=1, support_size=6, **options
                )
                run.train()
        return made[key]

    return at_first_loss


@pytest.mark.parametrize("name", OTHER_ASYNC_LOSSES)
def test_another_asynchronous_loss_is_refused(name, first_async_loss, monkeypatch):
    options, changes = OTHER_ASYNC_LOSSES[name]
    given = first_async_loss(options)
    check_async_arithmetic(*given)
    replace(monkeypatch, AsyncGRPOTrainer, changes, only=["compute_loss"])
    with pytest.raises(RuntimeError, match=MESSAGE.format("AsyncGRPOTrainer")):
        check_async_arithmetic(*given)


def test_another_asynchronous_loss_stops_before_an_update(tmp_path, monkeypatch):
    model = saved_model(tmp_path / "model")
    run = async_engine.make_trainer(model, tmp_path, async_engine.Engine(model), trust_region="mask")
    start = weights(run)
    replace(monkeypatch, AsyncGRPOTrainer, OTHER_ASYNC_LOSSES["epsilon_low_of_args"][1])
    with pytest.raises(RuntimeError, match=MESSAGE.format("AsyncGRPOTrainer")):
        run.train()
    assert run.state.global_step == 0
    assert_equal(start, weights(run))
