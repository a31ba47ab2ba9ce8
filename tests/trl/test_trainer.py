"""The trainers against TRL's without a clip, and what they record, log, say and refuse."""

import functools
import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import saved_model, tiny_model, tiny_prompts
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, TrlParser
from trl_comparison import OURS, assert_same_movement, logged, make_trainer, off_policy, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer

OPTIONS = {
    "dapo": {},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "adaptive_entropy_bonus": {
        "use_adaptive_entropy": True,
        "entropy_target": 10.0,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.01,
        "entropy_coef_max": 0.02,
    },
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 48},  # some end in every update
    "reference_kl": {"beta": 1.0, "gradient_accumulation_steps": 2},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
}
OF_RLOO = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 6},
    "normalized": {"normalize_advantages": True},
    "masked_truncated": OPTIONS["masked_truncated"],
    "reference_kl": {"beta": 0.5},
    "reference_kl_idle": {"beta": 0.5, "steps_per_generation": 1, "max_steps": 4},
}
CASES = [("grpo", name) for name in OPTIONS] + [("rloo", name) for name in OF_RLOO]
CASES += [("mask", name) for name in ("dapo", "reference_kl")]


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_an_open_bound_without_regression_is_trl_without_a_clip(algorithm, name, tmp_path):
    options = {"max_steps": 5} | (OF_RLOO if algorithm == "rloo" else OPTIONS)[name]
    path = saved_model(tmp_path / "model")
    start, trl, troll = train_both(algorithm, tmp_path, lambda: path, **options)
    assert_same_movement(start, weights(trl), weights(troll))
    if "beta" in options:
        assert logged(troll, "kl") == pytest.approx(logged(trl, "kl"), rel=1e-3, abs=1e-6)


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
    assert ("old_sparse_logps" in troll._buffered_inputs[0]) == (steps_per_generation == 4)


# -- The old policy ---------------------------------------------------------------------------------------------------


def test_one_scoring_pass_records_the_old_policy(tmp_path, monkeypatch):
    """8·K + 4 bytes a token for the K of the widest row, and nothing else is kept in memory."""
    options = {"support_size": 32, "tail_mass": 0.7, "max_steps": 4}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    calls, forward, score = [], trainer.model.forward, trainer._generate_and_score_completions
    stored = []

    @functools.wraps(forward)
    def counting(*args, **kwargs):
        if kwargs.get("fused_lm_head"):
            calls.append((torch.is_grad_enabled(), "support_size" in kwargs, len(kwargs["input_ids"])))
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", counting)
    trainer._generate_and_score_completions = lambda *args: stored.append(batch := score(*args)) or batch
    trainer.train()
    # Once, two rows check the head, and a pass its gradient; the rollout is scored in TRL's chunks of the batch size;
    # then each update has one pass
    scoring = [call for call in calls if call[2] == 8]
    assert scoring == [(False, True, 8)] * 4 + [(True, False, 8)] * 4 and len(calls) - len(scoring) == 2

    (batch,) = stored
    ids, log_probs = batch["old_token_ids"], batch["old_sparse_logps"]
    tokens, width = batch["completion_ids"].numel(), ids.shape[-1]
    assert (ids.dtype, log_probs.dtype) == (torch.int32, torch.float32)
    assert width == (ids >= 0).sum(-1).max() < 32 and log_probs.shape == (*ids.shape[:-1], width + 1)
    assert sum(x.untyped_storage().nbytes() for x in (ids, log_probs)) == (8 * width + 4) * tokens
    live = batch["completion_mask"].bool()
    assert torch.equal(log_probs[..., 0][live], batch["old_per_token_logps"][live])
    assert torch.equal(ids[..., 0][live], batch["completion_ids"][live].int())


@pytest.mark.parametrize(("algorithm", "region"), [("grpo", "mask"), ("grpo", "penalty"), ("rloo", "penalty")])
def test_two_outcomes_keep_no_support_and_call_trls_head_alone(algorithm, region, tmp_path, monkeypatch):
    options = {"trust_region": region, "beta": 0.3, "model": saved_model(tmp_path / "model"), "max_steps": 4}
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    calls, forward = [], trainer.model.forward

    def counting(**kwargs):
        if kwargs.get("fused_lm_head"):
            calls.append((torch.is_grad_enabled(), bool(kwargs.keys() & {"support_size", "tail_mass", "token_ids"})))
        return forward(**kwargs)

    monkeypatch.setattr(trainer.model, "forward", counting)
    trainer.train()
    assert calls == [(False, False)] * 4 + [(True, False)] * 4
    inputs = trainer._buffered_inputs[0]
    assert not inputs.keys() & {"old_token_ids", "old_sparse_logps"}
    if algorithm == "rloo":  # the first pass, and not the reference's after it
        scores = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
        torch.testing.assert_close(scores, inputs["old_logps"])


