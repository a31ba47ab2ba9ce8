"""What the overrides rest on in TRL and transformers: names and parameters, which are checked at start as well, and
what the methods say, which is only checked here. `make test-trl` runs this with another TRL."""

import inspect
import warnings

import pytest
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.trainers import trl_compat

# What each method must say for its override to mean what it means
BUFFER = (
    "self._step % generate_every == 0 or self._buffered_inputs is None",
    "generation_batch = shuffle_sequence_dict(generation_batch)",
    "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)",
)
SCORING = ("model(**model_inputs, labels=labels, fused_lm_head=True)", "outputs.log_probs")
PHRASES = {
    GRPOTrainer: {
        "_get_per_token_logps_and_entropies": SCORING,
        "_generate_and_score_completions": (
            "self.args.gradient_accumulation_steps % generate_every != 0",
            'output["old_per_token_logps"]',
        ),
        "_prepare_inputs": BUFFER,
        "_compute_loss": (
            "self.epsilon_low",
            "self.epsilon_high",
            "self.beta",
            'inputs.get("old_per_token_logps")',
            "self.get_off_policy_mask(",
            'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            "self._last_world_entropy = world_entropy",
        ),
    },
    RLOOTrainer: {
        "_get_per_token_logps_and_entropies": SCORING,
        "_generate_and_score_completions": (
            "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
            "rewards - self.beta * kl",
        ),
        "_prepare_inputs": BUFFER,
        "_compute_loss": (
            "self.epsilon_low",
            "self.epsilon_high",
            "logps = (per_token_logps * completion_mask).sum(1)",
            'old_logps = inputs["old_logps"]',
            "loss = per_sequence_loss.mean()",
        ),
    },
    Trainer: {
        "_run_epoch": (
            "self._get_grad_norm(model, grad_norm=grad_norm)",
            "self.accelerator.optimizer_step_was_skipped",
        ),
        "_save_checkpoint": ("self._get_output_dir(trial=trial)", "self._save_rng_state(output_dir)"),
    },
}


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer, TrollGRPOTrainer, TrollRLOOTrainer])
def test_names_and_parameters(trainer):
    trl_compat.check_trl(trainer)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in PHRASES for name in PHRASES[owner]])
def test_methods_say_what_the_overrides_rest_on(owner, name):
    source = inspect.getsource(getattr(owner, name))
    for phrase in PHRASES[owner][name]:
        assert phrase in source, f"{owner.__name__}.{name} no longer contains `{phrase}`"


@pytest.mark.parametrize(
    ("owner", "name", "library"),
    [
        (GRPOTrainer, "get_off_policy_mask", "trl"),
        (RLOOTrainer, "_compute_loss", "trl"),
        (Trainer, "_run_epoch", "transformers"),
    ],
)
def test_what_has_moved_is_named_with_its_library(owner, name, library, monkeypatch):
    trainer = TrollRLOOTrainer if owner is RLOOTrainer else TrollGRPOTrainer
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.raises(ImportError, match=rf"does not support {library} .*\.{name}` takes .*tested with {library} "):
        trl_compat.check_trl(trainer)
    monkeypatch.setattr(owner, name, None)
    with pytest.raises(ImportError, match=rf"does not support {library} .*\.{name}` is gone"):
        trl_compat.check_trl(trainer)


def test_a_method_that_was_written_anew_stops_no_run(monkeypatch):
    def _compute_loss(self, model, inputs):
        return None

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    trl_compat.check_trl(TrollGRPOTrainer)


@pytest.mark.parametrize(("ours", "trls"), [(TrollGRPOTrainer, GRPOTrainer), (TrollRLOOTrainer, RLOOTrainer)])
def test_our_constructors_take_what_trls_take(ours, trls):
    """Names, order, kinds, defaults; types too, but for `args`, which may be a config of ours."""
    expected, actual = inspect.signature(trls.__init__).parameters, inspect.signature(ours.__init__).parameters
    assert list(actual) == list(expected)
    for name, parameter in expected.items():
        assert (actual[name].kind, actual[name].default) == (parameter.kind, parameter.default), name
        if name not in ("self", "args"):
            assert actual[name].annotation == parameter.annotation, name


def test_a_script_with_our_class_shows_no_warning_of_a_name_that_trl_uses(tmp_path):
    """It was shown for the config, and eight times in the training."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        options = {"gradient_checkpointing": True, "steps_per_generation": 2, "max_steps": 2}
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options).train()
    assert [str(warning.message) for warning in shown if "gradient_checkpointing" in str(warning.message)] == []
