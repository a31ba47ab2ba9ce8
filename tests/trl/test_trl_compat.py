"""What the package needs of TRL: a version that lacks it is refused by name, and one that was not tested is named."""

import re
import runpy
import sys
from importlib import import_module

import pytest
import trl
from trl import GRPOTrainer

from tests.support.repository import ROOT
from tests.tiny import saved_model
from tests.trl_comparison import make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def test_a_missing_private_name_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(ImportError, match=r"GRPOTrainer\._get_per_token_logps_and_entropies"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)


def test_a_version_that_was_not_tested_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    assert "not tested with trl 1.99.0. Install 'trl==1.16.*', or run `troll check`" in caplog.text


def test_more_results_of_trls_methods_are_passed_on(tmp_path, monkeypatch):
    """As a TRL after 1.16 may have them: three scores were unpacked, and a fourth ended the run."""
    passed = []

    class Newer(TrollGRPOTrainer):
        """Unpacks as many results as TRL 1.16 does."""

    def add_a_result(name, trl):
        def unpacked(self, *args, **kwargs):
            *results, more = getattr(super(Newer, self), name)(*args, **kwargs)
            passed.append(more)
            return tuple(results)

        monkeypatch.setattr(GRPOTrainer, name, lambda *args, **kwargs: (*trl(*args, **kwargs), name))
        setattr(Newer, name, unpacked)

    for name in ("_generate", "_get_per_token_logps_and_entropies"):
        add_a_result(name, getattr(GRPOTrainer, name))
    model = saved_model(tmp_path / "model")
    make_trainer(Newer, TrollGRPOConfig, tmp_path, model, beta=0.1, max_steps=2).train()
    # Once each: old policy, reference, and two losses
    assert passed == ["_generate", *4 * ["_get_per_token_logps_and_entropies"]]


def test_the_asynchronous_package_says_which_trl_it_needs(monkeypatch):
    """TRL 1.18 has no submodules of `trl.experimental.async_grpo`: this was a bare `ModuleNotFoundError`."""
    for name in [name for name in sys.modules if name.startswith("troll_trl.experimental.async_grpo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.async_rollout_worker", None)
    with pytest.raises(ImportError, match=r"async_rollout_worker .*Install 'trl==1\.16\.\*'"):
        import_module("troll_trl.experimental.async_grpo")
    for name in ("test_async_grpo", "test_vllm_async"):
        with pytest.raises(pytest.skip.Exception, match="Install 'trl=="):
            runpy.run_path(str(ROOT / "tests" / "engines" / f"{name}.py"))


def test_the_list_of_private_names_is_complete():
    """It has every import from one of TRL's own modules, and what is read of its `VLLMGeneration`."""
    package = ROOT / "troll_trl"
    engine, listed = ((package / "trainers" / name).read_text() for name in ("engine_policy.py", "trl_compat.py"))
    used = set(re.findall(r"\bgeneration\.([a-z_]+)", engine))
    for path in package.rglob("*.py"):
        for module, names in re.findall(r"(?m)^ *from (trl\.[\w.]+) import ([\w, ]+)$", path.read_text()):
            used |= {f"{module}.{name}" for name in names.split(", ")}
    assert len(used) > 10
    assert [name for name in sorted(used) if f"`{name}`" not in listed] == []
