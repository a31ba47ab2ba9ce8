"""What a trainer does with a TRL or transformers that has changed: the tier of what moved answers."""

import copy
import inspect

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from mutated_trl import TRAINERS, assert_equal, lengthen, rename, replace, run_of
from trl import GRPOConfig, GRPOTrainer, RLOOConfig
from trl_comparison import logged, make_trainer, weights

from troll_trl.resilience import resilient_trainer
from troll_trl.resilience.finite_guard import FiniteGuard
from troll_trl.trainers import trl_compat, troll_trainer
from troll_trl.trainers.step_check import check_steps


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


def first_of_each_part(cases):
    """The other cases are slow."""
    seen = set()
    for part, names, trainer in cases:
        marks = [pytest.mark.slow] if part in seen else []
        seen.add(part)
        yield pytest.param(part, names, trainer, marks=marks)


@pytest.mark.parametrize(("part", "names", "trainer"), [*first_of_each_part(gone_together())], ids=str)
def test_without_a_reliability_part_a_run_trains_the_same_weights(
    part, names, trainer, expected, tmp_path, monkeypatch
):
    """It saves, and another run continues from what it saved."""
    rename(monkeypatch, classes(trainer), *names)
    run = run_of(tmp_path, trainer)
    assert part in run.switched_off
    run.train()
    assert_equal(expected[trainer], weights(run))
    longer = run_of(tmp_path, trainer, max_steps=6)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 6


@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [(trl_compat.RESUME, resilient_trainer, "load_state"), (trl_compat.GUARD, FiniteGuard, "check_loss")],
)
def test_what_is_switched_off_is_not_called(part, owner, name, tmp_path, monkeypatch):
    run_of(tmp_path).train()
    run, calls = run_of(tmp_path, max_steps=6), []
    monkeypatch.setattr(owner, name, lambda *args: calls.append(args))
    run.train(resume_from_checkpoint=True)
    assert calls, "the two runs differ in what is switched off"
    calls.clear()
    run = run_of(tmp_path, max_steps=7)
    run.switched_off = frozenset([part])
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 7 and not calls


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
    "updates": {"self._step += 1": "self._step += self.accelerator.sync_gradients"},
    "updates_of_the_state": {"self._step += 1": "self._step = self.state.global_step"},
    "within_a_rollout_batch": {
        "self._step += 1": "self._step = (self._step + 1) % (self.args.steps_per_generation * self.num_iterations)"
    },
    "within_an_update": {"self._step += 1": "self._step = (self._step + 1) % self.args.gradient_accumulation_steps"},
    "completions": {
        "self._step += 1": "self._step += 8",
        "self._step %": "self._step // 8 %",
    },
    "from_one": {"self._step = 0": "self._step = 1", "self._step %": "(self._step - 1) %"},
    "another_count_decides": {
        "self._step = 0": "self._step = self._taken = 0",
        "self._step += 1": "self._step += 1; self._taken += 1",
        "self._step %": "self._taken %",
    },
    "one_pass": {"self.args.steps_per_generation * self.num_iterations": "self.args.steps_per_generation"},
    "other_way_round": {"self._buffered_inputs[self._step %": "self._buffered_inputs[-1 - self._step %"},
    "batch_used_up": {
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]": "inputs = "
        "self._buffered_inputs.pop(0); self._buffered_inputs.append(inputs)",
    },
    "not_generated_at_once": {" or self._buffered_inputs is None": ""},
    "unknown_attribute": {"self._step += 1": "self._step += self._of_a_callback"},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", OTHER_STEPS)
def test_another_meaning_of_the_step_switches_resuming_off(name, trainer, tmp_path, monkeypatch, caplog):
    replace(monkeypatch, trainer, OTHER_STEPS[name])
    run = run_of(tmp_path, trainer)
    assert run.switched_off == {trl_compat.RESUME}
    assert f"Switched off: {trl_compat.RESUME}. troll_trl does not support trl" in caplog.text
    assert f"`{trainer.__name__}._" in caplog.text


SPLIT = "split_tensor_dict(generation_batch, "
# Lists of a rollout batch that no longer follow its tensors
OTHER_BATCHES = {
    "lists_stay": {
        "= shuffle_sequence_dict(generation_batch)": "= shuffle_sequence_dict({n: v for n, v in "
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
    replace(monkeypatch, trainer, OTHER_BATCHES[name])
    with pytest.raises(ImportError, match=rf"trl \d.*`{trainer.__name__}\._prepare_inputs` shuffles.*tested with trl"):
        run_of(tmp_path, trainer)


SAME_STEPS = {
    "counted_at_once": {
        "return inputs\n": "self._step += mode == 'train'\n    return inputs\n",
        "self._step += 1": "pass",
    },
    "iterations_of_args": {"generation * self.num_iterations": "generation * self.args.num_iterations"},
    "kept_apart": {"self._step += 1": "self._step = self._step + int(True)"},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", SAME_STEPS)
def test_the_same_meaning_of_the_step_in_other_words_switches_nothing_off(name, trainer, tmp_path, monkeypatch):
    replace(monkeypatch, trainer, SAME_STEPS[name])
    assert run_of(tmp_path, trainer).switched_off == frozenset()


def test_the_check_of_the_step_draws_nothing_and_changes_nothing(tmp_path):
    run = run_of(tmp_path)
    before, seed, synced = {**vars(run)}, torch.get_rng_state(), run.accelerator.sync_gradients
    metrics = copy.deepcopy(run._metrics)
    assert check_steps(run, frozenset()) == frozenset()
    assert all(before[name] is value for name, value in vars(run).items())
    assert run._metrics == metrics and run.accelerator.sync_gradients == synced
    assert torch.equal(torch.get_rng_state(), seed)


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
