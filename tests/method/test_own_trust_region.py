"""A trust region of one's own, by its import path: what it is given, and what is refused by name."""

import math
import os
import re
import sys

import pytest
import torch
from repository import ROOT
from tiny import certain_model, tiny_model
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrustRegion, TrustRegionOutput


def config(tmp_path, **options):
    return TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


OWN_REGIONS = """
from troll_trl import TrustRegion
class OfConfig(TrustRegion):
    def __init__(self, config):
        self.bound = config.divergence_bound
    def __call__(self, policy, old, advantages): ...
    def describe(self):
        return f"own, within {self.bound}"
class WithDefault(TrustRegion):
    def __init__(self, bound=0.3):
        self.bound = bound
    def __call__(self, *given, **named): ...
def make(config):
    return OfConfig(config)
made = WithDefault(0.4)
class Broken(TrustRegion):
    def __init__(self, config):
        raise ValueError("bound of the wrong sign")
class Two(TrustRegion):
    def __init__(self, config, other): ...
def nothing(): ...
class Uncalled(TrustRegion): ...
class CalledWithOne(TrustRegion):
    def __call__(self, policy): ...
class BadRatio(OfConfig):
    ratios = {"troll/moved": "moved"}
class Clipped(OfConfig):
    clips = True
class Undescribed(OfConfig):
    def describe(self):
        return 1 / 0
"""


@pytest.fixture
def own_regions(tmp_path, monkeypatch):
    """A module in the working directory, which no path of the interpreter names."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from troll_trl import TrustRegionOutput, .*?)```", page, re.DOTALL)
    (tmp_path / "own_mask_regions.py").write_text(example + OWN_REGIONS)
    (tmp_path / "own_module_with_a_typo.py").write_text("bound = bonud")
    (tmp_path / "own_script.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    yield
    for name in ("own_mask_regions", "own_module_with_a_typo"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own_regions")
def test_the_example_of_the_design_trains_by_its_import_path(tmp_path, capsys):
    options = {"trust_region": "own_mask_regions.FadingMask", "max_steps": 3, "learning_rate": 2e-2}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, certain_model(), **options)
    start = weights(trainer)
    trainer.train()
    assert "FadingMask." in capsys.readouterr().out
    assert any((weight != start[name]).any() for name, weight in weights(trainer).items())


@pytest.mark.usefixtures("own_regions")
@pytest.mark.parametrize(
    ("name", "number"),
    [("OfConfig", 0.2), ("make", 0.2), ("WithDefault", 0.3), ("made", 0.4)],
)
def test_an_import_path_names_a_class_a_function_or_a_trust_region(name, number, tmp_path):
    made = config(tmp_path, trust_region=f"own_mask_regions.{name}", divergence_bound=0.2)
    assert made.make_trust_region().bound == number


@pytest.mark.usefixtures("own_regions")
@pytest.mark.parametrize(("name", "warned"), [("Clipped", False), ("OfConfig", True)])
def test_a_clip_range_is_unused_unless_the_trust_region_clips(name, warned, tmp_path, recwarn):
    """It was called unused although the trust region keeps TRL's clip."""
    made = config(tmp_path, trust_region=f"own_mask_regions.{name}", epsilon=0.1, epsilon_high=0.3)
    assert any("epsilon=0.1, epsilon_high=0.3 unused" in str(warning.message) for warning in recwarn) is warned
    assert made.make_trust_region().clips is not warned


@pytest.mark.usefixtures("own_regions")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_mask_regions.Missing", "has no attribute 'Missing'"),
        ("no_such_module_at_all.Region", "No module named 'no_such_module_at_all'"),
        ("own_mask_regions.Broken", "bound of the wrong sign"),
        ("own_mask_regions.Two", "missing 1 required positional argument"),
        ("own_mask_regions.nothing", "which makes None. It must make a troll_trl.TrustRegion"),
        ("own_module_with_a_typo.Region", "NameError: name 'bonud' is not defined"),
        ("own_mask_regions.Uncalled", "Uncalled has no `__call__(self, policy, old, advantages)`"),
        ("own_mask_regions.CalledWithOne", "too many positional arguments"),
        ("own_script.Region", "SystemExit: 0"),
        ("own_mask_regions.BadRatio", "`ratios['troll/moved']` must be a pair of names in `token_stats`, got 'moved'"),
        ("own_mask_regions.Undescribed", "ZeroDivisionError: division by zero"),
        ("own_mask_regions.", "gives no trust region"),
        (None, "needs a dotted import path"),
    ],
)
def test_a_wrong_import_path_is_refused_with_the_reason(path, said, tmp_path):
    with pytest.raises(ValueError, match=rf"`trust_region` .*{re.escape(repr(path))}.*{re.escape(said)}"):
        config(tmp_path, trust_region=path)


class Own(TrustRegion):
    """Gives what `make` says of policy and old policy."""

    maxima = {"troll/moved_max": "moved"}

    def __init__(self, make):
        self.make = make

    def __call__(self, policy, old, advantages):
        log_probs, regression, moved = self.make(policy, old)
        return TrustRegionOutput(log_probs, regression, {} if moved is None else {"moved": moved})


def plain(policy, old):
    return policy[..., 0], None, (policy[..., 0] - old[..., 0]).detach().abs()


