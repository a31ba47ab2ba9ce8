"""TrollGRPOTrainer against TRL's GRPOTrainer, and its loss against an independent computation."""

import functools
import math
import warnings
from unittest.mock import patch

import pytest
import torch
import trl_comparison
from peft import LoraConfig, get_peft_model
from tiny import saved_model, tiny_model
from transformers import OPTConfig, OPTForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, TrlParser
from trl_comparison import (
    assert_gradient_is_a_finite_difference,
    assert_same_movement,
    logged,
    make_trainer,
    micro_batch,
    reference_tokens,
    train_both,
    weights,
)

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trust_region.sparse import SparseDistribution

OPTIONS = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sequence_ratio": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "entropy_bonus": {"entropy_coef": 0.05},
    "adaptive_entropy_bonus": {
        "use_adaptive_entropy": True,
        "entropy_target": 10.0,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.01,
        "entropy_coef_max": 0.02,
    },
    "high_entropy_tokens": {"top_entropy_quantile": 0.5},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 48},  # some end in every update
    "temperature": {"temperature": 0.7},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_open_bound_without_regression_is_trl_without_a_clip(name, tmp_path):
    start, trl, troll = train_both("grpo", tmp_path, **{"max_steps": 5} | OPTIONS[name])
    assert_same_movement(start, weights(trl), weights(troll))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "gradient_accumulation_steps": 2},
        {"loss_type": "grpo", "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_reference_kl_is_trls(options, tmp_path):
    """Added by our own aggregation, in which the regression goes too; the coefficient is large enough to show an
    error. `test_our_arithmetic_is_that_of_trls_loss` has every loss type."""
    path = saved_model(tmp_path / "model")
    start, trl, troll = train_both("grpo", tmp_path, lambda: path, beta=1.0, max_steps=5, **options)
    assert_same_movement(start, weights(trl), weights(troll))
    assert logged(troll, "kl") == pytest.approx(logged(trl, "kl"), rel=1e-3, abs=1e-7)
    assert max(logged(troll, "kl")) > 1e-3


@pytest.mark.parametrize(("adapter", "steps_per_generation"), [("new", 4), ("retrained", 1)])
def test_lora_with_reference_kl(adapter, steps_per_generation, tmp_path):
    """With PEFT the reference goes through the same model and method; idle, it is the only pass without gradient."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=adapter == "new", lora_dropout=0.0)
    options = {"beta": 1.0, "steps_per_generation": steps_per_generation, "max_steps": 4, "learning_rate": 5e-2}

    def make_model():
        model = tiny_model()
        if adapter == "retrained":
            torch.manual_seed(0)
            model = get_peft_model(model, lora)
        return model

    start, trl, troll = train_both(
        "grpo", tmp_path, make_model, peft_config=lora if adapter == "new" else None, **options
    )
    assert_same_movement(start, weights(trl), weights(troll))
    assert ("troll_old_policy" in troll._buffered_inputs[0]) == (steps_per_generation == 4)


def take_off_policy(trainer):
    """Train a few updates, and return a micro-batch whose old policy is behind the current one."""
    trainer.train()
    return micro_batch(trainer)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_loss_is_the_papers(loss_type, tmp_path):
    """−π(a)/q(a)·A + α·KL(p ‖ π) from full logits, a dense support and an independent root-finder."""
    trainer = make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        tmp_path,
        loss_type=loss_type,
        kl_bound=0.01,
        regression_coef=0.5,
        support_size=12,
        tail_mass=1e-3,
        learning_rate=2e-2,
        max_steps=3,
    )
    inputs = take_off_policy(trainer)
    inputs["advantages"][::2] *= -1  # so that of the projected tokens some have moved against their advantage
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)

    mask, projected = inputs["completion_mask"].double(), 0
    per_token = torch.zeros(mask.shape, dtype=torch.float64)
    for b, t, p, q, pi, is_projected in reference_tokens(trainer, inputs):
        projected += is_projected
        surrogate = (pi[0] - q[0]).exp() * inputs["advantages"][b]
        regression = (p.exp() * (p - pi)).sum()
        per_token[b, t] = -surrogate + 0.5 * regression
    expected = {
        "dapo": per_token.sum() / (inputs["num_items_in_batch"] / 4),
        "grpo": ((per_token * mask).sum(1) / mask.sum(1)).mean(),
        "bnpo": per_token.sum() / mask.sum(),
        "dr_grpo": per_token.sum() / (len(mask) * 8),
        "luspo": per_token.sum(1).mean(),
    }[loss_type]
    assert projected >= 5, "the test needs projected tokens"
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-5)
    metrics = trainer.troll_metrics["train"].pop()
    assert metrics["troll/projected_fraction"] == pytest.approx(projected / mask.sum().item())


def test_gradient_is_that_of_the_loss(tmp_path):
    """The closed-form gradient, end to end."""
    trainer = make_trainer(
        TrollGRPOTrainer, TrollGRPOConfig, tmp_path, kl_bound=0.01, regression_coef=0.0, learning_rate=2e-2, max_steps=3
    )
    assert_gradient_is_a_finite_difference(trainer, take_off_policy(trainer))
    assert trainer.troll_metrics["train"].pop()["troll/projected_fraction"] > 0.02


def test_metrics(tmp_path):
    trainer = make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        tmp_path,
        kl_bound=0.01,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer.train()
    names = "projected_fraction policy_kl_mean policy_kl_max kl_mean kl_max eta_mean regression "
    names += "support_size_mean rest_mass_mean"
    for name in names.split():
        assert len(logged(trainer, f"troll/{name}")) == 8 and len(logged(trainer, f"eval_troll/{name}")) == 2
    assert not any(
        key.startswith(("clip_ratio/", "eval_clip_ratio/")) for line in trainer.state.log_history for key in line
    )
    assert max(logged(trainer, "troll/projected_fraction")) > 0.01
    assert max(logged(trainer, "troll/kl_max")) <= 0.01 * 1.001
    assert max(logged(trainer, "troll/policy_kl_max")) > 0.02
    # Evaluation scores the policy that sampled: nothing to project
    assert logged(trainer, "eval_troll/projected_fraction") == [0.0, 0.0]
    assert all(0 < x <= 64 for x in logged(trainer, "troll/support_size_mean"))


def test_metrics_are_exact_over_micro_batches(tmp_path):
    """Means over tokens, not means of means: two micro-batches of different lengths in one line."""
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=1)
    trainer.train()
    trainer.troll_metrics["train"].pop()
    masks = []
    for i in range(2):
        batch = micro_batch(trainer, i)
        batch["completion_mask"] = batch["completion_mask"] * (
            torch.arange(batch["completion_mask"].shape[1]) < 2 + 4 * i
        )
        live = batch["completion_mask"].bool()
        batch["troll_old_token_ids"] = batch["troll_old_token_ids"].masked_fill(~live.unsqueeze(-1), -1)
        trainer.model.train()
        trainer.compute_loss(trainer.model, batch)
        masks.append((batch, live))
    rest = torch.cat([batch["troll_old_log_probs"][live][:, -1].exp() for batch, live in masks])
    assert trainer.troll_metrics["train"].pop()["troll/rest_mass_mean"] == pytest.approx(rest.mean().item(), rel=1e-5)


def test_one_scoring_pass_and_its_cache(tmp_path, monkeypatch):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, support_size=32, tail_mass=0.7, max_steps=4)
    calls = []  # of the model with a fused head: those of generation have none
    forward = trainer.model.forward

    @functools.wraps(forward)
    def counting(*args, **kwargs):
        if kwargs.get("fused_lm_head"):
            calls.append((torch.is_grad_enabled(), "support_size" in kwargs, len(kwargs["input_ids"])))
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", counting)
    trainer.train()
    # One row to check the head, once; one scoring pass over the 32 completions, in TRL's chunks of the batch size; then
    # one pass per update
    assert calls == [(False, True, 1)] + [(False, True, 8)] * 4 + [(True, False, 8)] * 4

    batches = [micro_batch(trainer, i) for i in range(4)]
    batch = batches[0]
    ids, log_probs = batch["troll_old_token_ids"], batch["troll_old_log_probs"]
    old = SparseDistribution(torch.cat([b["troll_old_token_ids"] for b in batches]), None)
    assert ids.dtype == torch.int32 and log_probs.dtype == torch.float32
    assert ids.shape[-1] == old.support_size.max() < 32, "trimmed to the widest position of the rollout batch"
    assert log_probs.shape == (*ids.shape[:-1], ids.shape[-1] + 1)
    assert torch.equal(log_probs[..., 0].masked_fill(ids[..., 0] < 0, 0.0), batch["old_per_token_logps"])


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"steps_per_generation": 8}, 8),
        ({"steps_per_generation": 16}, 16),
        ({"generation_batch_size": 256}, 32),
        ({"steps_per_generation": 8, "num_iterations": 2}, 16),
        ({"steps_per_generation": 32, "gradient_accumulation_steps": 4}, 8),
        ({"steps_per_generation": 12}, 12),
    ],
)
@pytest.mark.parametrize("config", [TrollGRPOConfig, TrollRLOOConfig])
def test_an_automatic_bound_grows_with_the_square_of_the_updates(config, options, updates, tmp_path):
    args = config(str(tmp_path), use_cpu=True, bf16=False, kl_bound="auto", per_device_train_batch_size=8, **options)
    assert args.kl_bound == pytest.approx(0.05 * updates * updates / 64)
    assert args.to_dict()["kl_bound"] == args.kl_bound, "a tracker gets the number"


@pytest.mark.parametrize("steps", [4, 64])
def test_an_automatic_bound_beyond_what_was_measured_is_said(steps, tmp_path):
    with pytest.warns(UserWarning, match=f"for {steps} updates per rollout batch; it was measured for 8 to 32") as said:
        TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, kl_bound="auto", steps_per_generation=steps)
    assert __file__ in [warning.filename for warning in said]


@pytest.mark.parametrize(("text", "number"), [("auto", 0.2), ("0.3", 0.3), ("3e-1", 0.3), ("inf", math.inf)])
@pytest.mark.parametrize("config", [TrollGRPOConfig, TrollRLOOConfig])
def test_trls_parser_takes_an_automatic_bound(config, text, number, tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--steps_per_generation", "16"]
    (args,) = TrlParser(config).parse_args_and_config([*flags, "--kl_bound", text])
    assert isinstance(args.kl_bound, float) and args.kl_bound == pytest.approx(number)
    (tmp_path / "run.yaml").write_text(f"kl_bound: {text}")
    (args,) = TrlParser(config).parse_args_and_config([*flags, "--config", str(tmp_path / "run.yaml")])
    assert isinstance(args.kl_bound, float) and args.kl_bound == pytest.approx(number)


def test_a_bound_that_is_no_number_is_refused_by_trls_parser_too(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--kl_bound", "atuo"]
    with pytest.raises(ValueError, match="`kl_bound` must be positive or 'auto', got 'atuo'"):
        TrlParser(TrollGRPOConfig).parse_args_and_config(flags)


@pytest.mark.parametrize(
    ("trainer", "config"), [(TrollGRPOTrainer, GRPOConfig), (TrollRLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_a_swapped_class_names_the_users_line(trainer, config, tmp_path):
    args = config(str(tmp_path), use_cpu=True, bf16=False, epsilon=0.1, beta=0.0, steps_per_generation=2)
    with pytest.warns(UserWarning, match="epsilon=0.1 unused") as said:
        made = make_trainer(trainer, lambda *_, **__: args, tmp_path)
    assert [w.filename for w in said if "epsilon=0.1" in str(w.message)] == [trl_comparison.__file__]
    assert type(args) is config and type(made.args) is made._config_class, "the caller's config stays as it is"


def test_idle_run_says_so(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, steps_per_generation=1)
    assert "trust region is idle" in caplog.text and "steps_per_generation=8" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    assert "idle" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"delta": 2.0}, "`delta=2.0`"),
        ({"kl_bound": 0.0}, "`kl_bound` must be positive or 'auto', got 0.0"),
        ({"kl_bound": math.nan}, "`kl_bound` must be positive or 'auto', got nan"),
        ({"regression_coef": -1.0}, "`regression_coef`.*got -1.0"),
        ({"support_size": 0}, "`support_size`.*got 0"),
        ({"tail_mass": 1.0}, "`tail_mass`.*got 1.0"),
        ({"temperature": 0.0}, "`temperature` must be positive and finite, got 0.0"),
    ],
)
def test_options_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_support_larger_than_the_vocabulary_is_the_vocabulary(tmp_path):
    """A default of 64 should stop no tiny model."""
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, support_size=101, tail_mass=0.0, max_steps=2)
    trainer.train()
    assert logged(trainer, "troll/support_size_mean") == [100, 100]
    assert logged(trainer, "troll/rest_mass_mean") == [0, 0]


@pytest.mark.parametrize("size", [64.0, True, math.nan])
def test_support_size_that_is_no_whole_number_is_named(size, tmp_path):
    with pytest.raises(ValueError, match="`support_size` must be a whole number"):
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, support_size=size)


def test_subclass_of_trls_config_is_refused(tmp_path):
    """Also one that has the name of TRL's own, as open-r1's has."""
    class_of_another = type("GRPOConfig", (GRPOConfig,), {"__module__": "open_r1.configs"})
    message = r"got open_r1\.configs\.GRPOConfig\. Give a troll_trl\.TrollGRPOConfig, or let your class derive from it"
    with pytest.raises(TypeError, match=message):
        make_trainer(TrollGRPOTrainer, class_of_another, tmp_path)


def test_noise_of_embeddings_is_said_to_look_like_drift(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha (5)" in caplog.text


@pytest.mark.parametrize("name", ["attention_dropout", "router_jitter_noise"])
def test_noise_that_no_option_disables_is_said_to_look_like_drift(name, tmp_path, caplog):
    model = tiny_model()
    setattr(model.config, name, 0.1)
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, model)
    assert f"{name} (0.1)" in caplog.text and "in `model_init_kwargs`" in caplog.text


def test_dropout_that_is_no_module_is_said_to_look_like_drift(tmp_path, caplog):
    """OPT's, which `disable_dropout` does not reach."""
    config = OPTConfig(
        vocab_size=100, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, OPTForCausalLM(config), disable_dropout=True)
    assert "dropout (0.1)" in caplog.text and "in `model_init_kwargs`" in caplog.text


@pytest.mark.parametrize("disabled", [False, True])
def test_dropout_looks_like_drift_and_is_said_to(disabled, tmp_path, caplog):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, init_lora_weights=False)
    options = {"peft_config": lora, "disable_dropout": disabled, "max_steps": 1}
    with caplog.at_level("WARNING"):
        trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    if disabled:
        assert "dropout" not in caplog.text
    else:
        assert "dropout of modules (0.3)" in caplog.text and "disable_dropout=True" in caplog.text
    trainer.train()  # with the weights that the rollout was scored with
    assert (logged(trainer, "troll/policy_kl_max")[0] > 1e-4) is not disabled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"epsilon": 0.3, "epsilon_high": 0.28},
            "epsilon=0.3, epsilon_high=0.28 unused by this trust region (KL bound 0.05).",
        ),
        ({"epsilon": 0.3}, "epsilon=0.3 unused"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("config_class", [TrollGRPOConfig, GRPOConfig])
def test_unused_options_are_said(options, message, config_class, tmp_path):
    args = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    with pytest.warns(UserWarning) as said:
        if config_class is GRPOConfig:
            TrollGRPOConfig.from_trl(args)
        else:
            TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert [str(warning.message) for warning in said if message in str(warning.message)]


def test_options_that_are_used_are_not_said_to_be_unused(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unused.*")
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        TrollRLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        others = {"vllm_mode": "server", "label_smoothing_factor": 0.1, "sapo_temperature_neg": 2.0}  # TRL's business
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **others)


def test_plain_grpo_config_gets_the_defaults(tmp_path):
    trainer = make_trainer(TrollGRPOTrainer, GRPOConfig, tmp_path, max_steps=2)
    assert (trainer.args.kl_bound, trainer.args.support_size) == (0.05, 64)
    trainer.train()
    assert len(logged(trainer, "troll/kl_max")) == 2
    with pytest.raises(ValueError, match="cispo"):
        make_trainer(TrollGRPOTrainer, GRPOConfig, tmp_path, loss_type="cispo")


def test_a_prompt_masked_by_tools(tmp_path):
    """Tool tokens are scored, but neither projected tokens nor regression count them."""
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=3, learning_rate=2e-2)
    inputs = take_off_policy(trainer)
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 2:] = 0
    trainer.model.train()
    trainer.troll_metrics["train"].pop()
    trainer.compute_loss(trainer.model, inputs)
    mask = inputs["tool_mask"] * inputs["completion_mask"]
    assert trainer.troll_metrics["train"]._sums[1].item() == mask.sum().item()