def test_a_trl_that_divides_by_other_numbers_than_it_scored_first_is_refused(tmp_path, monkeypatch):
    score = GRPOTrainer._generate_and_score_completions

    def others(self, inputs):
        batch = score(self, inputs)
        return batch | {"old_per_token_logps": batch["old_per_token_logps"] + 0.1}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", others)
    with pytest.raises(RuntimeError, match="scores in another order"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path).train()


def test_a_batch_that_lost_its_old_policy_is_refused(tmp_path):
    """A subclass that makes batches of its own and leaves out our columns would train without any trust region."""

    class OwnBatches(TrollGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {name: value for name, value in output.items() if not name.startswith("old_")}

    with pytest.raises(ValueError, match="lacks `old_sparse_logps`, its old policy"):
        make_trainer(OwnBatches, TrollGRPOConfig, tmp_path, max_steps=2).train()
    make_trainer(OwnBatches, TrollGRPOConfig, tmp_path, steps_per_generation=1, max_steps=1).train()


def test_the_off_policy_mask_gets_the_policys_own_numbers(tmp_path, monkeypatch):
    """Not the projection's, which stay near the old policy, nor the advantages that carry the regression."""
    seen, original = [], GRPOTrainer.get_off_policy_mask

    def recording(**kwargs):
        seen.append(kwargs)
        return original(**kwargs)

    monkeypatch.setattr(GRPOTrainer, "get_off_policy_mask", staticmethod(recording))
    trainer, inputs = off_policy("grpo", tmp_path, kl_bound=1e-6, off_policy_mask_threshold=0.1)
    seen.clear()
    trainer.compute_loss(trainer.model, inputs)
    (given,) = seen
    assert (given["per_token_logps"] - inputs["old_per_token_logps"])[
        inputs["completion_mask"].bool()
    ].abs().max() > 0.05
    assert torch.equal(given["advantages"].squeeze(1), inputs["advantages"])


# -- Metrics and messages ---------------------------------------------------------------------------------------------

BOUND = 0.02
SUPPORT = ("support_size_mean", "rest_mass_mean")
METRICS = {
    "projection": ("projected_fraction", "policy_kl_max", "kl_mean", "kl_max", "eta_mean", "regression", *SUPPORT),
    "penalty": ("penalized_fraction", "policy_kl_mean", "policy_kl_max", "regression"),
    "mask": ("masked_fraction", "masked_fraction_positive", "masked_fraction_negative", "divergence_max"),
}


@pytest.mark.parametrize(("algorithm", "region"), [("grpo", "projection"), ("grpo", "mask"), ("rloo", "penalty")])
def test_metrics(algorithm, region, tmp_path):
    options = {"trust_region": region, "learning_rate": 2e-2, "eval_strategy": "steps", "eval_steps": 4, "beta": 0.0}
    options |= {"divergence_bound": 0.02} if region == "mask" else {"kl_bound": 1e-4 if region == "penalty" else BOUND}
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.train()
    for name in METRICS[region]:
        assert len(logged(trainer, f"troll/{name}")) == 8 and len(logged(trainer, f"eval_troll/{name}")) == 2
    assert not any("clip_ratio/" in key for line in trainer.state.log_history for key in line)
    acts = METRICS[region][0]
    assert 0 < max(logged(trainer, f"troll/{acts}")) < 1
    # Evaluation scores the policy that sampled
    assert logged(trainer, f"troll/{acts}")[0] == 0 and logged(trainer, f"eval_troll/{acts}") == [0.0, 0.0]
    if region == "projection":
        assert max(logged(trainer, "troll/kl_max")) <= BOUND * 1.001 < max(logged(trainer, "troll/policy_kl_max"))


def test_metrics_are_means_over_the_tokens_of_several_micro_batches(tmp_path):
    trainer, inputs = off_policy("grpo", tmp_path)
    rest = []
    for length in (2, 6):
        batch = inputs | {"completion_mask": inputs["completion_mask"].clone()}
        batch["completion_mask"][:, length:] = 0
        trainer.compute_loss(trainer.model, batch)
        rest.append(batch["old_sparse_logps"][batch["completion_mask"].bool()][:, -1].exp())
    expected = torch.cat(rest).mean().item()
    assert trainer.troll_metrics["train"].pop()["troll/rest_mass_mean"] == pytest.approx(expected, rel=1e-5)


def test_what_a_run_prints_and_its_model_card(tmp_path, capsys):
    trainer = make_trainer(TrollRLOOTrainer, RLOOConfig, tmp_path, beta=0.0)
    assert trainer.args.kl_bound == 0.05, "a plain RLOOConfig gets TROLL's defaults"
    assert "4 updates per rollout batch, up to 64 tokens" in capsys.readouterr().out
    trainer.create_model_card()
    assert "2510.03817" in (tmp_path / "README.md").read_text(encoding="utf-8")
    mask = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, trust_region="mask", ratio_cap=5.0)
    printed = capsys.readouterr().out
    assert "masked beyond a binary_tv of 0.15, ratios capped at 5" in printed and "kept per position" not in printed
    mask.create_model_card()
    assert "2602.04879" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("options", "words"), [
    ({"steps_per_generation": 1}, "trust region is idle"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha (5)"),
    ({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.3)}, "dropout of modules (0.3)"),
    ({"top_entropy_quantile": 0.5}, "`top_entropy_quantile`, the regression does not act"),
])  # fmt: skip
def test_warnings_at_the_start(options, words, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    assert words in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    assert words not in caplog.text


# -- Options ----------------------------------------------------------------------------------------------------------


def config_of(tmp_path, config=TrollGRPOConfig, **options):
    return config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(
    ("options", "updates"),
    [({"steps_per_generation": 8, "num_iterations": 2}, 16), ({"generation_batch_size": 256}, 32)],
)
@pytest.mark.parametrize("config", [TrollGRPOConfig, TrollRLOOConfig])
def test_an_automatic_bound_grows_with_the_square_of_the_updates(config, options, updates, tmp_path):
    args = config_of(tmp_path, config, kl_bound="auto", per_device_train_batch_size=8, **options)
    assert args.kl_bound == pytest.approx(0.05 * updates * updates / 64)
    assert args.to_dict()["kl_bound"] == args.kl_bound, "a tracker gets the number"


def test_an_automatic_bound_beyond_what_was_measured_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="for 4 updates per rollout batch; it was measured for 8 to 32"):
        config_of(tmp_path, kl_bound="auto", steps_per_generation=4)


