"""What a trainer does with a TRL or transformers that has changed: the tier of what moved answers."""

import copy
import inspect

import async_engine
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from mutated_trl import lengthen, rename, rewrite
from tiny import saved_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.experimental.async_grpo import trainer as async_trainer
from troll_trl.experimental.async_grpo.arithmetic_check import check_async_arithmetic
from troll_trl.resilience import resilient_trainer
from troll_trl.resilience.finite_guard import FiniteGuard
from troll_trl.trainers import trl_compat, troll_trainer
from troll_trl.trainers.arithmetic_check import check_arithmetic
from troll_trl.trainers.step_check import check_steps

TRAINERS = {
    GRPOTrainer: (TrollGRPOTrainer, TrollGRPOConfig),
    RLOOTrainer: (TrollRLOOTrainer, TrollRLOOConfig),
}
# In each half of this run a rollout batch is unfinished
OPTIONS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "learning_rate": 2e-2,
    "kl_bound": 1e-3,
    "beta": 0.0,
}


def run_of(folder, trainer=GRPOTrainer, **options):
    return make_trainer(*TRAINERS[trainer], folder, **OPTIONS | options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights that a run ends with, for both trainers."""
    ends = {}
    for trainer in TRAINERS:
        run = run_of(tmp_path_factory.mktemp("unchanged"), trainer)
        run.train()
        assert max(logged(run, "troll/projected_fraction")) > 0
        ends[trainer] = weights(run)
    return ends


def classes(trainer):
    return [*trainer.__mro__[:-1], AcceleratedOptimizer]


def assert_equal(first, second):
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=0)


def cases(parts):
    """The classes of which a name is checked for one trainer, and the trainers."""
    for owner, names in parts.items():
        for name in names:
            yield name, owner if owner in TRAINERS else GRPOTrainer


METHOD = [*cases(trl_compat.METHOD)]
RELIABILITY = [(part, *case) for part, parts in trl_compat.RELIABILITY.items() for case in cases(parts)]
RUNNING = [(part, *case) for part, parts in trl_compat.RUNNING.items() for case in cases(parts)]


@pytest.mark.parametrize(("name", "trainer"), METHOD, ids=str)
def test_a_method_part_that_was_renamed_stops_at_the_start(name, trainer, tmp_path, monkeypatch):
    rename(monkeypatch, classes(trainer), name)
    with pytest.raises(ImportError, match=rf"does not support (trl|transformers) \d.*\.{name}` .*tested with .* \d"):
        run_of(tmp_path, trainer)


@pytest.mark.parametrize(("part", "name", "trainer"), RELIABILITY, ids=str)
def test_a_reliability_part_that_was_renamed_is_switched_off(part, name, trainer, tmp_path, monkeypatch, caplog):
    rename(monkeypatch, classes(trainer), name)
    assert part in run_of(tmp_path, trainer).switched_off
    assert f"Switched off: {part}. " in caplog.text and f".{name}` is gone. It is tested with " in caplog.text


def gone_together():
    """A part's methods one by one, since others that override must still work; its attributes all at once."""
    for part, parts in trl_compat.RELIABILITY.items():
        methods = {name for names in parts.values() for name, parameters in names.items() if parameters is not None}
        for trainer in TRAINERS:
            names = {name for one, name, of in RELIABILITY + RUNNING if (one, of) == (part, trainer)}
            yield from ((part, (name,), trainer) for name in sorted(names & methods))
            if attributes := names - methods:
                yield part, tuple(sorted(attributes)), trainer


@pytest.mark.parametrize(("part", "names", "trainer"), [*gone_together()], ids=str)
def test_without_a_reliability_part_a_run_trains_the_same_weights(
    part, names, trainer, expected, tmp_path, monkeypatch
):
    """It saves, and another run continues from what it saved."""
    rename(monkeypatch, classes(trainer), *names)
    run = run_of(tmp_path, trainer)
    assert part in run.switched_off
    run.train()
    assert_equal(expected[trainer], weights(run))
    longer = run_of(tmp_path, trainer, max_steps=8)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 8


@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [(trl_compat.RESUME, resilient_trainer, "load_state"), (trl_compat.GUARD, FiniteGuard, "check_loss")],
)
def test_what_is_switched_off_is_not_called(part, owner, name, tmp_path, monkeypatch):
    run_of(tmp_path).train()
    run, calls = run_of(tmp_path, max_steps=8), []
    monkeypatch.setattr(owner, name, lambda *args: calls.append(args))
    run.train(resume_from_checkpoint=True)
    assert calls, "the two runs differ in what is switched off"
    calls.clear()
    run = run_of(tmp_path, max_steps=9)
    run.switched_off = frozenset([part])
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 9 and not calls


