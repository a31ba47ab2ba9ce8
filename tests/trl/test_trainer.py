"""The trainers against TRL's without a clip, and what they record, log, say and refuse."""

import functools
import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, TrlParser

from tests.tiny import saved_model, tiny_model, tiny_prompts
from tests.trl_comparison import (
    OURS,
    assert_same_movement,
    logged,
    make_trainer,
    micro_batch,
    off_policy,
    train_both,
    weights,
)
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers.clip import ClipGRPOTrainer

OPTIONS = {
    "dapo": {},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 48},  # some end in every update
    "reference_kl": {"beta": 1.0, "gradient_accumulation_steps": 2},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
}
OF_RLOO = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 6},
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


def test_a_support_takes_as_little_memory_as_its_widest_row_needs(tmp_path):
    """8·K + 4 bytes a token for the K of the widest row, and nothing else is kept in memory."""
    options = {"support_size": 32, "tail_mass": 0.7, "max_steps": 1}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    stored, score = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda *args: stored.append(batch := score(*args)) or batch
    trainer.train()
    (batch,) = stored
    ids, log_probs = batch["old_token_ids"], batch["old_sparse_logps"]
    tokens, width = batch["completion_ids"].numel(), ids.shape[-1]
    assert width == (ids >= 0).sum(-1).max() < 32 and log_probs.shape == (*ids.shape[:-1], width + 1)
    assert sum(x.untyped_storage().nbytes() for x in (ids, log_probs)) == (8 * width + 4) * tokens
    live = batch["completion_mask"].bool()
    assert torch.equal(log_probs[..., 0][live], batch["old_per_token_logps"][live])
    assert torch.equal(ids[..., 0][live], batch["completion_ids"][live].int())


@pytest.mark.parametrize(("algorithm", "region"), [("grpo", "mask"), ("rloo", "penalty")])
def test_two_outcomes_keep_no_support(algorithm, region, tmp_path):
    options = {"trust_region": region, "beta": 0.3, "model": saved_model(tmp_path / "model"), "max_steps": 2}
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.train()
    inputs = trainer._buffered_inputs[0]
    assert not inputs.keys() & {"old_token_ids", "old_sparse_logps"}
    if algorithm == "rloo":  # the first pass, and not the reference's after it
        scores = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
        torch.testing.assert_close(scores, inputs["old_logps"])


def test_a_trl_that_divides_by_other_numbers_than_it_scored_first_is_refused(tmp_path, monkeypatch):
    score = GRPOTrainer._generate_and_score_completions

    @functools.wraps(score)
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


def test_a_maximum_is_the_largest_of_several_micro_batches(tmp_path):
    trainer, first = off_policy("grpo", tmp_path)
    second = micro_batch(trainer, 1)

    def largest(*batches):
        for batch in batches:
            trainer.compute_loss(trainer.model, batch)
        return trainer.troll_metrics["train"].pop()["troll/policy_kl_max"]

    one, other = largest(first), largest(second)
    assert one != other
    assert largest(first, second) == largest(second, first) == max(one, other)


def test_an_evaluation_counts_nothing_of_a_prediction_before_it(tmp_path):
    options = {"eval_dataset": tiny_prompts(2), "max_completion_length": 3}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)

    def evaluate():
        torch.manual_seed(0)
        return {name: value for name, value in trainer.evaluate().items() if "troll/" in name}

    expected = evaluate()
    trainer.predict(tiny_prompts(2))
    assert len(expected) > 3 and evaluate() == expected


@pytest.mark.parametrize("algorithm", OURS)
def test_an_option_that_a_script_changes_before_training_acts(algorithm, tmp_path):
    """TRL reads it anew for each rollout. Nothing would limit its ratios."""
    options = {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "beta": 0.0,
    }
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.args.gradient_accumulation_steps = 1
    trainer.train()
    assert max(logged(trainer, "troll/policy_kl_max")) > 0.01


@pytest.mark.parametrize(("options", "words"), [
    ({"steps_per_generation": 1}, "trust region is idle"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.3)}, "dropout of modules"),
])  # fmt: skip
def test_warnings_at_the_start(options, words, tmp_path, caplog):
    for given, warns in (({}, False), (options, True)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **given)
        assert (words in caplog.text) == warns