@pytest.mark.parametrize(("text", "number"), [("auto", 0.2), ("3e-1", 0.3), ("inf", math.inf)])
def test_trls_parser_takes_a_bound(text, number, tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--steps_per_generation", "16"]
    (tmp_path / "run.yaml").write_text(f"kl_bound: {text}")
    for given in (["--kl_bound", text], ["--config", str(tmp_path / "run.yaml")]):
        (args,) = TrlParser(TrollGRPOConfig).parse_args_and_config([*flags, *given])
        assert isinstance(args.kl_bound, float) and args.kl_bound == pytest.approx(number)


REFUSED = [
    ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ({"loss_type": "sapo"}, "loss_type='sapo'"),
    ({"loss_type": "vespo"}, "loss_type='vespo'"),
    ({"delta": 2.0}, "`delta=2.0`"),
    ({"kl_bound": 0.0}, "`kl_bound` must be positive or 'auto', got 0.0"),
    ({"kl_bound": math.nan}, "`kl_bound` must be positive or 'auto', got nan"),
    ({"kl_bound": "wide"}, "`kl_bound` must be positive or 'auto', got 'wide'"),
    ({"trust_region": "penalty", "kl_bound": -0.1}, "`kl_bound` must be at least 0 or 'auto', got -0.1"),
    ({"regression_coef": -1.0}, "`regression_coef`.*got -1.0"),
    ({"support_size": 0}, "`support_size`.*got 0"),
    ({"support_size": 64.0}, "`support_size` must be a whole number"),
    ({"tail_mass": 1.0}, "`tail_mass`.*got 1.0"),
    ({"max_skipped_updates": 0}, "`max_skipped_updates` must be at least 1, got 0"),
    ({"trust_region": "ball"}, "`trust_region` must be one of .* got 'ball'"),
    ({"trust_region": "mask", "divergence_type": "topk_kl"}, "`divergence_type` .* got 'topk_kl'"),
    ({"trust_region": "mask", "divergence_bound": 1.0}, "`divergence_bound` of binary_tv .* got 1.0"),
    ({"trust_region": "mask", "ratio_cap": 0.5}, "`ratio_cap` must be at least 1, got 0.5"),
    ({"trust_region": "mask", "importance_sampling_level": "sequence"}, "`importance_sampling_level='sequence'`"),
    (
        {"trust_region": "penalty", "divergence_type": "binary_tv"},
        "`divergence_type` of the penalty .* got 'binary_tv'",
    ),
    ({"generation_kwargs": {"temperature": 0.3}}, "`generation_kwargs` has temperature=0.3"),
    ({"generation_kwargs": {"do_sample": False}}, "`generation_kwargs` has do_sample=False"),
    ({"generation_kwargs": {"num_beams": 4}}, "`generation_kwargs` has num_beams=4"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **options)


def test_rloo_refuses_a_mask_and_a_support_larger_than_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="`trust_region` must be one of projection, penalty, got 'mask'"):
        config_of(tmp_path, TrollRLOOConfig, trust_region="mask")
    with pytest.raises(ValueError, match="`support_size` is 101, and the model has a vocabulary of 100"):
        make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, beta=0.0, support_size=101)