def test_without_complete_checkpoints_there_may_be_none(tmp_path, monkeypatch):
    rename(monkeypatch, classes(GRPOTrainer), "_save_checkpoint")
    run = run_of(tmp_path / "nowhere")
    assert run.find_checkpoint("newest") is None and run.find_checkpoint(None) is None
    assert run.find_checkpoint("some/checkpoint-3") == "some/checkpoint-3"
    with pytest.raises(ValueError, match=r"There is no complete checkpoint in .*nowhere"):
        run.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", [name for name, _ in cases({GRPOTrainer: trl_compat.ENGINE[GRPOTrainer]})])
def test_a_part_of_the_engines_old_policy_stops_only_its_runs(name, expected, tmp_path, monkeypatch):
    rename(monkeypatch, classes(GRPOTrainer), name)
    stops = pytest.raises(ImportError, match=rf"`GRPOTrainer\.{name}` is gone")
    is_attribute = trl_compat.ENGINE[GRPOTrainer][name] is None
    if not is_attribute:
        with stops:
            options = {"old_policy": "engine", "use_vllm": True, "vllm_importance_sampling_correction": False}
            run_of(tmp_path, **options)
    run = run_of(tmp_path)
    if is_attribute:  # vLLM, with which TRL makes it, is not installed
        with stops:
            trl_compat.check_made(run, engine=True)
    assert run.switched_off == {part for part, other, of in RELIABILITY if (other, of) == (name, GRPOTrainer)}
    run.train()
    assert_equal(expected[GRPOTrainer], weights(run))


