"""Asynchronous GRPO: against TRL's trainer, against an independent loss on unpacked samples, and what it refuses."""

import ast
import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from async_engine import Engine, main, make_trainer
from limits import HANG
from peft import LoraConfig
from ranks import in_two_ranks
from references import reference_divergence, reference_project
from repository import ROOT
from test_distributed import FSDP2, launch
from tiny import saved_model, tiny_config, tiny_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.packing import TreeRow
from trl_comparison import assert_same_movement, logged, weights

from troll_trl import TrustRegion, TrustRegionOutput
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer

K = 6
REGIONS = {
    "projection": {"kl_bound": 0.002, "regression_coef": 0.7, "support_size": K},
    "binary_tv": {"trust_region": "mask", "divergence_type": "binary_tv", "divergence_bound": 0.01},
    "binary_kl": {"trust_region": "mask", "divergence_type": "binary_kl", "divergence_bound": 1e-3, "ratio_cap": 1.05},
    "topk_tv": {"trust_region": "mask", "divergence_type": "topk_tv", "divergence_bound": 0.015, "support_size": K},
    "topk_kl": {"trust_region": "mask", "divergence_type": "topk_kl", "divergence_bound": 1e-3, "support_size": K},
    "penalty": {
        "trust_region": "penalty",
        "kl_bound": 0.002,
        "regression_coef": 0.7,
        "epsilon": 0.1,
        "support_size": K,
    },
    "binary_penalty": {
        **{"trust_region": "penalty", "divergence_type": "binary_kl"},
        **{"kl_bound": 5e-4, "regression_coef": 0.7, "epsilon": 0.1, "epsilon_high": 0.3},
    },
}
OPEN = {"kl_bound": math.inf, "regression_coef": 0.0, "divergence_bound": 1 - 1e-9, "ratio_cap": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), spread=40.0)


def support_of(region):
    return REGIONS[region].get("support_size")


# -- Against TRL ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trls_run(folder, tmp_path_factory):
    """TRL's trainer without a clip, the weights at its start, and its samples."""
    engine = Engine(folder, age=2)
    without_clip = {"epsilon": math.inf, "epsilon_high": math.inf}
    output = tmp_path_factory.mktemp("trl")
    trainer = make_trainer(folder, output, engine, AsyncGRPOTrainer, AsyncGRPOConfig, **without_clip)
    start = weights(trainer)
    trainer.train()
    return trainer, start, engine.given


@pytest.mark.parametrize("region", [region for region in REGIONS if not region.endswith("penalty")])
def test_with_an_open_bound_the_weights_are_trls_without_a_clip(region, trls_run, folder, tmp_path):
    """On the same samples: two turns, forks, shared prefixes, a completion of one token, two versions old."""
    trl, start, given = trls_run
    engine = Engine(folder, age=2, support_size=support_of(region))
    options = REGIONS[region] | {name: value for name, value in OPEN.items() if name in REGIONS[region]}
    trainer = make_trainer(folder, tmp_path, engine, **options)
    trainer.train()
    assert [s.input_ids.tolist() for s in engine.given] == [s.input_ids.tolist() for s in given]
    assert_same_movement(start, weights(trl), weights(trainer))
    assert max(logged(trainer, "sample/staleness_max")) == 2
    np.testing.assert_allclose(logged(trainer, "ratio"), logged(trl, "ratio"), rtol=1e-4)
    np.testing.assert_allclose(logged(trainer, "entropy"), logged(trl, "entropy"), rtol=1e-4)