def test_off_policy_mask_sees_the_policy(tmp_path, monkeypatch):
    """With a tight bound the projection stays near the old policy, while the policy has left it."""
    seen, original = [], GRPOTrainer.get_off_policy_mask

    @functools.wraps(original)  # `check_trl` reads the signature
    def recording(**kwargs):
        seen.append(kwargs["per_token_logps"])
        return original(**kwargs)

    monkeypatch.setattr(
        GRPOTrainer,
        "get_off_policy_mask",
        staticmethod(recording),
    )
    options = {"kl_bound": 1e-6, "off_policy_mask_threshold": 0.1, "learning_rate": 2e-2, "max_steps": 3}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    inputs = take_off_policy(trainer)
    seen.clear()
    trainer.model.train()
    trainer.compute_loss(trainer.model, inputs)
    drift = (seen[0] - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()].abs().max()
    assert drift > 0.05


def test_off_policy_mask_is_called_as_trls(tmp_path):
    """By position; overridden by a subclass; patched after the trainer was made."""
    arguments = torch.tensor([[1.0], [-1.0]]), torch.full((2, 4), -2.0), torch.zeros(2, 4), torch.ones(2, 4), 1.0

    class Inverted(TrollGRPOTrainer):
        def get_off_policy_mask(self, *args, **kwargs):
            return 1 - GRPOTrainer.get_off_policy_mask(*args, **kwargs)

    options = {"off_policy_mask_threshold": 0.5, "max_steps": 2}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    assert TrollGRPOTrainer.get_off_policy_mask(*arguments).flatten().tolist() == [1, 0]
    assert trainer.get_off_policy_mask(*arguments).flatten().tolist() == [1, 0]
    subclass = make_trainer(Inverted, TrollGRPOConfig, tmp_path, **options)
    assert subclass.get_off_policy_mask(*arguments).flatten().tolist() == [0, 1]
    with patch.object(TrollGRPOTrainer, "get_off_policy_mask", wraps=GRPOTrainer.get_off_policy_mask) as patched:
        trainer.train()
    assert patched.call_count == 2


def test_a_batch_that_lost_its_old_policy_is_refused(tmp_path):
    """A subclass that makes batches of its own and leaves out our columns would train without any trust region."""

    class OwnBatches(TrollGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {name: value for name, value in output.items() if not name.startswith("troll_")}

    trainer = make_trainer(OwnBatches, TrollGRPOConfig, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="lacks `troll_old_log_probs`, its old policy"):
        trainer.train()
    make_trainer(OwnBatches, TrollGRPOConfig, tmp_path, steps_per_generation=1, max_steps=1).train()