CALLED = (
    *("_prepare_inputs", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"),
    *("_tokenize_prompts", "_run_epoch", "_save_checkpoint", "_get_output_dir"),
)


@pytest.mark.parametrize("name", CALLED)
def test_an_argument_that_a_newer_version_adds_is_handed_on(name, expected, tmp_path, monkeypatch):
    seen = lengthen(monkeypatch, name, classes(GRPOTrainer), default=None)
    run = run_of(tmp_path)
    assert run.switched_off == frozenset()
    run.train()
    assert 7 in seen
    assert_equal(expected[GRPOTrainer], weights(run))


@pytest.mark.parametrize("name", CALLED)
def test_an_argument_without_a_default_has_moved_its_part(name, tmp_path, monkeypatch, caplog):
    lengthen(monkeypatch, name, classes(GRPOTrainer), default=inspect.Parameter.empty)
    if name in trl_compat.METHOD[GRPOTrainer]:
        with pytest.raises(ImportError, match=rf"`GRPOTrainer\.{name}` takes \(.*extra\), expected \("):
            run_of(tmp_path)
    else:
        run = run_of(tmp_path)
        assert len(run.switched_off) == 1 and f".{name}` takes (" in caplog.text
        run.train()  # TRL gives the argument


@pytest.mark.parametrize(("part", "name", "trainer"), RUNNING, ids=str)
def test_a_part_of_a_running_training_that_was_renamed_is_switched_off(
    part, name, trainer, expected, tmp_path, monkeypatch, caplog
):
    rename(monkeypatch, classes(trainer), name)
    run = run_of(tmp_path, trainer)
    run.train()
    assert part in run.switched_off
    assert f"Switched off: {part}. " in caplog.text and f".{name}` is gone. It is tested with " in caplog.text
    assert_equal(expected[trainer], weights(run))


@pytest.mark.parametrize("name", [name for name, _ in cases(trl_compat.METHOD_RUNNING)])
def test_a_method_part_of_a_running_training_that_was_renamed_stops_the_first_loss(name, tmp_path, monkeypatch):
    run = run_of(tmp_path)
    start = weights(run)
    rename(monkeypatch, classes(GRPOTrainer), name)
    with pytest.raises(RuntimeError, match=rf"does not support trl \d.*no attribute '{name}'.*tested with trl \d"):
        run.train()
    assert_equal(start, weights(run))


# What `_step` could mean, and where TRL could look: what replaces what in its methods
OTHER_STEPS = {
    "updates": {r"self\._step \+= 1": "self._step += self.accelerator.sync_gradients"},
    "updates_of_the_state": {r"self\._step \+= 1": "self._step = self.state.global_step"},
    "within_a_rollout_batch": {
        r"self\._step \+= 1": "self._step = (self._step + 1) % (self.args.steps_per_generation * self.num_iterations)"
    },
    "within_an_update": {r"self\._step \+= 1": "self._step = (self._step + 1) % self.args.gradient_accumulation_steps"},
    "completions": {
        r"self\._step \+= 1": "self._step += 8",
        r"self\._step %": "self._step // 8 %",
    },
    "from_one": {r"self\._step = 0": "self._step = 1", r"self\._step %": "(self._step - 1) %"},
    "another_count_decides": {
        r"self\._step = 0": "self._step = self._taken = 0",
        r"self\._step \+= 1": "self._step += 1; self._taken += 1",
        r"self\._step %": "self._taken %",
    },
    "one_pass": {r"self\.args\.steps_per_generation \* self\.num_iterations": "self.args.steps_per_generation"},
    "other_way_round": {r"self\._buffered_inputs\[self\._step %": "self._buffered_inputs[-1 - self._step %"},
    "batch_used_up": {
        r"inputs = self\._buffered_inputs\[self\._step % self\.args\.steps_per_generation\]": "inputs = "
        "self._buffered_inputs.pop(0); self._buffered_inputs.append(inputs)",
    },
    "not_generated_at_once": {r" or self\._buffered_inputs is None": ""},
    "unknown_attribute": {r"self\._step \+= 1": "self._step += self._of_a_callback"},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", OTHER_STEPS)
def test_another_meaning_of_the_step_switches_resuming_off(name, trainer, tmp_path, monkeypatch, caplog):
    rewrite(monkeypatch, trainer, OTHER_STEPS[name])
    run = run_of(tmp_path, trainer)
    assert run.switched_off == {trl_compat.RESUME}
    assert f"Switched off: {trl_compat.RESUME}. troll_trl does not support trl" in caplog.text
    assert f"`{trainer.__name__}._" in caplog.text


SPLIT = r"split_tensor_dict\(generation_batch, "
# Lists of a rollout batch that no longer follow its tensors
OTHER_BATCHES = {
    "lists_stay": {
        r"= shuffle_sequence_dict\(generation_batch\)": "= shuffle_sequence_dict({n: v for n, v in "
        "generation_batch.items() if not isinstance(v, list)}) | "
        "{n: v for n, v in generation_batch.items() if isinstance(v, list)}"
    },
    "lists_stay_whole": {
        SPLIT: "(lambda batch, n: [{**part, **{k: v for k, v in batch.items() if isinstance(v, list)}} "
        "for part in split_tensor_dict(batch, n)])(generation_batch, "
    },
    "lists_reversed": {
        SPLIT: "split_tensor_dict({n: v[::-1] if isinstance(v, list) else v for n, v in generation_batch.items()}, "
    },
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_lists_that_are_not_shuffled_and_split_as_tensors_stop_at_the_start(name, trainer, tmp_path, monkeypatch):
    """The old policy is a list: a run would train with the old policies of other completions."""
    rewrite(monkeypatch, trainer, OTHER_BATCHES[name])
    with pytest.raises(ImportError, match=rf"trl \d.*`{trainer.__name__}\._prepare_inputs` shuffles.*tested with trl"):
        run_of(tmp_path, trainer)


SAME_STEPS = {
    "counted_at_once": {
        r"return inputs\n": "self._step += mode == 'train'\n    return inputs\n",
        r"self\._step \+= 1": "pass",
    },
    "iterations_of_args": {r"self\.num_iterations\b(?! = )": "self.args.num_iterations"},
    "kept_apart": {r"self\._step \+= 1": "self._step = self._step + int(True)"},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", SAME_STEPS)
def test_the_same_meaning_of_the_step_in_other_words_switches_nothing_off(name, trainer, tmp_path, monkeypatch):
    rewrite(monkeypatch, trainer, SAME_STEPS[name])
    assert run_of(tmp_path, trainer).switched_off == frozenset()


def test_the_check_of_the_step_draws_nothing_and_changes_nothing(tmp_path):
    run = run_of(tmp_path)
    before, seed, synced = {**vars(run)}, torch.get_rng_state(), run.accelerator.sync_gradients
    metrics = copy.deepcopy(run._metrics)
    assert check_steps(run, frozenset()) == frozenset()
    assert all(before[name] is value for name, value in vars(run).items())
    assert run._metrics == metrics and run.accelerator.sync_gradients == synced
    assert torch.equal(torch.get_rng_state(), seed)


LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
MESSAGE = r"does not support trl \d.*`{}`'s loss (averages over tokens, adds|cannot be compared).* tested with trl \d"
PENALTY = {"trust_region": "penalty"}
MASKED = {"off_policy_mask_threshold": 0.5}
BETA = {"beta": 0.1}
# A loss that is not ours: the options of a run, and what replaces what in TRL's loss
OTHER_LOSSES = {
    # The average over tokens
    "dapo": ({}, {r"normalizer \* self\.current_gradient_accumulation_steps /": "normalizer /"}),
    "dapo_of_micro_batch": ({}, {r'inputs\["num_items_in_batch"\]\.clamp': "mask.sum().clamp"}),
    "dapo_of_rollout": ({}, {r"steps / self\.args\.steps_per_generation": "steps"}),
    "grpo": (
        {"loss_type": "grpo"},
        {r"\(per_token_loss \* mask\)\.sum\(-1\) /": "(per_token_loss * mask).sum(-1) / 2 /"},
    ),
    "grpo_by_width": (
        {"loss_type": "grpo"},
        {r"mask\)\.sum\(-1\) / mask\.sum\(-1\)\.clamp\(min=1\.0\)\)\.mean": "mask).sum(-1) / mask.size(1)).mean"},
    ),
    "bnpo": (
        {"loss_type": "bnpo"},
        {r"\(per_token_loss \* mask\)\.sum\(\) / mask\.sum\(\)": "(per_token_loss * mask).sum() / 2 / mask.sum()"},
    ),
    "bnpo_by_padding": (
        {"loss_type": "bnpo"},
        {r"\.sum\(\) / mask\.sum\(\)\.clamp\(min=1\.0\)": ".sum() / mask.numel()"},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo"},
        {r"per_token_loss\.size\(0\) \* self\.max_completion_length": "self.max_completion_length"},
    ),
    "dr_grpo_by_width": (
        {"loss_type": "dr_grpo"},
        {r"per_token_loss\.size\(0\) \* self\.max_completion_length": "per_token_loss.numel()"},
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {r"\(per_token_loss \* mask\)\.sum\(-1\)\.mean\(\)": "(per_token_loss * mask).sum(-1).sum()"},
    ),
    "accumulation": ({"loss_type": "grpo"}, {r"loss = loss / normalizer": "loss = loss / 1"}),
    # The reference KL
    "kl": (BETA, {r"self\.beta \* per_token_kl": "self.beta * per_token_kl / 2"}),
    "kl_estimate": (
        BETA,
        {
            r"torch\.exp\(ref_per_token_logps - per_token_logps\) - \(ref_per_token_logps - per_token_logps\) - 1": ""
            "(ref_per_token_logps - per_token_logps) ** 2 / 2"
        },
    ),
    "kl_weight_without_gradient": (
        BETA | {"use_bias_correction_kl": True},
        {r"per_token_kl \* coef_1": "per_token_kl * coef_1.detach()"},
    ),
    "kl_weight_clamped": (
        BETA | {"use_bias_correction_kl": True},
        {r"per_token_kl \* coef_1": "per_token_kl * coef_1.clamp(max=10.0)"},
    ),
    "kl_weight_by_default": (
        BETA | {"use_bias_correction_kl": False},
        {r"if self\.args\.use_bias_correction_kl:": "if True:"},
    ),
    "beta_of_args": (BETA, {r"self\.beta\b(?! = )": "self.args.beta"}),
    "beta_of_args_penalty": (BETA | PENALTY, {r"self\.beta\b(?! = )": "self.args.beta"}),
    "kl_if_there_is_a_reference": (
        BETA,
        {r"if self\.beta != 0\.0": 'if "ref_per_token_logps" in inputs', r"self\.beta \*": "self.args.beta *"},
    ),
    # The clip
    "epsilon_low_of_args": ({}, {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {r"1 \+ self\.epsilon_high\)$": "1 + (self.args.epsilon_high or self.args.epsilon))"}),
    "epsilon_of_args_sequence": (
        {"importance_sampling_level": "sequence"},
        {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "},
    ),
    "epsilon_of_args_mask": ({"trust_region": "mask"}, {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "}),
    "one_epsilon": (PENALTY | {"epsilon_high": 0.4}, {r"1 \+ self\.epsilon_high\)$": "1 + self.epsilon_low)"}),
    "without_clip": (PENALTY, {r"torch\.min\(per_token_loss1, per_token_loss2\)": "per_token_loss1"}),
    "the_larger": (PENALTY, {r"torch\.min\(per_token_loss1": "torch.max(per_token_loss1"}),
    "dual_clip": ({}, {r"if self\.args\.delta is not None:": "if True:", r"max=self\.args\.delta": "max=4.0"}),
    "without_delta": (PENALTY | {"delta": 1.5}, {r"if self\.args\.delta is not None:": "if False:"}),
    # The ratio
    "clamped_before_exp": ({}, {r"exp\(log_importance_weights\)": "exp(log_importance_weights.clamp(-5, 5))"}),
    "clamped_above": ({}, {r"exp\(log_importance_weights\)": "exp(log_importance_weights.clamp(max=8.0))"}),
    "first_order": ({}, {r"torch\.exp\(log_importance_weights\)": "1 + log_importance_weights"}),
    "without_gradient": (
        {},
        {r"exp\(log_importance_weights\)$": "exp(log_importance_weights.detach()) + 0 * log_ratio"},
    ),
    "of_another_level": (
        {},
        {r'self\.importance_sampling_level == "token"': "False", r'== "sequence"': '!= "sequence"'},
    ),
    "sum_over_a_completion": (
        {"importance_sampling_level": "sequence"},
        {r"\(log_ratio \* mask\)\.sum\(-1\) / mask\.sum\(-1\)\.clamp\(min=1\.0\)": "(log_ratio * mask).sum(-1)"},
    ),
    "mean_over_the_padding": (
        {"importance_sampling_level": "sequence"},
        {r"\(log_ratio \* mask\)\.sum\(-1\) / mask\.sum\(-1\)\.clamp\(min=1\.0\)": "(log_ratio * mask).mean(-1)"},
    ),
    "old_column_renamed": ({}, {r'"old_per_token_logps"': '"old_logps_of_tokens"'}),
    "old_column_renamed_in_the_loss": (
        {},
        {r'inputs\.get\("old_per_token_logps"\)': 'inputs.get("old_logps_of_tokens")'},
    ),
    "old_column_renamed_penalty": (PENALTY, {r'"old_per_token_logps"': '"old_logps_of_tokens"'}),
    "on_policy": ({}, {r'inputs\.get\("old_per_token_logps"\)': "per_token_logps.detach()"}),
    "old_policy_of_the_engine": (
        {},
        {r'inputs\.get\("old_per_token_logps"\)': 'inputs.get("sampling_per_token_logps")'},
    ),
    # Advantages
    "advantages_of_columns": (
        {},
        {r"advantages\.unsqueeze\(1\)": "advantages.repeat(99)[: mask.size(1)].unsqueeze(0)"},
    ),
    "advantages_of_a_wrong_shape": ({}, {r"advantages\.unsqueeze\(1\)": "advantages.unsqueeze(0).repeat(3, 1)"}),
    "advantages_scaled": ({}, {r"advantages = inputs\[.advantages.\]": 'advantages = inputs["advantages"] / 2'}),
    "advantages_clamped": (
        {},
        {r"advantages = inputs\[.advantages.\]": 'advantages = inputs["advantages"].clamp(min=0)'},
    ),
    # The off-policy mask
    "off_policy_mask_of_the_class": (MASKED, {r"self\.get_off_policy_mask\(": "GRPOTrainer.get_off_policy_mask("}),
    "off_policy_mask_of_the_type": (MASKED, {r"self\.get_off_policy_mask\(": "type(self).get_off_policy_mask("}),
    "off_policy_mask_by_position": (
        MASKED,
        {r"advantages=advantages,\n(\s+)per_token_logps=per_token_logps,": r"advantages,\n\1per_token_logps,"},
    ),
    "off_policy_mask_elsewhere": (
        MASKED,
        {r"self\.get_off_policy_mask\(": "(lambda **k: (k['advantages'] >= 0).to(mask.dtype))("},
    ),
    "off_policy_mask_unused": (MASKED, {r"per_token_loss \* off_policy_mask": "per_token_loss"}),
    "off_policy_mask_halved": (
        MASKED,
        {r"per_token_loss \* off_policy_mask": "per_token_loss * (1 + off_policy_mask) / 2"},
    ),
}
# The same loss in other words, which may stop no run
SAME_LOSSES = {
    "loss_type_of_args": ({}, {r"self\.loss_type\b(?! = )": "self.args.loss_type"}),
    "level_of_args": (
        {"importance_sampling_level": "sequence"},
        {r"self\.importance_sampling_level\b(?! = )": "self.args.importance_sampling_level"},
    ),
    "length_of_args": (
        {"loss_type": "dr_grpo"},
        {r"self\.max_completion_length\b(?! = )": "self.args.max_completion_length"},
    ),
    "iterations_of_args": ({}, {r"self\.num_iterations\b(?! = )": "self.args.num_iterations"}),
    "processes_of_args": ({}, {r"self\.accelerator\.num_processes": "self.args.world_size"}),
    "guard_against_overflow": ({}, {r"exp\(log_importance_weights\)": "exp(log_importance_weights.clamp(-20, 20))"}),
    "a_ratio_of_probabilities": (
        {},
        {r"torch\.exp\(log_importance_weights\)": "torch.exp(per_token_logps) / torch.exp(old_per_token_logps)"},
    ),
    "off_policy_mask_where": (
        MASKED,
        {r"per_token_loss \* off_policy_mask": "torch.where(off_policy_mask.bool(), per_token_loss, 0.0)"},
    ),
    "threshold_of_args": (MASKED, {r"=self\.off_policy_mask_threshold": "=self.args.off_policy_mask_threshold"}),
    "advantages_two_dimensional": ({}, {r'"advantages": advantages,': '"advantages": advantages.unsqueeze(1),'}),
    "advantages_of_tokens": (
        {},
        {r'"advantages": advantages,': '"advantages": advantages.unsqueeze(1).expand(completion_mask.shape).clone(),'},
    ),
    "metrics_of_another_clip": (
        {},
        {
            r"coef_1 < 1 - self\.epsilon_low": "coef_1 < 1 - self.args.epsilon",
            r"coef_1 > 1 \+ self\.epsilon_high": "coef_1 > 1 + self.args.epsilon",
        },
    ),
    "clip_of_args": (PENALTY, {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "}),
}
# The second pass takes the place of the first one, whose regression has the gradient
TWICE = {
    r"^    (if self\.top_entropy_quantile < 1\.0:|logps = )": "    with torch.no_grad():\n"
    "        self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep)\n"
    r"    \1"
}
OTHER_LOSSES["scored_twice"] = ({}, TWICE)
RLOO_MEAN = r"loss = per_sequence_loss\.mean\(\)"
OTHER_RLOO_LOSSES = {
    "scored_twice": ({}, TWICE),
    "sum": ({}, {RLOO_MEAN: "loss = per_sequence_loss.sum()"}),
    "by_length": ({}, {RLOO_MEAN: "loss = (per_sequence_loss / completion_mask.sum(1)).mean()"}),
    "accumulation": ({}, {RLOO_MEAN: "loss = per_sequence_loss.mean() / self.args.gradient_accumulation_steps"}),
    "epsilon_low_of_args": ({}, {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {r"1 \+ self\.epsilon_high\)$": "1 + (self.args.epsilon_high or self.args.epsilon))"}),
    "the_larger": (PENALTY, {r"torch\.min\(per_sequence": "torch.max(per_sequence"}),
    "old_column_renamed": ({}, {r'"old_logps"': '"old_logps_of_completions"'}),
    "on_policy": ({}, {r'old_logps = inputs\["old_logps"\]': "old_logps = logps.detach()"}),
    "clamped_before_exp": ({}, {r"torch\.exp\(log_ratio\)": "torch.exp(log_ratio.clamp(-2, 2))"}),
    "mean_over_tokens": (
        {},
        {r"logps = \(per_token_logps \* completion_mask\)\.sum\(1\)": "logps = per_token_logps.sum(1)"},
    ),
    "kl_in_the_loss": (
        BETA,
        {RLOO_MEAN: "loss = per_sequence_loss.mean() + self.args.beta * per_token_logps.mean()"},
    ),
    "kl_of_beta": (BETA, {RLOO_MEAN: "loss = per_sequence_loss.mean() + self.beta * per_token_logps.mean()"}),
    "advantages_scaled": ({}, {r"advantages = inputs\[.advantages.\]": 'advantages = inputs["advantages"] / 2'}),
}
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
            run = run_of(folder, trainer, model=model, **{"gradient_accumulation_steps": 2} | options)
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
    rewrite(monkeypatch, trainer, {f"(?m){pattern}": text for pattern, text in changes.items()}, only=["_compute_loss"])
    with pytest.raises(RuntimeError, match=MESSAGE.format(trainer.__name__)):
        check_arithmetic(*given)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "options",
    [{}, BETA, PENALTY | BETA, PENALTY | {"epsilon": 3e-4, "epsilon_high": 4e-4}, {"epsilon": 1e-9} | PENALTY],
)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30_000])
def test_trls_loss_of_completions_of_any_length_is_accepted(length, options, trainer, first_loss):
    """The sum of a completion's log-probabilities, of which RLOO takes the ratio, rounds to a few thousandths."""
    run, inputs, mode = first_loss(trainer, options)
    shape = inputs["completion_mask"].shape
    columns = torch.arange(length) % shape[1]
    of_tokens = lambda value: isinstance(value, torch.Tensor) and value.shape[:2] == shape
    check_arithmetic(run, {n: v[:, columns] if of_tokens(v) else v for n, v in inputs.items()}, mode)


@pytest.mark.parametrize("name", SAME_LOSSES)
def test_the_same_loss_in_other_words_trains_the_same_weights(name, tmp_path, monkeypatch):
    options, changes = SAME_LOSSES[name]
    plain = run_of(tmp_path / "plain", **options, max_steps=4)
    plain.train()
    rewrite(
        monkeypatch, GRPOTrainer, changes, only=("_compute_loss", "_prepare_inputs", "_generate_and_score_completions")
    )
    run = run_of(tmp_path / "rewritten", **options, max_steps=4)
    run.train()
    assert run.switched_off == frozenset()
    for weight, other in zip(weights(plain).values(), weights(run).values(), strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=1e-5)


# Five refactorings that trained to the end before the check looked at ratios other than 1, and one average
STOPS = {
    "bnpo": OTHER_LOSSES["bnpo"],
    **{name: OTHER_LOSSES[name] for name in ("beta_of_args", "epsilon_low_of_args", "off_policy_mask_of_the_class")},
    **{name: OTHER_LOSSES[name] for name in ("off_policy_mask_of_the_type", "old_column_renamed")},
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", STOPS)
def test_another_loss_stops_before_an_update(name, mode, tmp_path, monkeypatch):
    options, changes = STOPS[name]
    options = options | {"eval_strategy": "steps", "eval_on_start": mode == "eval", "per_device_eval_batch_size": 8}
    rewrite(monkeypatch, GRPOTrainer, changes)
    run = run_of(tmp_path, model=AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model")), **options)
    start = weights(run)
    with pytest.raises(RuntimeError, match=MESSAGE.format("GRPOTrainer")):
        run.train()
    assert run.state.global_step == 0
    assert_equal(start, weights(run))


def test_another_loss_stops_rloo_before_an_update(tmp_path, monkeypatch):
    rewrite(monkeypatch, RLOOTrainer, OTHER_RLOO_LOSSES["epsilon_low_of_args"][1])
    run = run_of(tmp_path, RLOOTrainer)
    with pytest.raises(RuntimeError, match=MESSAGE.format("RLOOTrainer")):
        run.train()
    assert run.state.global_step == 0


OTHER_ASYNC_LOSSES = {
    "sum": ({}, {r"loss = loss / tokens_per_rank\.to\(torch\.float32\)": "loss = loss / 1"}),
    "of_micro_batch": ({}, {r"loss = loss / tokens_per_rank\.to\(torch\.float32\)": "loss = loss / log_probs.numel()"}),
    "accumulation": ({}, {r"loss = loss / self\.current_gradient_accumulation_steps": "loss = loss / 2"}),
    "epsilon_low_of_args": ({}, {r"1 - self\.epsilon_low, ": "1 - self.args.epsilon, "}),
    "epsilon_high_of_args": ({}, {r"1 \+ self\.epsilon_high\)$": "1 + (self.args.epsilon_high or self.args.epsilon))"}),
    "the_larger": (PENALTY, {r"torch\.min\(per_token": "torch.max(per_token"}),
    "old_column_renamed": ({}, {r'inputs\["old_log_probs"\]': 'inputs["old_logps"]'}),
    "on_policy": ({}, {r'inputs\["old_log_probs"\]\[selected\]': "log_probs.detach()", r"^ +old_log_probs = .*\n": ""}),
    "clamped_before_exp": ({}, {r"torch\.exp\(log_ratio\)": "torch.exp(log_ratio.clamp(-2, 2))"}),
    "advantages_scaled": ({}, {r'inputs\["advantages"\]\[selected\]': 'inputs["advantages"][selected] / 2'}),
    "of_a_running_training": ({}, {r"self\.current_gradient_accumulation_steps": "self.steps_elsewhere"}),
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
    rewrite(
        monkeypatch,
        AsyncGRPOTrainer,
        {f"(?m){pattern}": text for pattern, text in changes.items()},
        only=["compute_loss"],
    )
    with pytest.raises(RuntimeError, match=MESSAGE.format("AsyncGRPOTrainer")):
        check_async_arithmetic(*given)


def test_another_asynchronous_loss_stops_before_an_update(tmp_path, monkeypatch):
    model = saved_model(tmp_path / "model")
    run = async_engine.make_trainer(model, tmp_path, async_engine.Engine(model), trust_region="mask")
    start = weights(run)
    rewrite(monkeypatch, AsyncGRPOTrainer, OTHER_ASYNC_LOSSES["epsilon_low_of_args"][1])
    with pytest.raises(RuntimeError, match=MESSAGE.format("AsyncGRPOTrainer")):
        run.train()
    assert run.state.global_step == 0
    assert_equal(start, weights(run))


def test_the_check_leaves_no_trace(expected, tmp_path, monkeypatch):
    """Neither in the weights nor in the numbers of a log line."""
    with_check = run_of(tmp_path)
    with_check.train()
    monkeypatch.setattr(troll_trainer, "check_arithmetic", lambda *args: None)
    without = run_of(tmp_path)
    without.train()
    assert_equal(weights(with_check), weights(without))
    timed = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for line, other in zip(with_check.state.log_history, without.state.log_history, strict=True):
        assert {k: v for k, v in line.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_callers_config_stays_as_it_is(trainer, tmp_path):
    ours, config = TRAINERS[trainer]
    for kind_of in (config, GRPOConfig if trainer is GRPOTrainer else RLOOConfig):
        made = {}

        def make(*args, kind_of=kind_of, made=made, **options):
            made["args"] = kind_of(*args, **options)
            made["before"] = copy.deepcopy(made["args"].to_dict())
            return made["args"]

        run = make_trainer(ours, make, tmp_path, enable_jit_checkpoint=True, beta=0.0)
        assert run.args is not made["args"] and type(made["args"]) is kind_of
        assert made["args"].to_dict() == made["before"]