def test_a_penalty_without_weight_is_trls_clip_bit_for_bit(folder, tmp_path):
    clip = {"epsilon": 0.01, "epsilon_high": 0.02}
    trl = make_trainer(folder, tmp_path, Engine(folder, age=2), AsyncGRPOTrainer, AsyncGRPOConfig, **clip)
    trl.train()
    options = REGIONS["binary_penalty"] | clip | {"regression_coef": 0.0}
    trainer = make_trainer(folder, tmp_path, Engine(folder, age=2), **options)
    trainer.train()
    for name, value in weights(trl).items():
        assert torch.equal(value, weights(trainer)[name]), name
    clipped = logged(trl, "clip_ratio/region_mean")
    assert logged(trainer, "clip_ratio/region_mean") == clipped and max(clipped) > 0


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts with a loss of its own."""
    options = tiny_config().to_dict() | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**options | {"output_router_logits": True, "router_aux_loss_coef": 0.1})
    torch.manual_seed(0)
    model, folder = Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["adapter", "experts"])
def test_an_adapter_and_a_mixture_of_experts_train_as_with_trl(kind, folder, experts, tmp_path):
    model = experts if kind == "experts" else folder
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if kind == "adapter" else None
    options = {"learning_rate": 2e-2, "peft_config": adapter, "max_steps": 4}
    without_clip = {"epsilon": math.inf, "epsilon_high": math.inf}
    trl = make_trainer(model, tmp_path, Engine(model), AsyncGRPOTrainer, AsyncGRPOConfig, **without_clip, **options)
    start = weights(trl)
    trl.train()
    opened = {"kl_bound": math.inf, "regression_coef": 0.0, "support_size": K}
    trainer = make_trainer(model, tmp_path, Engine(model, support_size=K), **opened, **options)
    trainer.train()
    assert_same_movement(start, weights(trl), weights(trainer))
    np.testing.assert_allclose(logged(trainer, "loss"), logged(trl, "loss"), rtol=1e-4, atol=1e-6)


# -- Against an independent computation -----------------------------------------------------------------------------


def perturbed(model, seed, size):
    generator = torch.Generator().manual_seed(seed)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for tensor in state.values():
        tensor += size * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
    return state


def reference_loss(model, old_models, samples, region, options):
    """The loss of unpacked samples, a sum over tokens, in float64, and how many tokens the trust region acted on."""
    total, acted = torch.zeros((), dtype=torch.float64), 0
    for sample, old_model in samples:
        ids = torch.tensor(sample.input_ids)
        logits = model(ids[None]).logits[0]
        with torch.no_grad():
            old_logits = old_models[old_model](ids[None]).logits[0]
        for position in range(1, len(ids)):
            if not sample.completion_mask[position]:
                continue
            token = ids[position].item()
            p, q = (x[position - 1].log_softmax(-1) for x in (logits, old_logits))
            ratio = (p[token] - q[token]).exp()
            if region in ("projection", "penalty", "topk_tv", "topk_kl"):
                kept = [token, *[i for i in q.argsort(descending=True).tolist() if i != token][: K - 1]]
            else:
                kept = [token]
            others = [i for i in range(len(p)) if i not in kept]
            p, q = (torch.cat([x[kept], x[others].logsumexp(0, keepdim=True)]) for x in (p, q))
            if region == "projection":
                loss, active = projected_loss(p, q, sample.advantage, options)
            elif region.endswith("penalty"):
                loss, active = penalized_loss(p, q, sample.advantage, options)
            else:
                divergence = reference_divergence(region, p.detach().numpy(), q.numpy())
                away = (ratio - 1).item() * sample.advantage > 0
                active = divergence > options["divergence_bound"] and away
                weight = 0.0 if active else min(1.0, options.get("ratio_cap", math.inf) / ratio.item())
                gradient = weight * ratio.detach() * p[0]  # its value does not count, its gradient does
                value = 1.0 if active else ratio.detach()  # of a masked token the old policy's, lest it overflow
                loss = -sample.advantage * (value + gradient - gradient.detach())
            total, acted = total + loss, acted + active
    return total, acted


def projected_loss(p, q, advantage, options):
    """`−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`; the multiplier's gradient by one Newton step from the solution."""
    t = reference_project(p.detach().numpy(), q.numpy(), options["kl_bound"]).t
    if t == 1:
        return -(p[0] - q[0]).exp() * advantage, False
    family = lambda t: (q + t * (p - q)).log_softmax(-1)
    kl = lambda t: (family(t).exp() * (family(t) - q)).sum()
    fixed = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kl(fixed), fixed)
    fixed = fixed.detach()
    pi = family(fixed - (kl(fixed) - options["kl_bound"]) / slope.detach())
    regression = (p.exp() * (p - pi.detach())).sum()
    return -(pi[0] - q[0]).exp() * advantage + options["regression_coef"] * regression, True


