"""What a trainer does with a TRL or transformers that has changed: the tier of what moved answers."""

import copy
import inspect

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from mutated_trl import lengthen, rename, rewrite
from tiny import saved_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.resilience.finite_guard import FiniteGuard
from troll_trl.trainers import trl_compat, troll_trainer

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
            names = {name for one, name, of in RELIABILITY if (one, of) == (part, trainer)}
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
    [(trl_compat.RESUME, troll_trainer, "load_state"), (trl_compat.GUARD, FiniteGuard, "check_loss")],
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
    options = {"old_policy": "engine", "use_vllm": True, "vllm_importance_sampling_correction": False}
    with pytest.raises(ImportError, match=rf"`GRPOTrainer\.{name}` is gone"):
        run_of(tmp_path, **options)
    run = run_of(tmp_path)
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


LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
# Another average over tokens, or another reference KL: what it is of, and what replaces what in TRL's loss
OTHER_ARITHMETIC = {
    "dapo": {r"normalizer \* self\.current_gradient_accumulation_steps /": "normalizer /"},
    "grpo": {
        r"\(per_token_loss \* mask\)\.sum\(-1\) /": "(per_token_loss * mask).sum(-1) / 2 /",
    },
    "bnpo": {r"\(per_token_loss \* mask\)\.sum\(\) / mask\.sum\(\)": "(per_token_loss * mask).sum() / 2 / mask.sum()"},
    "dr_grpo": {r"per_token_loss\.size\(0\) \* self\.max_completion_length": "self.max_completion_length"},
    "luspo": {r"\(per_token_loss \* mask\)\.sum\(-1\)\.mean\(\)": "(per_token_loss * mask).sum(-1).sum()"},
    "kl": {r"self\.beta \* per_token_kl": "self.beta * per_token_kl / 2"},
}


def kind(name):
    """The options of a run that `OTHER_ARITHMETIC` names."""
    ratio = "sequence" if name == "luspo" else "token"
    return {"loss_type": name if name in LOSS_TYPES else "dapo", "importance_sampling_level": ratio}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", OTHER_ARITHMETIC)
def test_another_arithmetic_stops_the_first_loss(name, mode, tmp_path, monkeypatch):
    if (name, mode) == ("dapo", "eval"):
        pytest.skip("an evaluation is not divided by the accumulated updates")
    options = kind(name) | {"gradient_accumulation_steps": 2, "beta": 0.1 if name == "kl" else 0.0}
    options |= {"eval_strategy": "steps", "eval_on_start": mode == "eval", "per_device_eval_batch_size": 8}
    run = run_of(tmp_path, model=AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model")), **options)
    start = weights(run)
    rewrite(monkeypatch, GRPOTrainer, OTHER_ARITHMETIC[name])
    message = r"does not support trl \d.*`GRPOTrainer`'s loss averages over tokens, or adds .* tested with trl \d"
    with pytest.raises(RuntimeError, match=message):
        run.train()
    assert run.state.global_step == 0
    assert_equal(start, weights(run))


def test_another_average_over_completions_stops_rloo(tmp_path, monkeypatch):
    rewrite(monkeypatch, RLOOTrainer, {r"loss = per_sequence_loss\.mean\(\)": "loss = per_sequence_loss.sum()"})
    with pytest.raises(RuntimeError, match=r"does not support trl \d.*`RLOOTrainer`'s loss averages over tokens"):
        run_of(tmp_path, RLOOTrainer).train()


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
