"""What the package needs of TRL: a version that lacks it is refused by name, and one that was not tested is named."""

import ast
import functools
import inspect
import re
import runpy
import sys
from dataclasses import fields
from importlib import import_module
from pkgutil import resolve_name
from types import FunctionType, SimpleNamespace

import pytest
import trl
from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.base_trainer import _BaseTrainer

from tests.support.repository import ROOT
from tests.tiny import saved_model, tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from tests.trl_comparison import make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer, compat
from troll_trl.cli import check, train
from troll_trl.compat import KNOWN_OPTIONS, PRIVATE, Attributes, Code, refuse_missing
from troll_trl.resilience.guard import _ENTROPY_CONTROL
from troll_trl.trainers.engine_policy import EnginePolicy

# Every name in the data, once for each of our classes that needs it
NEEDED = [
    (key, entry, name)
    for key, entries in PRIVATE.items()
    for entry in entries
    for name in [*entry.names.split(), *([] if isinstance(entry, Attributes | Code) else [""])]
]


def without(code, name):
    """`code`, in which `name` is now `renamed`: as a string, a keyword of a call, an attribute or a global."""

    def other(constant):
        if isinstance(constant, tuple):
            return tuple(other(item) for item in constant)
        return "renamed" if isinstance(constant, str) and constant == name else constant

    return code.replace(co_consts=other(code.co_consts), co_names=other(code.co_names))


def rename(monkeypatch, entry, name):
    """Make a fake of the function at the entry's path that lacks `name`. Without a name, the function is gone."""
    owner = resolve_name(entry.path.rpartition(".")[0])
    attribute = entry.path.rpartition(".")[2]
    original = getattr(owner, attribute)
    if not name:
        owner = (
            next(cls for cls in inspect.getmro(owner) if attribute in vars(cls)) if inspect.isclass(owner) else owner
        )
        monkeypatch.delattr(owner, attribute)
    elif isinstance(entry, Code):
        plain = inspect.unwrap(original)
        monkeypatch.setattr(
            owner, attribute, FunctionType(without(plain.__code__, name), plain.__globals__, closure=plain.__closure__)
        )
    else:
        fake = functools.wraps(original)(lambda *args, **kwargs: None)
        signature = inspect.signature(original)
        left = [value for key, value in signature.parameters.items() if key != name]
        fake.__signature__ = signature.replace(parameters=left)
        monkeypatch.setattr(owner, attribute, fake)


@pytest.mark.parametrize(("key", "entry", "name"), NEEDED)
def test_any_one_name_that_is_gone_is_named(key, entry, name, monkeypatch):
    """A method, an argument of one, a column, a keyword or an attribute, under a name that we do not know."""
    if isinstance(entry, Attributes):
        others = {other: 0 for e in PRIVATE[key] if isinstance(e, Attributes) for other in e.names.split()}
        refuse_missing([key], SimpleNamespace(**others))
        del others[name]
        with pytest.raises(ImportError, match=rf"needs SimpleNamespace\.{name}, which is not in"):
            refuse_missing([key], SimpleNamespace(**others))
        return
    refuse_missing([key])
    rename(monkeypatch, entry, name)
    with pytest.raises(ImportError, match=rf"needs .*{re.escape(entry.path)}.* not in .*Install '") as error:
        refuse_missing([key])
    assert name in str(error.value)


TRAINERS = {
    TrollGRPOTrainer: (TrollGRPOConfig, {"TrollGRPOTrainer", "TrustRegionGRPO"}),
    TrollRLOOTrainer: (TrollRLOOConfig, {"TrustRegionRLOO"}),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_checks_the_entries_of_all_its_classes(trainer, tmp_path, monkeypatch):
    config, own = TRAINERS[trainer]
    for key in own | {"TrollTrainer", "GuardedTrainer", "CheckpointedTrainer"}:
        with monkeypatch.context() as patch, pytest.raises(ImportError, match="gone"):
            patch.setitem(PRIVATE, key, (Code("trl.RLOOTrainer._compute_loss", "gone"),))
            compat.check_class(trainer)
        with monkeypatch.context() as patch, pytest.raises(ImportError, match="gone"):
            patch.setitem(PRIVATE, key, (Attributes("gone"),))
            make_trainer(trainer, config, tmp_path, tiny_model(), beta=0.0)


def make_async_trainer():
    module = pytest.importorskip("troll_trl.experimental.async_grpo", exc_type=ImportError)
    args = module.AsyncTrollGRPOConfig("folder", use_cpu=True, bf16=False)
    module.AsyncTrollGRPOTrainer("model", args=args)


OTHERS = {
    "EnginePolicy": lambda: EnginePolicy(None, None, 1, None),
    "AsyncTrollGRPOTrainer": make_async_trainer,
    "check": check.print_versions,
    "launch": lambda: train._launch(None, [], [], "troll grpo"),
}


def test_every_key_of_the_list_is_of_a_trainer_or_of_what_the_next_test_calls():
    of_trainers = {cls.__name__ for trainer in TRAINERS for cls in trainer.__mro__}
    assert PRIVATE.keys() - of_trainers == OTHERS.keys()


@pytest.mark.parametrize("key", OTHERS)
def test_what_is_no_such_trainer_checks_its_entries(key, monkeypatch):
    monkeypatch.setitem(PRIVATE, key, (*PRIVATE[key], Code("trl.RLOOTrainer._compute_loss", "gone")))
    with pytest.raises(ImportError, match="gone"):
        OTHERS[key]()


def test_an_argument_that_we_do_not_pass_is_named(monkeypatch):
    """Only of what we call: an overridden method gets it from TRL."""
    fake = lambda self, trial, folder: ""
    monkeypatch.setattr(Trainer, "_get_output_dir", fake)
    with pytest.raises(ImportError, match=r"_get_output_dir \(missing a required argument: 'folder'\)"):
        refuse_missing(["CheckpointedTrainer"])
    monkeypatch.undo()
    generate = GRPOTrainer._generate
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts, folder: generate(self, prompts))
    refuse_missing(["TrustRegionGRPO"])