def penalized_loss(p, q, advantage, options):
    """The clip's loss and `α·KL(p ‖ stopgrad π)` outside of the bound."""
    t, pi = reference_project(p.detach().numpy(), q.numpy(), options["kl_bound"])
    ratio = (p[0] - q[0]).exp()
    clipped = ratio.clamp(1 - options["epsilon"], 1 + options.get("epsilon_high", options["epsilon"]))
    loss = -torch.min(ratio * advantage, clipped * advantage)
    regression = (p.exp() * (p - torch.as_tensor(pi))).sum() if t < 1 else 0.0
    return loss + options["regression_coef"] * regression, t < 1


@pytest.mark.parametrize("region", REGIONS)
def test_loss_and_gradient_are_those_of_unpacked_samples(region, folder, tmp_path):
    """One packed row of conversations of one prompt, sampled with three sets of weights: samples whose old policies
    differ share positions."""
    options = REGIONS[region]
    engine = Engine(folder, support_size=support_of(region))
    engine.prompts = engine.prompts[:1]
    policy = copy.deepcopy(engine.model)
    engine.weights = [perturbed(policy, seed, 0.1) for seed in (1, 2, 3)]
    samples = []
    for version in (1, 2, 3):
        engine.version = version
        samples += [(sample, version) for sample in engine.group()]
    row = TreeRow()
    for sample, _ in samples:
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
        row.add({name: getattr(sample, name) for name in names})
    batch = DataCollatorForRollout(0, 1)([[row]])
    shared = batch["token_index"][0].tolist()
    assert len(set(shared)) < len(shared), "no position serves two samples"

    trainer = make_trainer(folder, tmp_path, engine, **options)
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    exact = {version: copy.deepcopy(policy).double() for version in (1, 2, 3)}
    for version, model in exact.items():
        model.load_state_dict(engine.weights[version - 1], strict=False)
    policy = policy.double()
    total, acted = reference_loss(policy, exact, samples, region, options)
    expected = total / len(shared) / 2
    expected.backward()
    assert 5 < acted < len(shared) - 5, "the test needs tokens inside and outside of the trust region"
    assert loss.item() == pytest.approx(expected.item(), rel=2e-4, abs=2e-6)
    actual = {name: p.grad for name, p in trainer.model.named_parameters()}
    for name, parameter in policy.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(actual[name].double(), parameter.grad, rtol=1e-3, atol=1e-3 * scale, msg=name)
    counted = trainer._trust_region_metrics.pop()
    acts = {"projection": "projected", "penalty": "penalized", "binary_penalty": "penalized"}.get(region, "masked")
    fraction = counted[f"troll/{acts}_fraction"]
    assert fraction == pytest.approx(acted / len(shared))


@pytest.mark.parametrize("field", ["log_probs", "regression"])
def test_numbers_of_another_shape_than_the_tokens_are_refused(field, folder, tmp_path):
    """Of a trust region of one's own. They broadcast, or were taken for another number of tokens."""

    class Own(TrustRegion):
        def __call__(self, policy, old, advantages):
            given = {"log_probs": policy[..., 0], "regression": policy[..., 0] ** 2}
            return TrustRegionOutput(**given | {field: given[field][:, :1]})

    class WithOwn(AsyncTrollGRPOTrainer):
        def _make_trust_region(self, args):
            return Own()

    engine = Engine(folder, support_size=K)
    with pytest.raises(ValueError, match=rf"`trust_region`: `{field}` of Own has shape \(1, 1\), expected \(1, \d+\)"):
        make_trainer(folder, tmp_path, engine, WithOwn, support_size=K).train()


