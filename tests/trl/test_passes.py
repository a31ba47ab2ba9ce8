"""The four passes of a trainer, and the old policy that no reference is taken for, whatever order TRL scores in."""

import pytest
import torch
from mutated_trl import rewrite, score_reference_first
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import saved_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import use_adapter
from trl_comparison import assert_same_movement, logged, make_trainer, micro_batch, reference_tokens, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers.old_policy import OldPolicyCache, Pass

TRAINERS = {GRPOTrainer: (TrollGRPOTrainer, TrollGRPOConfig), RLOOTrainer: (TrollRLOOTrainer, TrollRLOOConfig)}
REGIONS = {
    "support": {"kl_bound": 1e-3},
    "binary": {"trust_region": "penalty", "divergence_type": "binary_kl", "kl_bound": 1e-4},
}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def run_of(trainer, folder, reference, **options):
    """A short run whose reference is a model of its own, the model without its adapter, or an adapter's copy."""
    torch.manual_seed(0)
    model, adapter = AutoModelForCausalLM.from_pretrained(saved_model(folder / "model")), None
    if reference == "new adapter":
        adapter = lora()
    elif reference == "copied adapter":
        model = get_peft_model(model, lora())
        for name, weight in model.named_parameters():  # otherwise it would act as the base model
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    rate = 2e-2 if adapter is None and reference == "model" else 2e-1
    options = {"beta": 0.3, "learning_rate": rate, "max_steps": 6} | options
    return make_trainer(*TRAINERS[trainer], folder, model, peft_config=adapter, **options)


def trained(*args, **options):
    run = run_of(*args, **options)
    start = weights(run)
    run.train()
    return run, start


@pytest.mark.parametrize(
    ("trainer", "region", "reference"),
    [
        *((GRPOTrainer, "support", reference) for reference in ("model", "new adapter")),
        *((RLOOTrainer, "support", reference) for reference in ("model", "copied adapter")),
        (GRPOTrainer, "binary", "copied adapter"),
    ],
)
def test_a_trl_that_scores_the_reference_first_trains_the_same_weights(
    trainer, reference, region, tmp_path, monkeypatch
):
    expected, start = trained(trainer, tmp_path / "expected", reference, **REGIONS[region])
    score_reference_first(monkeypatch, trainer)
    run, _ = trained(trainer, tmp_path / "run", reference, **REGIONS[region])
    assert_same_movement(start, weights(expected), weights(run))
    number = "troll/projected_fraction" if region == "support" else "troll/penalized_fraction"
    assert logged(run, number) == pytest.approx(logged(expected, number), abs=0.02) and max(logged(run, number)) > 0
    # The last rollout batch, of weights that have moved: its old policy is neither the reference nor anything else
    column = "troll_old_log_probs" if region == "support" else "old_per_token_logps"
    inputs, others = micro_batch(run), micro_batch(expected)
    torch.testing.assert_close(inputs[column], others[column], rtol=1e-2, atol=1e-2)
    if "ref_per_token_logps" in others:
        away = others["old_per_token_logps"] - others["ref_per_token_logps"]
        assert (away * others["completion_mask"]).abs().max() > 0.1, "the two orders would give the same numbers"


# With a binary region GRPO's trust region reads TRL's own column, whatever TRL has scored it with
@pytest.mark.parametrize(
    ("trainer", "region"), [(GRPOTrainer, "support"), (RLOOTrainer, "support"), (RLOOTrainer, "binary")]
)
def test_a_trl_that_scores_references_alone_is_stopped(trainer, region, tmp_path, monkeypatch):
    """It may do so where the policy was expected."""
    scored = r"(old_per_token_logps, _, _ = self\._get_per_token_logps_and_entropies\(\s+)self\.model,"
    rewrite(monkeypatch, trainer, {scored: r"\1self.ref_model,"})
    run = run_of(trainer, tmp_path, "model", **REGIONS[region])
    with pytest.raises(RuntimeError, match="TRL has not scored the rollout with the model that generated it"):
        run.train()
    assert run.state.global_step == 0


def test_the_recorded_support_is_of_the_model_that_generated(tmp_path, monkeypatch):
    """Against full logits, right after a rollout: policy and old policy are equal then."""
    score_reference_first(monkeypatch, GRPOTrainer)
    run, _ = trained(GRPOTrainer, tmp_path, "copied adapter", max_steps=4)
    run._buffered_inputs, run._step = None, 0
    run.model.train()
    batch = run._prepare_inputs(next(iter(run.get_train_dataloader())))
    tokens = 0
    for *_, p, q, _, _ in reference_tokens(run, batch):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
        tokens += 1
    assert tokens > 20


def passes(model):
    """A recorder of a `model`'s rollout, which asks for the pass of something that TRL may score."""
    recorder = OldPolicyCache(0, 1e-5, 1.0)

    def of(scored, context=None):
        with recorder.rollout(model, wanted=False):
            if context is None:
                return recorder.pass_of(scored)
            with context:
                return recorder.pass_of(scored)

    return of


def test_outside_of_a_rollout_every_pass_is_of_the_loss():
    model = tiny_model()
    assert OldPolicyCache(0, 1e-5, 1.0).pass_of(model) is Pass.LOSS


def test_the_policy_in_a_wrapper_is_itself_and_anything_else_a_reference():
    model = tiny_model()
    of = passes(model)
    assert of(model) is Pass.OLD_POLICY
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert of(wrapped) is Pass.OLD_POLICY
    for other in (tiny_model(), model.model, lambda **_: None):
        assert of(other) is Pass.REFERENCE


def test_once_the_old_policy_is_scored_the_rest_of_a_rollout_is_a_reference():
    model, recorder = tiny_model(), OldPolicyCache(0, 1e-5, 1.0)
    for _ in range(2):  # rollouts
        with recorder.rollout(model, wanted=True):
            assert recorder.pass_of(model) is Pass.OLD_POLICY
            recorder.record(lambda scored: (torch.zeros(1, 2), None, None), model, 2)
            assert recorder.pass_of(model) is Pass.REFERENCE
        batch = {}
        recorder.add_to(batch)
        assert batch["old_per_token_logps"].shape == (1, 2)


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_a_model_whose_adapter_is_off_or_exchanged_is_a_reference(kind):
    config = lora() if kind == "lora" else PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(tiny_model(), config)
    model.add_adapter("ref", config)
    of = passes(model)
    assert of(model) is Pass.OLD_POLICY
    assert of(model, use_adapter(model, None)) is Pass.REFERENCE
    assert of(model, use_adapter(model, "ref")) is Pass.REFERENCE
    assert of(model) is Pass.OLD_POLICY, "the contexts have put everything back"
    if kind == "lora":
        recorder = OldPolicyCache(0, 1e-5, 1.0)
        with recorder.rollout(model, wanted=False):
            model.base_model.disable_adapter_layers()
            assert recorder.pass_of(model) is Pass.REFERENCE
            model.base_model.enable_adapter_layers()
            assert recorder.pass_of(model) is Pass.OLD_POLICY