@pytest.mark.parametrize(("options", "unused"), [
    ({"trust_region": "mask", "kl_bound": 0.1}, "kl_bound=0.1 unused"),
    ({"trust_region": "penalty", "support_size": 8}, "support_size=8 unused"),
    ({"ratio_cap": 5.0, "divergence_type": "binary_tv"}, "divergence_type=binary_tv, ratio_cap=5.0 unused"),
])  # fmt: skip
def test_options_of_another_trust_region_are_warned_of_at_the_users_line(options, unused, tmp_path):
    with pytest.warns(UserWarning, match=unused) as warned:
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert __file__ in [warning.filename for warning in warned if "unused" in str(warning.message)]


def test_options_that_act_and_a_recipes_clip_range_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unused.*")
        config_of(tmp_path, epsilon=0.1, epsilon_high=0.3)
        config_of(tmp_path, TrollRLOOConfig, epsilon=0.1)
        config_of(tmp_path, trust_region="mask", divergence_bound=0.1, ratio_cap=2.0)


@pytest.mark.parametrize(
    ("trainer", "config"), [(TrollGRPOTrainer, GRPOConfig), (TrollRLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_a_swapped_class_gets_the_defaults_and_their_warnings(trainer, config, tmp_path, monkeypatch):
    check = trainer._config_class._check
    monkeypatch.setattr(trainer._config_class, "_check", lambda self: ["a warning", *check(self)])
    args = config_of(tmp_path, config, beta=0.0, steps_per_generation=2)
    with pytest.warns(UserWarning, match="a warning"):
        made = make_trainer(trainer, lambda *_, **__: args, tmp_path)
    assert type(args) is config and type(made.args) is made._config_class, "the caller's config stays as it is"


@pytest.mark.parametrize(("trainer", "another"), [(TrollGRPOTrainer, RLOOConfig), (TrollRLOOTrainer, GRPOConfig)])
def test_a_config_of_another_trainer_and_a_subclass_of_trls_are_refused(trainer, another, tmp_path):
    own = trainer._config_class._trl_config
    for wrong in (another, type(own.__name__, (own,), {"__module__": "open_r1.configs"})):
        with pytest.raises(TypeError, match=rf"or a plain {own.__name__}, got {wrong.__module__}\.{wrong.__name__}"):
            make_trainer(trainer, wrong, tmp_path)


@pytest.mark.parametrize(("prompts", "is_uneven"), [(4, False), (5, True)])
def test_batches_of_an_evaluation_that_weigh_differently_are_warned_of(prompts, is_uneven, tmp_path, caplog):
    options = {"eval_dataset": tiny_prompts(prompts), "per_device_eval_batch_size": 8}
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    assert ("do not fill batches of 8" in caplog.text) == is_uneven