def test_nan_of_a_trust_region_stops_the_run(folder, tmp_path):
    """Of one's own, in unused slots. The weights would have been NaN after the first update."""

    class Own(TrustRegion):
        def __call__(self, policy, old, advantages):
            return TrustRegionOutput(
                policy[..., 0], (policy.exp() * (policy - old.masked_fill(old < -9, -math.inf))).sum(-1)
            )

    class WithOwn(AsyncTrollGRPOTrainer):
        def _make_trust_region(self, args):
            return Own()

    engine = Engine(folder, support_size=K)
    with pytest.raises(ValueError, match=r"`trust_region`: Own made NaN or infinity of \d+ tokens at step 0"):
        make_trainer(folder, tmp_path, engine, WithOwn, support_size=K).train()


@pytest.mark.parametrize("age", [0, 1, 4])
def test_the_bound_holds_however_old_the_samples(age, folder, tmp_path):
    engine = Engine(folder, age=age, support_size=K)
    trainer = make_trainer(folder, tmp_path, engine, kl_bound=1e-3, support_size=K, max_steps=6)
    trainer.train()
    assert max(logged(trainer, "sample/staleness_max")) == age
    policy_kl = logged(trainer, "troll/policy_kl_max")
    assert policy_kl[0] < 1e-6, "the first samples are the policy's own"
    # With an age of 0 too: the loader takes a batch ahead, after TRL has counted its staleness
    assert max(policy_kl) > 1e-3, "the test needs tokens outside of the bound"
    assert max(logged(trainer, "troll/kl_max")) <= 1e-3 * (1 + 1e-3)
    assert not any(name.startswith("clip_ratio/") for line in trainer.state.log_history for name in line)


@pytest.mark.parametrize("region", ["projection", "binary_tv", "topk_kl"])
def test_rounding_of_the_engine_moves_nothing(region, folder, tmp_path):
    """Equal rewards leave no signal. The engine's numbers are off by 1e-6 here, the mass of the rest with them."""
    engine = Engine(folder, age=2, support_size=support_of(region), reward=lambda ids: 1.0, noise=1e-6)
    options = REGIONS[region] | {"kl_bound": 0.05}
    trainer = make_trainer(folder, tmp_path, engine, **options)
    start = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])] == []


def test_a_distribution_on_the_support_alone_moves_nothing(folder, tmp_path):
    """Without a floor, a rest of mass 0 would be forbidden to the policy, and every token be projected."""
    engine = Engine(folder, support_size=100, reward=lambda ids: 1.0, noise=1e-6)
    trainer = make_trainer(folder, tmp_path, engine, support_size=100, max_steps=3)
    start = weights(trainer)
    trainer.train()
    assert max(logged(trainer, "troll/policy_kl_max")) < 1e-4 and max(logged(trainer, "troll/rest_mass_mean")) < 1e-4
    assert [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])] == []


@pytest.mark.parametrize("support_size", [99, 100])  # of 100 tokens
def test_equal_policies_do_not_diverge_by_the_floor_of_the_rest(support_size, tmp_path):
    """Where the policy's rest is empty, KL(q‖p) from the engine's floor was infinite; far below it, 1e-6·log."""
    model = saved_model(tmp_path / "model", spread=4000.0)  # the least likely tokens have e⁻⁵⁰⁰ and less
    engine = Engine(model, support_size=support_size, reward=lambda ids: 1.0)
    options = REGIONS["topk_kl"] | {"support_size": support_size, "max_steps": 2}
    trainer = make_trainer(model, tmp_path, engine, **options)
    trainer.train()
    assert max(logged(trainer, "troll/divergence_max")) < 2e-5


# -- Two ranks ------------------------------------------------------------------------------------------------------