def test_a_users_patch_without_functools_wraps_is_named_and_trains(tmp_path, monkeypatch, caplog):
    """It says nothing about TRL's version, but its code names nothing of TRL's, and the trainer did not start."""
    generate = GRPOTrainer._generate_and_score_completions
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: generate(self, inputs))
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=1)
    assert caplog.text.count(f"{__name__} has replaced trl.GRPOTrainer._generate_and_score_completions") == 1
    trainer.train()


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_a_new_option_is_named_unless_it_has_its_default(algorithm, tmp_path, monkeypatch, caplog):
    """It may change the loss, which gets the bounded policy."""
    ours = {"GRPO": (TrollGRPOTrainer, TrollGRPOConfig), "RLOO": (TrollRLOOTrainer, TrollRLOOConfig)}[algorithm]
    name = f"{algorithm}Config"
    model = saved_model(tmp_path / "model")
    assert KNOWN_OPTIONS[name] >= {"beta", "reward_weights"}
    monkeypatch.setitem(KNOWN_OPTIONS, name, KNOWN_OPTIONS[name] - {"beta", "reward_weights"})
    with caplog.at_level("WARNING"):
        make_trainer(*ours, tmp_path, model, beta=0.5)
    assert caplog.text.count("does not know these options of TRL: beta=0.5. If") == 1 and "weights=" not in caplog.text
    caplog.clear()
    monkeypatch.undo()
    make_trainer(*ours, tmp_path, model, beta=0.5)
    assert "does not know" not in caplog.text


def test_the_options_are_those_of_the_tested_version():
    if not compat.untested("trl", "transformers"):
        for config in (trl.GRPOConfig, trl.RLOOConfig):
            names = {field.name for field in fields(config)} - {field.name for field in fields(TrainingArguments)}
            assert KNOWN_OPTIONS[config.__name__] == names


def test_a_version_that_was_not_tested_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    monkeypatch.setattr(compat, "TESTED", {"trl": ["1.9", "1.16"]})
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    assert "not tested with trl 1.99.0. Install 'trl==1.16.*', or run `troll check`" in caplog.text
    monkeypatch.setattr(trl, "__version__", "1.9.1")
    assert compat.untested("trl") == {}


def test_an_untested_version_is_named_without_a_config(tmp_path, monkeypatch, caplog):
    """accelerate's logger needs the state that a config makes: the warning ended in a `RuntimeError`."""

    class WithoutConfig(TrollGRPOTrainer):
        _config_class = staticmethod(lambda folder: TrollGRPOConfig(folder, use_cpu=True, bf16=False))

    monkeypatch.setattr(trl, "__version__", "1.99.0")
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.chdir(tmp_path)
    WithoutConfig(tiny_model(), token_reward, train_dataset=tiny_prompts(), processing_class=tiny_tokenizer())
    assert "not tested with trl 1.99.0" in caplog.text


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

        more = functools.wraps(trl)(lambda *args, **kwargs: (*trl(*args, **kwargs), name))
        monkeypatch.setattr(GRPOTrainer, name, more)
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


def test_the_columns_are_complete():
    """Those that the trainers and the guard read or write in a rollout batch."""
    files = [*(ROOT / "troll_trl" / "trainers").glob("*.py"), ROOT / "troll_trl" / "resilience" / "guard.py"]
    named = r"""\b(?:inputs|batch|output)(?:\[|\.get\()"(\w+)\""""
    used = {column for file in files for column in re.findall(named, file.read_text())}
    assert used >= {"completion_ids", "advantages", "tool_mask"}
    listed = {entry.path: entry.names.split() for key in PRIVATE for entry in PRIVATE[key] if isinstance(entry, Code)}
    clip = {"epsilon_low", "epsilon_high"}  # that we set: a loss that reads another clips in silence
    assert used - {"old_logps"} | clip | {"get_off_policy_mask"} <= {*listed["trl.GRPOTrainer._compute_loss"]}
    assert {"completion_ids", "completion_mask", "advantages", "old_logps"} | clip <= {
        *listed["trl.RLOOTrainer._compute_loss"]
    }


def test_the_list_of_private_names_is_complete():
    """It has every private name that our code shares with TRL's trainers and what they are built from, every import
    from one of TRL's own modules, and what is read of its `VLLMGeneration`."""
    theirs: set[str] = set()
    for owner in (GRPOTrainer, RLOOTrainer, _BaseTrainer, Trainer, AcceleratedOptimizer, VLLMGeneration):
        functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in vars(owner).values()]
        theirs |= {*vars(owner), *(name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names)}
    package = ROOT / "troll_trl"
    used = set(re.findall(r"\bgeneration\.([a-z_]+)", (package / "trainers" / "engine_policy.py").read_text()))
    assert len(used) == 6
    used |= {*_ENTROPY_CONTROL}
    for path in package.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        methods = [part for node in nodes if isinstance(node, ast.ClassDef) for part in node.body]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.name for node in methods if isinstance(node, ast.FunctionDef)}
        used |= {name for name in names & theirs if re.match("_[a-z]", name)}
        imports = [
            node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl.")
        ]
        used |= {alias.name for node in imports for alias in node.names}
    assert len(used) > 25
    listed = {
        name
        for entries in PRIVATE.values()
        for entry in entries
        for field in entry
        for name in re.split(r"[. ]", field)
    }
    assert sorted(used - listed) == []