def with_own(make, tmp_path, **options):
    class WithOwn(TrollGRPOTrainer):
        def _make_trust_region(self, args):
            return Own(make)

    options = {"model": certain_model(), "learning_rate": 2e-2, **options}
    return make_trainer(WithOwn, TrollGRPOConfig, tmp_path, **options)


SHAPES = {
    "one for a completion": lambda x: x[:, :1],
    "one for a position": lambda x: x[0],
    "a scalar": lambda x: x.sum(),
}


@pytest.mark.parametrize(
    ("field", "shape"),
    [*(("regression", shape) for shape in SHAPES), ("log_probs", "one for a completion"), ("moved", "a scalar")],
)
def test_numbers_of_another_shape_than_the_tokens_are_refused(shape, field, tmp_path):
    """They broadcast: a regression `(B, 1)` had a loss of 114 for 14."""

    def make(policy, old):
        given = {"log_probs": policy[..., 0], "regression": policy[..., 0] ** 2, "moved": policy[..., 0].detach()}
        return {**given, field: SHAPES[shape](given[field])}.values()

    said = "token_stats['moved']" if field == "moved" else field
    expected = rf"`trust_region`: `{re.escape(said)}` of Own has shape .*expected \(8, \d+\): one number for each"
    with pytest.raises(ValueError, match=expected):
        with_own(make, tmp_path).train()


@pytest.mark.parametrize(("make", "error", "said"), [
    (lambda p, q: (p[..., 0], 0.5, p[..., 0].detach()), TypeError, "`regression` of Own is float, expected a tensor"),
    (lambda p, q: (None, None, p[..., 0].detach()), TypeError, "`log_probs` of Own is NoneType, expected a tensor"),
    (lambda p, q: (p[..., 0], None, None), ValueError, "`token_stats` of Own lacks 'moved'"),
    (lambda p, q: (p[..., 0].detach(), None, p[..., 0].detach()), ValueError, "`log_probs` of Own has no gradient"),
    (lambda p, q: (p[..., 0], 0 * q[..., 0], p[..., 0].detach()), ValueError, "`regression` of Own .* or give None"),
    (lambda p, q: (p[..., 0].bfloat16(), None, p[..., 0].detach()), TypeError, "`log_probs` of Own is torch.bfloat16"),
    (lambda p, q: (p[..., 0], p[..., 0] < 0, p[..., 0].detach()), TypeError, "`regression` of Own is torch.bool"),
    (lambda p, q: (p[..., 0], None, q.sub_(1.0)[..., 0]), ValueError, "Own wrote into `old`, .*`old.clone"),
])  # fmt: skip
def test_what_a_trust_region_leaves_out_is_named(make, error, said, tmp_path):
    with pytest.raises(error, match=rf"`trust_region`: {said}"):
        with_own(make, tmp_path).train()


def test_float64_serves(tmp_path):
    def make(policy, old):
        return policy[..., 0].double(), None, plain(policy, old)[2]

    trainer = with_own(make, tmp_path, max_steps=1)
    start = weights(trainer)
    trainer.train()
    assert any((weight != start[name]).any() for name, weight in weights(trainer).items())


def test_an_error_inside_of_a_trust_region_names_the_option(tmp_path):
    with pytest.raises(KeyError) as raised:
        with_own(lambda policy, old: {}["mine"], tmp_path).train()
    assert raised.value.__notes__ == ["`trust_region`: Own raised this."]


def distance(policy, old):
    """Of each token, over kept tokens and rest; NaN where both policies are −∞, as in unused slots."""
    return (policy.exp() * (policy - old)).sum(-1)


def test_a_regression_that_is_nan_at_masked_positions_trains_as_one_that_is_0_there(tmp_path):
    """There a kept token has −∞ in both policies. Every update was skipped, and the run ended."""
    seen = []

    def own(policy, old):
        seen.append(distance(policy, old).isnan().any().item())
        return policy[..., 0], distance(policy, old), plain(policy, old)[2]

    def without_nan(policy, old):
        masked = (policy[..., 0] == -math.inf).unsqueeze(-1)
        values = distance(policy.masked_fill(masked, -1.0), old.masked_fill(masked, -1.0))
        return policy[..., 0], values, plain(policy, old)[2]

    runs = []
    for name, make in (("nan", own), ("zero", without_nan), ("none", plain)):
        options = {"tail_mass": 0.0, "support_size": 10, "max_steps": 3}  # no unused slot
        options |= {"model": tiny_model(), "max_completion_length": 32}  # some completions end before
        runs.append(with_own(make, tmp_path / name, **options))
        runs[-1].train()
    assert any(seen) and logged(runs[0], "troll/skipped_updates") == [0, 0, 0]
    moved = [weights(run) for run in runs]
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])
    assert not all(torch.equal(moved[0][name], moved[2][name]) for name in moved[0]), "the regression has an effect"


@pytest.mark.parametrize("field", ["log_probs", "regression"])
def test_nan_at_a_live_token_is_the_trust_regions(field, tmp_path):
    """The run ended with advice about rewards."""

    def make(policy, old):
        values = {"log_probs": policy[..., 0], "regression": policy[..., 0] ** 2}
        values[field] = torch.where(policy[..., 0] < 0, torch.nan, values[field])
        return *values.values(), plain(policy, old)[2]

    with pytest.raises(
        FloatingPointError, match=r"Not finite: .*trust_region.*of your own must return finite"
    ) as error:
        with_own(make, tmp_path, max_skipped_updates=2).train()
    assert "reward" not in str(error.value)
