"""The names that other code imports: they exist, the API page lists them, and a package loads none before its use."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import math_answers
import troll_trl

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize("package", [troll_trl, math_answers], ids=lambda package: package.__name__)
def test_every_public_name_exists_and_is_in_the_api_reference(package):
    listed = {line.partition("`]")[0] for line in API.read_text(encoding="utf-8").splitlines()}
    names = [name for name in package.__all__ if name != "__version__"]
    assert all(callable(getattr(package, name)) for name in names) and {*package.__all__} <= {*dir(package)}
    assert [name for name in names if f"- [`{package.__name__}.{name}" not in listed] == []
    assert not hasattr(package, "nothing")


def test_projection_and_sparse_distribution_are_imported_from_the_top():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    policy = troll_trl.sparsify(logits, torch.tensor([3]), support_size=2, tail_mass=0.0)
    assert isinstance(policy, troll_trl.SparseDistribution) and policy.token_ids.tolist() == [[3, 0]]
    old = troll_trl.sparsify(-logits, torch.tensor([3]), support_size=2, tail_mass=0.0)
    projection = troll_trl.project(policy.log_probs, old.log_probs, kl_bound=0.05)
    assert isinstance(projection, troll_trl.Projection) and projection.eta > 0
    assert projection.kl.item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("package", ["troll_trl", "math_answers"])
def test_a_package_loads_neither_torch_nor_trl_before_a_name_needs_them(package):
    code = f"import {package}, sys; assert not {{'torch', 'transformers', 'trl', 'datasets'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=API.parents[1])