def saved(output, said):
    """What both ranks have saved."""
    assert (output / "rank1.pt").exists(), said
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def ddp(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("ddp")
    return saved(output, in_two_ranks(main, folder, output, log=output / "log.txt"))


def test_two_ranks_receive_the_engines_numbers_bit_for_bit(ddp):
    for name, weight in ddp[0]["weights"].items():
        assert torch.equal(weight, ddp[1]["weights"][name]), name
    assert ddp[0]["metrics"] == ddp[1]["metrics"] and ddp[0]["metrics"]["troll/projected_fraction"] > 0
    assert ddp[0]["given"] and not ddp[1]["given"], "the main process alone has a worker"
    sampled = {row.tobytes() for old, mask in ddp[0]["given"] for row in old[mask == 1]}
    received = [{row.numpy().tobytes() for batch in rank["received"] for row in batch} for rank in ddp]
    assert len(received[0]) > 50 and len(received[1]) > 50
    assert received[0] <= sampled and received[1] <= sampled


@pytest.mark.slow
def test_fsdp2_trains_as_ddp_does(ddp, folder, tmp_path):
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(FSDP2))
    command = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp2.yaml")]
    command += ["--main_process_port", "0", str(Path(__file__).with_name("async_engine.py")), folder, str(tmp_path)]
    fsdp = saved(tmp_path, launch([command], HANG, ACCELERATE_USE_CPU="true", FORCE_FSDP="1"))
    for name, weight in ddp[0]["weights"].items():
        torch.testing.assert_close(fsdp[0]["weights"][name], weight, rtol=0, atol=1e-5, msg=name)
    assert fsdp[1]["metrics"] == pytest.approx(ddp[1]["metrics"], rel=1e-3)