@pytest.mark.parametrize(
    ("trainer", "config"),
    [(TrollGRPOTrainer, TrollGRPOConfig), (TrollRLOOTrainer, TrollRLOOConfig), (ClipGRPOTrainer, GRPOConfig)],
)
@pytest.mark.parametrize(("options", "words", "generations"), [
    ({"num_train_epochs": 2}, "makes 16 completions, an update uses 8, and each completion is used once", 4),
    # A generation takes 4 of 10 prompts, and each completion is used by 3 of its 6 updates
    ({"num_train_epochs": 2, "num_iterations": 3}, "uses 8, and each completion is used 3 times", 4),
    # The last generation is used by 2 of its 6 updates
    ({"max_steps": 8, "num_iterations": 3}, "uses 8, and each completion is used 3 times", 2),
    # The second and the fourth update are short, since an epoch ends
    ({"num_train_epochs": 2, "gradient_accumulation_steps": 3}, "uses 24, and each completion is used once", 4),
    # An update takes two generations
    ({"max_steps": 3, "gradient_accumulation_steps": 4}, "uses 32, and each completion is used once", 6),
])  # fmt: skip
def test_the_start_says_how_often_completions_are_used_and_how_many_generations_follow(
    options, words, generations, trainer, config, tmp_path, capsys
):
    """In open-r1 583, four iterations made four times as many updates, and nothing had said so."""
    options = {"max_steps": -1, "beta": 0.0, "steps_per_generation": 2, "max_completion_length": 2} | options
    data = {"dataset": tiny_prompts(10), "per_device_train_batch_size": 8}
    trainer = make_trainer(trainer, config, tmp_path, **data, **options)
    said = capsys.readouterr().out
    assert f"{words}; the run makes {generations} generations." in said
    epochs = "With `num_iterations` 3, `num_train_epochs` (2) makes 3 times as many updates as with 1"
    assert (epochs in said) == (options["max_steps"] < 0 and "num_iterations" in options)
    generate, made = trainer._generate_and_score_completions, []
    trainer._generate_and_score_completions = lambda inputs: made.append(len(inputs)) or generate(inputs)
    trainer.train()
    assert made == [16] * generations
    assert trainer.state.log_history[-1]["cost/completions"] == sum(made)


# -- Options ----------------------------------------------------------------------------------------------------------


def config_of(tmp_path, config=TrollGRPOConfig, **options):
    return config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


BOUNDS = [(1, 0.05), (8, 0.05), (16, 0.2), (32, 0.8), (64, 0.8)]


@pytest.mark.parametrize(("updates", "bound"), BOUNDS)
def test_the_default_bound_grows_with_the_square_of_the_updates(updates, bound, tmp_path):
    """For GRPO's projection from 8 to 32 updates, where it was measured; nothing else was, or it was too wide."""
    args = config_of(tmp_path, steps_per_generation=updates)
    assert args.kl_bound == pytest.approx(bound)
    assert args.to_dict()["kl_bound"] == args.kl_bound, "a tracker gets the number"
    assert config_of(tmp_path, TrollRLOOConfig, steps_per_generation=updates, kl_bound="auto").kl_bound == 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the default is no option that was set
        for region in ("penalty", "mask"):
            assert config_of(tmp_path, steps_per_generation=updates, trust_region=region).kl_bound == 0.05
        plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, steps_per_generation=updates)
        assert TrollGRPOConfig.from_trl(plain).kl_bound == args.kl_bound


