"""Asynchronous GRPO: against TRL's trainer, against an independent loss on unpacked samples, and what it refuses."""

import pytest

pytest.importorskip("troll_trl.experimental.async_grpo", exc_type=ImportError)  # needs the tested TRL

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.packing import TreeRow

from tests.engines.async_engine import Engine, make_trainer
from tests.references import reference_divergence, reference_project
from tests.support.ranks import in_two_ranks
from tests.tiny import saved_model
from tests.trl_comparison import WITHOUT_CLIP, logged, weights
from troll_trl import TrustRegion, TrustRegionOutput
from troll_trl.compat import untested
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig

pytestmark = pytest.mark.skipif(bool(untested("trl")), reason="asynchronous training needs the tested TRL")
REGIONS = {
    "binary_tv": {"divergence_type": "binary_tv", "divergence_bound": 0.01},
    "binary_kl": {"divergence_type": "binary_kl", "divergence_bound": 1e-3, "ratio_cap": 1.05},
    "penalty": {"trust_region": "penalty", "kl_bound": 5e-4, "regression_coef": 0.7},
}
OPEN = {"mask": {"divergence_bound": 1 - 1e-9}, "penalty": {"trust_region": "penalty", "kl_bound": math.inf}}


class SurrogateTwice(TrustRegion):
    """A region whose regression is the surrogate itself."""

    needs_support = False

    def __call__(self, policy, old, advantages):
        return TrustRegionOutput(policy[..., 0], -(policy - old)[..., 0].exp() * advantages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), spread=20.0)


# -- Against TRL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", OPEN)
def test_with_an_open_bound_the_weights_are_trls_without_a_clip(region, folder, tmp_path):
    """On samples two versions old."""
    runs = []
    for classes, extra in (((AsyncGRPOTrainer, AsyncGRPOConfig), WITHOUT_CLIP), ((), OPEN[region])):
        trainer = make_trainer(folder, tmp_path, Engine(folder, age=2), *classes, **extra)
        start = weights(trainer)
        trainer.train()
        runs.append(trainer)
    expected, actual = map(weights, runs)
    assert max((expected[name] - start[name]).abs().max() for name in start) > 1e-3, "TRL's trainer has not moved"
    assert all(torch.equal(expected[name], actual[name]) for name in start)
    assert logged(runs[0], "ratio") == logged(runs[1], "ratio") and max(logged(runs[1], "sample/staleness_max")) == 2
    assert not any(name.startswith("clip_ratio/") for line in runs[1].state.log_history for name in line)


def packed(engine, versions=(1,)):
    """A packed row of one prompt's groups, and its samples, each with the version of the weights it is of."""
    engine.prompts, row, samples = engine.prompts[:1], TreeRow(), []
    for engine.version in versions:
        samples += [(sample, engine.version) for sample in engine.group()]
    for sample, _ in samples:
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
        row.add({name: getattr(sample, name) for name in names})
    return DataCollatorForRollout(0, 1)([[row]]), samples