# -- What is dropped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "bads"),
    [("projection", (math.nan, -9999.0, "advantage")), ("binary_tv", (-math.inf, math.inf, -9999.0))],
)
def test_a_sample_without_all_its_numbers_is_dropped_and_counted(region, bads, folder, tmp_path):
    class Spoiling(Engine):
        def group(self):
            samples = super().group()
            if self.groups % 2 == 0:
                bad = bads[self.groups // 2 % len(bads)]
                if bad == "advantage":
                    samples[2].advantage = math.nan
                else:
                    last = np.flatnonzero(samples[2].completion_mask)[-1]
                    samples[2].old_log_probs[(last, 0) if samples[2].old_log_probs.ndim == 2 else last] = bad
                samples[2].metrics = {"spoilt": 1.0}
            return samples

    engine = Spoiling(folder, support_size=support_of(region))
    trainer = make_trainer(folder, tmp_path, engine, **REGIONS[region])
    trainer.train()
    assert engine.groups // 2 > len(bads) and logged(trainer, "spoilt") == [], "it was trained on"
    assert sum(logged(trainer, "troll/dropped_samples")) in (engine.groups // 2, engine.groups // 2 - 1)
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


def test_a_worker_that_gives_nothing_usable_ends_the_run(folder, tmp_path):
    class Silent(Engine):
        def get(self, timeout=None):
            sample = super().get(timeout)
            self.pending = [sample]  # the same one again, or a thousand would take long
            sample.old_log_probs[:] = math.nan
            return sample

    with pytest.raises(RuntimeError, match=r"1000 samples in a row were dropped.*log-probabilities of \d+ of \d+"):
        make_trainer(folder, tmp_path, Silent(folder), **REGIONS["binary_tv"]).train()


@pytest.mark.parametrize(("carried", "region", "message"), [
    (None, "projection", r"have shape \(\d+,\), expected \(\d+, 12\)\..*5 most likely other tokens.*sample_log_probs"),
    (4, "topk_tv", r"have shape \(\d+, 8\), expected \(\d+, 12\)"),
    (K, "binary_kl", r"have shape \(\d+, 12\), expected \(\d+,\)\. This trust region reads the sampled token alone"),
    (None, "penalty", "or choose a mask or a penalty with a binary `divergence_type`"),
    (K, "binary_penalty", "This trust region reads the sampled token alone"),
])  # fmt: skip
def test_samples_of_a_worker_without_the_support_that_is_needed_are_refused(carried, region, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(folder, tmp_path, Engine(folder, support_size=carried), **REGIONS[region]).train()


@pytest.mark.parametrize(("wrong", "message"), [
    ("sampled", "token twice: the sampled token is among"), ("repeated", "token twice"), ("mass", "mass of"),
])  # fmt: skip
def test_rows_that_are_no_distribution_are_refused(wrong, message, folder, tmp_path):
    """A worker that left the sampled token among the likely ones had 58 % of the tokens projected at equal weights."""

    class Doubling(Engine):
        def group(self):
            samples = super().group()
            for sample in samples:
                for position in np.flatnonzero(sample.completion_mask):
                    row = sample.old_log_probs[position]
                    if wrong == "sampled":
                        row[1], row[K + 1] = row[0], sample.input_ids[position]
                    elif wrong == "repeated":
                        row[2], row[K + 2] = row[1], row[K + 1]
                    else:
                        row[:K] = -0.1
            return samples

    with pytest.raises(ValueError, match=message):
        make_trainer(folder, tmp_path, Doubling(folder, support_size=K), **REGIONS["projection"]).train()


@pytest.mark.parametrize("region", ["projection", "binary_tv"])
def test_a_policy_that_is_not_finite_stops_the_run(region, folder, tmp_path):
    """TRL's trainer goes on, and so would a mask, with weights that are NaN."""
    trainer = make_trainer(folder, tmp_path, Engine(folder, support_size=support_of(region)), **REGIONS[region])
    compute_loss = trainer.compute_loss

    def overflowing(model, *args, **kwargs):
        with torch.no_grad():
            model.get_output_embeddings().weight[5] = math.nan
        return compute_loss(model, *args, **kwargs)

    trainer.compute_loss = overflowing
    with pytest.raises(ValueError, match=r"log-probabilities of \d+ tokens are not finite at step 0"):
        trainer.train()


# -- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"top_p": 0.9}, "`top_p=0.9` is not supported: the engine would sample from another distribution"),
    ({"top_k": 5}, "`top_k=5` is not supported"),
    ({"min_p": 0.1}, "`min_p=0.1` is not supported"),
    ({"repetition_penalty": 1.1}, "`repetition_penalty=1.1` is not supported"),
    ({"kl_bound": 0}, "`kl_bound` must be positive, got 0"),
    ({"kl_bound": "auto"}, "`kl_bound` must be positive, got 'auto'"),
    ({"regression_coef": -1.0}, "`regression_coef` must be at least 0 and finite, got -1.0"),
    ({"support_size": 0}, "`support_size` must be a whole number of at least 1, got 0"),
    ({"trust_region": "clip"}, "`trust_region` must be one of projection, penalty, mask, got 'clip'"),
    ({"trust_region": "mask", "divergence_type": "kl"}, "`divergence_type` must be one of binary_tv"),
    ({"trust_region": "mask", "divergence_bound": 1.5}, r"`divergence_bound` of binary_tv must be in \(0, 1\)"),
    ({"trust_region": "mask", "ratio_cap": 0.5}, "`ratio_cap` must be at least 1 and finite"),
])  # fmt: skip
def test_options_without_meaning_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AsyncTrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_defaults_and_what_is_unused(tmp_path):
    plain = AsyncTrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, top_k=-1, min_p=0.0)
    assert (plain.trust_region, plain.kl_bound, plain.regression_coef, plain.support_size) == (
        "projection",
        0.05,
        1,
        20,
    )
    mask = AsyncTrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, trust_region="mask")
    assert mask.divergence_bound == 0.15 and plain.make_trust_region().needs_support
    assert not mask.make_trust_region().needs_support
    with pytest.warns(UserWarning, match=r"epsilon=0.1 unused by this trust region \(KL bound 0.05\)"):
        AsyncTrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, epsilon=0.1)


def test_trls_config_is_refused(folder, tmp_path):
    with pytest.raises(TypeError, match=r"must be an AsyncTrollGRPOConfig, got trl\.experimental.*AsyncGRPOConfig"):
        make_trainer(folder, tmp_path, Engine(folder), AsyncTrollGRPOTrainer, AsyncGRPOConfig)


def test_nothing_is_imported_that_the_rollouts_alone_need():
    """vLLM, aiohttp and requests may be missing. The first two are, where these tests run."""
    for file in [*ROOT.glob("troll_trl/**/*.py"), *ROOT.glob("math_answers/**/*.py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"vllm", "aiohttp", "requests"}, file