@pytest.mark.parametrize(("text", "number"), [("auto", 0.2), ("3e-1", 0.3), ("inf", math.inf)])
def test_trls_parser_takes_a_bound(text, number, tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--steps_per_generation", "16"]
    (tmp_path / "run.yaml").write_text(f"kl_bound: {text}")
    for given in (["--kl_bound", text], ["--config", str(tmp_path / "run.yaml")]):
        (args,) = TrlParser(TrollGRPOConfig).parse_args_and_config([*flags, *given])
        assert isinstance(args.kl_bound, float) and args.kl_bound == pytest.approx(number)


REFUSED = [
    ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ({"delta": 2.0}, "`delta=2.0`"),
    ({"kl_bound": 0.0}, "`kl_bound` .* got 0.0"),
    ({"kl_bound": "wide"}, "`kl_bound` .* got 'wide'"),
    ({"trust_region": "penalty", "kl_bound": -0.1}, "`kl_bound` .* got -0.1"),
    ({"regression_coef": -1.0}, "`regression_coef`.*got -1.0"),
    ({"support_size": 0}, "`support_size`.*got 0"),
    ({"tail_mass": 1.0}, "`tail_mass`.*got 1.0"),
    ({"max_skipped_updates": 0}, "`max_skipped_updates` .* got 0"),
    ({"trust_region": "ball"}, "`trust_region` .* got 'ball'"),
    ({"trust_region": "mask", "divergence_bound": 1.0}, "`divergence_bound` .* got 1.0"),
    ({"trust_region": "mask", "ratio_cap": 0.5}, "`ratio_cap` .* got 0.5"),
    ({"trust_region": "mask", "importance_sampling_level": "sequence"}, "`importance_sampling_level='sequence'`"),
    ({"trust_region": "penalty", "divergence_type": "binary_tv"}, "`divergence_type` .* got 'binary_tv'"),
    ({"generation_kwargs": {"temperature": 0.3}}, "temperature=0.3"),
    ({"generation_kwargs": {"do_sample": False}}, "do_sample=False"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **options)


def test_rloo_refuses_a_mask_and_a_support_larger_than_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match=r"`trust_region` .* got 'mask'"):
        config_of(tmp_path, TrollRLOOConfig, trust_region="mask")
    with pytest.raises(ValueError, match=r"`support_size` must be .* got 101"):
        make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, beta=0.0, support_size=101)


@pytest.mark.parametrize(("options", "unused"), [
    ({"trust_region": "penalty", "support_size": 8}, "does not use support_size=8"),
    ({"ratio_cap": 5.0, "divergence_type": "binary_tv"}, "does not use divergence_type=binary_tv, ratio_cap=5.0"),
])  # fmt: skip
def test_options_of_another_trust_region_are_warned_of_at_the_users_line(options, unused, tmp_path):
    with pytest.warns(UserWarning, match=unused) as warned:
        TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert __file__ in [warning.filename for warning in warned if "does not use" in str(warning.message)]


def test_options_that_act_and_a_recipes_clip_range_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not use.*")
        config_of(tmp_path, epsilon=0.1, epsilon_high=0.3)
        config_of(tmp_path, trust_region="mask", divergence_bound=0.1, ratio_cap=2.0)


@pytest.mark.parametrize(("trainer", "another"), [(TrollGRPOTrainer, RLOOConfig), (TrollRLOOTrainer, GRPOConfig)])
def test_a_plain_config_of_trls_gets_the_defaults_and_any_other_is_refused(trainer, another, tmp_path):
    own = trainer._config_class._trl_config
    args = config_of(tmp_path, own, beta=0.0, steps_per_generation=2)
    made = make_trainer(trainer, lambda **_: args, tmp_path).args
    assert type(made) is trainer._config_class and made.kl_bound == 0.05
    assert type(args) is own, "the caller's config stays as it is"
    for wrong in (another, type(own.__name__, (own,), {"__module__": "open_r1.configs"})):
        with pytest.raises(TypeError, match=rf"{wrong.__module__}\.{wrong.__name__}"):
            make_trainer(trainer, wrong, tmp_path)


@pytest.mark.parametrize("who", ["this rank", "another"])
def test_the_head_is_checked_until_a_rank_has_compared(who, tmp_path, monkeypatch):
    """A check makes two passes. With sharded weights, a rank that checked alone waited for the others."""
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    own = {"this rank": [False, True], "another": [False, False]}[who]
    other = iter([0.0, 0.0] if who == "this rank" else [0.0, 1.0])
    monkeypatch.setattr("troll_trl.trainers.troll_trainer.check_head", lambda *_: own.pop(0))
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda compared, reduction: compared + next(other))
    for _ in range(3):
        trainer._check_head(trainer.model, {}, 4)
    assert own == []