def perturbed(model, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = lambda p: 0.1 * p.abs().mean() * torch.randn(p.shape, generator=generator)
    return {name: p.detach() + noise(p) for name, p in model.named_parameters()}


def test_the_regression_is_averaged_as_trls_loss(folder, tmp_path, monkeypatch):
    """Over the tokens of several ranks, and over the micro-batches of an update."""
    region, losses = {"trust_region": "tests.engines.test_async_grpo.SurrogateTwice"}, []
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    for classes, extra in (((AsyncGRPOTrainer, AsyncGRPOConfig), WITHOUT_CLIP), ((), region)):
        engine = Engine(folder)
        engine.weights = [perturbed(engine.model, 1)]
        batch, _ = packed(engine)
        batch["global_n_tokens"] = 5 * batch["global_n_tokens"] + 2
        trainer = make_trainer(folder, tmp_path, engine, *classes, **extra)
        trainer.current_gradient_accumulation_steps = 4
        losses.append(trainer.compute_loss(trainer.model, batch))
        losses[-1].backward()
        losses.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(losses[2], 2 * losses[0])
    torch.testing.assert_close(losses[3], 2 * losses[1])
    assert losses[0] != 0


# -- Against an independent computation -----------------------------------------------------------------------------


def reference_loss(model, old_models, samples, region, options):
    """The loss of unpacked samples, a sum over tokens, in float64, and how many tokens the trust region acted on."""
    total, acted = torch.zeros((), dtype=torch.float64), 0
    for sample, version in samples:
        ids, advantage = torch.tensor(sample.input_ids), sample.advantage
        logits = model(ids[None]).logits[0]
        with torch.no_grad():
            old_logits = old_models[version](ids[None]).logits[0]
        for position in np.flatnonzero(sample.completion_mask):
            token = ids[position].item()
            others = [other for other in range(logits.shape[1]) if other != token]
            p, q = (x[position - 1].log_softmax(-1) for x in (logits, old_logits))
            p, q = (torch.stack([x[token], x[others].logsumexp(0)]) for x in (p, q))  # (2,)
            ratio = (p[0] - q[0]).exp()
            if region == "penalty":
                t, pi = reference_project(p.detach().numpy(), q.numpy(), options["kl_bound"])
                active = t < 1
                regression = (p.exp() * (p - torch.as_tensor(pi))).sum() if active else 0.0
                loss = -ratio * advantage + options["regression_coef"] * regression
            else:
                divergence = reference_divergence(region, p.detach().numpy(), q.numpy())
                active = divergence > options["divergence_bound"] and (ratio - 1).item() * advantage > 0
                weight = 0.0 if active else min(1.0, options.get("ratio_cap", math.inf) / ratio.item())
                value = 1.0 if active else ratio.detach()
                loss = -advantage * (value + weight * ratio.detach() * (p[0] - p[0].detach()))
            total, acted = total + loss, acted + active
    return total, acted


@pytest.mark.parametrize("region", REGIONS)
def test_loss_and_gradient_are_those_of_unpacked_samples(region, folder, tmp_path):
    """Samples of three sets of weights, whose old policies differ, share positions of one packed row."""
    engine, versions = Engine(folder), (1, 2, 3)
    policy = copy.deepcopy(engine.model)
    engine.weights = [perturbed(policy, version) for version in versions]
    batch, samples = packed(engine, versions)
    index = batch["token_index"][0].tolist()
    assert len(set(index)) < len(index), "no position serves two samples"
    trainer = make_trainer(folder, tmp_path, engine, **REGIONS[region])
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    policy, old_models = policy.double(), {version: copy.deepcopy(policy).double() for version in versions}
    for version, model in old_models.items():
        model.load_state_dict(engine.weights[version - 1], strict=False)
    total, acted = reference_loss(policy, old_models, samples, region, REGIONS[region])
    expected = total / len(index) / 2
    expected.backward()
    assert 5 < acted < len(index) - 5, "the test needs tokens inside and outside of the trust region"
    assert loss.item() == pytest.approx(expected.item(), rel=2e-4, abs=2e-6)
    for (name, parameter), actual in zip(policy.named_parameters(), trainer.model.parameters(), strict=True):
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(actual.grad.double(), parameter.grad, rtol=1e-3, atol=1e-3 * scale, msg=name)
    fraction = "troll/penalized_fraction" if region == "penalty" else "troll/masked_fraction"
    assert trainer.troll_metrics.pop()[fraction] == pytest.approx(acted / len(index))


@pytest.mark.parametrize(("advantage", "movement"), [(1.0, "none"), (0.0, "none"), (-1.0, "capped")])
def test_a_ratio_that_overflows_makes_no_nan(advantage, movement, folder, tmp_path):
    """Of a masked token, of one without a signal, and of one whose ratio is capped."""
    engine = Engine(folder)
    engine.weights = [perturbed(engine.model, 1)]
    batch, _ = packed(engine)
    batch["old_log_probs"][:] = -95.0
    batch["advantages"][:] = advantage
    trainer = make_trainer(folder, tmp_path, engine, divergence_bound=1e-9, ratio_cap=2.0)
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    gradient = max(p.grad.abs().max().item() for p in trainer.model.parameters())
    assert gradient == 0 if movement == "none" else 0 < gradient < 1e3


# -- Whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", ["binary_tv", "penalty"])
def test_without_a_signal_nothing_moves(region, folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, Engine(folder, reward=lambda ids: 1.0), **REGIONS[region])
    start = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])] == []


def train_as_a_rank(folder, output):
    """Train as one of two ranks, and save the weights and the metrics of an update."""
    engine = Engine(folder, age=1)
    trainer = make_trainer(folder, output, engine, divergence_bound=0.01)
    trainer.train()
    lines = [{name: x for name, x in line.items() if name.startswith("troll/")} for line in trainer.state.log_history]
    torch.save((weights(trainer), lines), output / f"rank{trainer.accelerator.process_index}.pt")


@pytest.mark.slow
def test_two_ranks_train_the_same_weights(folder, tmp_path):
    said = in_two_ranks(train_as_a_rank, folder, tmp_path, log=tmp_path / "log.txt")
    assert (tmp_path / "rank1.pt").exists(), said
    (first, lines), (second, same_lines) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert lines == same_lines and lines[3]["troll/divergence_max"] > 0
    assert first and all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize(
    ("where", "found"), [("policy", "of the policy"), ("old", "of the engine"), ("advantage", "advantages")]
)
def test_a_number_that_is_not_finite_stops_the_run(where, found, folder, tmp_path):
    """TRL's trainer goes on, with weights that are NaN, and logs neither."""
    engine = Engine(folder)
    make_group = engine.group

    def group():
        sample, *others = make_group()
        if where == "advantage":
            sample.advantage = math.nan
        elif where == "old":
            sample.old_log_probs[-1] = -9999.0  # in place of −∞
        return [sample, *others]

    engine.group = group
    trainer = make_trainer(folder, tmp_path, engine)
    if where == "policy":
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight[:, 0] = math.nan
        engine.send_weights = lambda iterator: engine.weights.append({})
    with pytest.raises(ValueError, match=rf"at step 0: \d+ {found}"):
        trainer.train()


# -- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"trust_region": "projection"}, {"trust_region": "penalty", "divergence_type": "topk_kl"}, {"top_p": 0.9},
    {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
])  # fmt: skip
def test_what_the_old_policy_cannot_be_is_refused_by_name(options, tmp_path):
    config = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match="`{}={}`".format(*list(options.items())[-1])):
        AsyncTrollGRPOConfig(**config, **options)
    assert AsyncTrollGRPOConfig(**config).min_p == 0, "vLLM would take it from the model's generation_config.json"


def test_a_server_whose_log_probabilities_ignore_the_temperature_is_refused(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, Engine(folder))
    trainer.rollout_worker = object.__new__(AsyncRolloutWorker)  # TRL's, whose constructor asks for vLLM
    info = {"model_config": {"logprobs_mode": "raw_logprobs", "max_logprobs": 20}}
    trainer.vllm_client = SimpleNamespace(wait_for_server_ready=lambda: None, get_server_info=lambda: info)
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        trainer.train()
