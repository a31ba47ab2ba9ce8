"""A trust region of one's own, by its import path: what it is given, and what is refused by name."""

import math
import os
import re
import sys

import pytest
import torch

from tests.tiny import certain_model
from tests.trl_comparison import logged, make_trainer, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer, TrustRegion
from troll_trl import TrustRegionOutput as Output

OWN_REGIONS = """
from troll_trl import TrustRegion, TrustRegionOutput
class Fading(TrustRegion):
    needs_support = False
    def __init__(self, config):
        self.bound = config.divergence_bound
    def __call__(self, policy, old, advantages):
        log_ratio = policy[..., 0] - old[..., 0]
        return TrustRegionOutput(policy[..., 0], log_ratio**2, weight=(1 - log_ratio.abs() / self.bound).clamp(min=0))
    def describe(self):
        return f"own, within {self.bound}"
class WithDefault(TrustRegion):
    def __init__(self, bound=0.3):
        self.bound = bound
    def __call__(self, *given, **named): ...
def make(config):
    return Fading(config)
made = WithDefault(0.4)
calls = []
def once(config):
    calls.append(config.divergence_bound)
    return Fading(config)
class Broken(TrustRegion):
    def __init__(self, config):
        raise ValueError("bound of the wrong sign")
def nothing(): ...
class Uncalled(TrustRegion): ...
class CalledWithOne(TrustRegion):
    def __call__(self, policy): ...
class BadRatio(Fading):
    mean_metrics = {"troll/moved": "moved"}
"""


@pytest.fixture
def own_regions(tmp_path, monkeypatch):
    """A module in the working directory, which no path of the interpreter names."""
    (tmp_path / "own_mask_regions.py").write_text(OWN_REGIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    yield
    sys.modules.pop("own_mask_regions", None)


def config(tmp_path, **options):
    return TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.usefixtures("own_regions")
def test_a_region_with_weight_and_regression_trains_by_its_import_path(tmp_path, capsys):
    options = {"trust_region": "own_mask_regions.Fading", "divergence_bound": 0.2, "max_steps": 3}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, certain_model(), **options)
    start = weights(trainer)
    trainer.train()
    assert "own, within 0.2" in capsys.readouterr().out
    assert any((weight != start[name]).any() for name, weight in weights(trainer).items())
    rloo = make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, certain_model(), beta=0.0, **options)
    with pytest.raises(ValueError, match="Fading gives a `weight`"):
        rloo.train()


@pytest.mark.usefixtures("own_regions")
@pytest.mark.parametrize(("name", "number"), [("Fading", 0.2), ("make", 0.2), ("WithDefault", 0.3), ("made", 0.4)])
def test_an_import_path_names_a_class_a_function_or_a_trust_region(name, number, tmp_path):
    made = config(tmp_path, trust_region=f"own_mask_regions.{name}", divergence_bound=0.2)
    assert made.region.bound == number


@pytest.mark.usefixtures("own_regions")
def test_a_region_is_made_once_for_the_options_that_its_trainer_has(tmp_path):
    """It was made two or three times. A bound that a script sets later must not be lost."""
    options = {"trust_region": "own_mask_regions.once", "divergence_bound": 0.2}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    assert sys.modules["own_mask_regions"].calls == [0.2] and trainer.trust_region.bound == 0.2
    made = config(tmp_path, kl_bound=0.1)
    made.kl_bound = 0.3
    assert made.region.kl_bound == 0.3
    assert "region" in vars(made) and "region" not in made.__getstate__(), "a user's own may not be picklable"


@pytest.mark.usefixtures("own_regions")
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("own_mask_regions.Missing", "has no attribute 'Missing'"),
        ("no_such_module_at_all.Region", "No module named 'no_such_module_at_all'"),
        ("own_mask_regions.Broken", "bound of the wrong sign"),
        ("own_mask_regions.nothing", "it makes None"),
        ("own_mask_regions.Uncalled", "Uncalled has no `__call__(self, policy, old, advantages)`"),
        ("own_mask_regions.CalledWithOne", "too many positional arguments"),
        ("own_mask_regions.BadRatio", "`mean_metrics['troll/moved']` must be a pair"),
        (None, "needs a dotted import path"),
    ],
)
def test_a_wrong_import_path_is_refused_with_the_reason(path, named, tmp_path):
    with pytest.raises(ValueError, match=rf"`trust_region` .*{re.escape(repr(path))}.*{re.escape(named)}"):
        config(tmp_path, trust_region=path)


def with_own(make, tmp_path, **options):
    """Return a trainer whose trust region is what `make` gives for policy and old policy."""

    class Own(TrustRegion):
        def __call__(self, policy, old, advantages):
            return make(policy, old)

    globals()["own_region"] = Own()
    options = {"model": certain_model(), "learning_rate": 2e-2, "trust_region": f"{__name__}.own_region", **options}
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)


@pytest.mark.parametrize(("make", "error", "named"), [
    (lambda p, q: p[..., 0], TypeError, "Own returned Tensor"),
    (lambda p, q: Output(p[..., 0], p[:, :1, 0] ** 2), ValueError, "`regression` of Own has shape .*expected .8, 8."),
    (lambda p, q: Output(p[..., 0], p.sum()), ValueError, "`regression` of Own has shape"),
    (lambda p, q: Output(p[0, :, 0]), ValueError, "`log_probs` of Own has shape"),
    (lambda p, q: Output(p[..., 0], weight=p[:, :1, 0]), ValueError, "`weight` of Own has shape"),
    (lambda p, q: Output(p[..., 0], token_stats={"moved": p.sum()}), ValueError, "`moved` of Own has shape"),
    (lambda p, q: Output(p[..., 0].detach()), ValueError, "`log_probs` of Own has no gradient"),
    (lambda p, q: Output(p[..., 0], 0 * q[..., 0]), ValueError, "`regression` of Own has no gradient"),
])  # fmt: skip
def test_what_a_trust_region_returns_wrongly_is_named(make, error, named, tmp_path):
    """Another shape broadcasts in the loss, and without a gradient nothing trains."""
    with pytest.raises(error, match=rf"`trust_region`: {named}"):
        with_own(make, tmp_path).train()


def test_nan_at_masked_positions_has_no_effect(tmp_path):
    """There a kept token is −∞ in both policies, and a difference of the two is NaN."""
    seen = []

    def own(policy, old):
        distance = (policy.exp() * (policy - old)).sum(-1)
        seen.append(distance.isnan().any().item())
        return Output(policy[..., 0], distance, weight=1 + distance.detach())

    def without_nan(policy, old):
        output = own(*(x.masked_fill((policy[..., :1] == -math.inf), -1.0) for x in (policy, old)))
        return Output(policy[..., 0], output.regression, weight=output.weight)

    runs = []
    for make in (own, without_nan):
        options = {"tail_mass": 0.0, "support_size": 10, "max_steps": 3, "max_completion_length": 32}
        options |= {"optim": "sgd", "learning_rate": 1.0}  # Adam would make steps of a gradient that is mere rounding
        runs.append(with_own(make, tmp_path, model=None, **options))  # some completions end before
        runs[-1].train()
    assert any(seen) and all(math.isfinite(loss) for loss in logged(runs[0], "loss"))
    for name, weight in weights(runs[0]).items():
        torch.testing.assert_close(weight, weights(runs[1])[name], rtol=0, atol=1e-5)
