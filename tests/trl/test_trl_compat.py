"""
What the overrides rest on in TRL and transformers: names and parameters, which a run checks as well; what the methods
say, and that no name is missing.

Tests marked `upstream` read the source or bytecode of TRL, transformers and accelerate. They say something new only
of another version: `make test` leaves them out. `make test-trl` runs them, with TRL's main branch every night. The id
of each test of a part begins with its tier. `test_mutated_trl.py` tests what a trainer does when a part has moved.
"""

import ast
import dis
import functools
import inspect
import math
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from repository import ROOT
from tiny import saved_model
from transformers import AutoModelForCausalLM, Trainer
from trl import GRPOTrainer, RLOOTrainer
from trl_comparison import make_trainer

import troll_trl
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers import trl_compat, troll_trainer
from troll_trl.trainers.arithmetic_check import check_arithmetic
from troll_trl.trainers.config import SUPPORTED_LOSS_TYPES

try:
    from troll_trl.experimental.async_grpo import trl_compat as async_compat
except ImportError:  # asynchronous training needs the tested minor version of TRL
    async_compat = None

PACKAGE = Path(troll_trl.__file__).parent
ASYNC = "troll_trl.experimental.async_grpo"
PRIVATE = re.compile(r"_[a-z]\w*")
# Private names of named tuples, os, argparse and math-verify's parser
OTHERS = {"_fields", "_replace", "_exit", "_actions", "_option_string_actions", "_interp"}

# What each method must say for its override to mean what it means
BUFFER = (
    "generation_batch = shuffle_sequence_dict(generation_batch)",
    "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)",
)
GENERATES = ("self._step % generate_every == 0 or self._buffered_inputs is None",)
SCORING = ("model(**model_inputs, labels=labels, fused_lm_head=True)", "outputs.log_probs")
METHOD, RELIABILITY = "method", "reliability"
PHRASES = {
    (METHOD, GRPOTrainer, "_get_per_token_logps_and_entropies"): SCORING,
    (METHOD, GRPOTrainer, "_generate_and_score_completions"): (
        "self.args.gradient_accumulation_steps % generate_every != 0",
        'output["old_per_token_logps"]',
    ),
    (METHOD, GRPOTrainer, "_prepare_inputs"): BUFFER,
    (METHOD, GRPOTrainer, "compute_loss"): ("self._compute_loss(model, inputs)",),
    (METHOD, GRPOTrainer, "_compute_loss"): (
        "self.epsilon_low",
        "self.epsilon_high",
        "self.beta",
        'inputs.get("old_per_token_logps")',
        "self.get_off_policy_mask(",
        'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
    ),
    (METHOD, RLOOTrainer, "_get_per_token_logps_and_entropies"): SCORING,
    (METHOD, RLOOTrainer, "_generate_and_score_completions"): (
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
        "rewards - self.beta * kl",
    ),
    (METHOD, RLOOTrainer, "_prepare_inputs"): BUFFER,
    (METHOD, RLOOTrainer, "_compute_loss"): (
        "self.epsilon_low",
        "self.epsilon_high",
        "logps = (per_token_logps * completion_mask).sum(1)",
        'old_logps = inputs["old_logps"]',
        "loss = per_sequence_loss.mean()",
    ),
    (RELIABILITY, GRPOTrainer, "_prepare_inputs"): GENERATES,
    (RELIABILITY, RLOOTrainer, "_prepare_inputs"): GENERATES,
    (RELIABILITY, GRPOTrainer, "_compute_loss"): ("self._last_world_entropy = world_entropy",),
    # Rewards that are wrapped once are called with keyword arguments, and one that is None is not counted
    (RELIABILITY, GRPOTrainer, "_calculate_rewards"): (
        "zip(self.reward_funcs, self.reward_processing_classes",
        "return rewards_per_func",  # of all ranks, which an evaluation counts
    ),
    (RELIABILITY, GRPOTrainer, "_generate"): (
        "return prompt_ids, completion_ids, tool_mask, ",
        "ids[-1] not in eos_and_pad for ids in completion_ids",
    ),
    (RELIABILITY, RLOOTrainer, "_generate"): ("return prompt_ids, completion_ids, completions",),
    # While it runs, the model's own generation config has special tokens alone
    (RELIABILITY, GRPOTrainer, "_generate_single_turn"): ("generation_config=self.generation_config",),
    (RELIABILITY, RLOOTrainer, "_generate_single_turn"): ("generation_config=self.generation_config",),
    # The guard looks between the clip of the gradient and the optimizer's step
    (RELIABILITY, Trainer, "_run_epoch"): (
        "self.callback_handler.on_pre_optimizer_step(",
        "self.accelerator.optimizer_step_was_skipped",
    ),
    (RELIABILITY, Trainer, "_get_grad_norm"): ('self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))',),
    (RELIABILITY, Trainer, "_save_checkpoint"): ("self._get_output_dir(trial=trial)",),
}


def tiers():
    """Every part that is checked at the start: its tier, its class and its name, and what is expected of it."""
    parts = {METHOD: trl_compat.METHOD, f"{METHOD} (old_policy=engine)": trl_compat.ENGINE}
    parts[f"{METHOD} (running)"] = trl_compat.METHOD_RUNNING
    parts |= {f"{RELIABILITY} ({name})": moved for name, moved in trl_compat.RELIABILITY.items()}
    parts |= {f"{RELIABILITY} ({name}, running)": moved for name, moved in trl_compat.RUNNING.items()}
    return {(tier, owner, name): of[owner][name] for tier, of in parts.items() for owner in of for name in of[owner]}


def attributes_of(owner):
    """The attributes of a class, and those that its methods assign: some exist only while a training runs."""
    functions = [f for base in owner.__mro__ for f in vars(base).values() if inspect.isfunction(f)]
    return set(dir(owner)).union(*(assigned_in(inspect.unwrap(f).__code__) for f in functions))


@functools.cache
def assigned_in(code):
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def ids(part):
    tier, owner, name = part
    return f"{tier}: {owner.__name__}.{name}"


@pytest.mark.upstream
@pytest.mark.parametrize("part", tiers(), ids=ids)
def test_names_and_parameters(part):
    _, owner, name = part
    trl_compat.check_methods(owner, {name: tiers()[part]})
    assert tiers()[part] is not None or name in attributes_of(owner)


@pytest.mark.upstream
@pytest.mark.parametrize("part", PHRASES, ids=ids)
def test_methods_say_what_the_overrides_rest_on(part):
    _, owner, name = part
    source = inspect.getsource(getattr(owner, name))
    for phrase in PHRASES[part]:
        assert phrase in source, f"{owner.__name__}.{name} no longer contains `{phrase}`"


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer, TrollGRPOTrainer, TrollRLOOTrainer])
def test_nothing_is_switched_off_with_the_tested_versions(trainer, caplog):
    assert trl_compat.check_trl(trainer) == frozenset() and not caplog.records


FRESH = """
import trl.trainer.utils as utils
kept = utils.maybe_gather_lm_head_ctx
del utils.maybe_gather_lm_head_ctx
try:
    import troll_trl.trainers.grpo
except ImportError as error:
    print(error)
utils.maybe_gather_lm_head_ctx = kept
from troll_trl import TrollGRPOConfig
TrollGRPOConfig("out", use_cpu=True, bf16=False)
if ASYNC:
    from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig
    AsyncTrollGRPOConfig("out", use_cpu=True, bf16=False)
"""


@pytest.fixture(scope="module")
def fresh_process():
    """What `FRESH` says in a process of its own, which takes seconds to start."""
    code = f"ASYNC = {async_compat is not None}\n{FRESH}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_an_import_that_fails_names_the_versions(fresh_process):
    message = r"^troll_trl does not support trl \d.* 'maybe_gather_lm_head_ctx' .* is tested with trl \d"
    assert re.search(message, fresh_process.stdout), fresh_process


def test_the_tested_versions_are_the_pinned_ones():
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", constraints, re.MULTILINE))
    assert {library: pinned[library] for library in trl_compat.TESTED} == trl_compat.TESTED


WITH_SOURCE = pytest.mark.parametrize("source", [False, pytest.param(True, marks=pytest.mark.upstream)])


@WITH_SOURCE
def test_no_private_name_is_missing(source):
    """`_get_train_sampler`, `_name`, `_paper` and `_tag_names` were."""
    used, strings, defined = set(), set(), set(OTHERS)
    for path in PACKAGE.rglob("*.py"):
        if async_compat is None and path.is_relative_to(PACKAGE / "experimental/async_grpo"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    defined.add(name)
                case ast.ClassDef(body=body):
                    defined |= {ast.unparse(part.targets[0]) for part in body if isinstance(part, ast.Assign)}
                    defined |= {part.target.id for part in body if isinstance(part, ast.AnnAssign) and part.value}
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.Constant(value=str(text)) if path.name != "trl_compat.py":
                    strings.add(text)
    theirs = set().union(*(names_of(base, source) for _, bases in classes() for base in bases))
    found = {name for name in (used - defined) | (strings & theirs) if PRIVATE.fullmatch(name)}
    assert found - listed() == set()


@WITH_SOURCE
def test_no_private_name_of_ours_hides_one_of_theirs(source):
    """The asynchronous trainer's `_evaluate` replaced the Trainer's: a callback that asked for an evaluation ended the
    run with a `TypeError`."""
    for cls, bases in classes():
        ours = set().union(*(names_of(base) for base in cls.__mro__ if base.__module__.startswith("troll_trl.")))
        theirs = set().union(*(names_of(base, source) for base in bases))
        assert ours & theirs - listed() == set(), cls


def test_private_names_are_imported_under_the_check():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(("trl.", "transformers.", "accelerate.")):
                for name in (alias.name for alias in node.names):
                    if node.module == "trl.trainer.utils" and path.name != "trl_compat.py":
                        assert hasattr(trl_compat, name), f"{path} imports {name}"
                    assert not name.startswith("_") or path.name == "trl_compat.py", f"{path} imports {name}"


def listed():
    of_async = async_compat.PARTS.values() if async_compat else ()
    return {name for _, _, name in tiers()} | {name for of in of_async for name in of}


@functools.cache
def classes():
    """Our classes with bases in TRL, transformers or accelerate, and these bases."""
    # `walk_packages` imports the packages: by default it passes over one that raises an `ImportError`
    names = [module.name for module in pkgutil.walk_packages(troll_trl.__path__, "troll_trl.")]
    modules = [import_module(name) for name in names if async_compat or not name.startswith(ASYNC)]
    ours = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    ours = [cls for cls in ours if cls.__module__.startswith("troll_trl.")]
    libraries = ("trl.", "transformers.", "accelerate.")
    found = [(cls, [base for base in cls.__mro__ if base.__module__.startswith(libraries)]) for cls in ours]
    return [(cls, bases) for cls, bases in found if bases]


@functools.cache
def names_of(cls, source=True):
    """Private names that a class has and, by its `source`, those that it gives its instances."""
    assigned = re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(cls)) if source else ()
    return {name for name in (*vars(cls), *assigned) if PRIVATE.fullmatch(name)}


def test_a_method_that_was_written_anew_stops_no_run(monkeypatch):
    def _compute_loss(self, model, inputs):
        return None

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    trl_compat.check_trl(TrollGRPOTrainer)


@pytest.mark.parametrize(("ours", "trls"), [(TrollGRPOTrainer, GRPOTrainer), (TrollRLOOTrainer, RLOOTrainer)])
def test_our_constructors_take_what_trls_take(ours, trls):
    """Names, order, kinds, defaults; types too, but for `args`, which may be a config of ours."""
    expected, actual = inspect.signature(trls.__init__).parameters, inspect.signature(ours.__init__).parameters
    assert list(actual) == list(expected)
    for name, parameter in expected.items():
        assert (actual[name].kind, actual[name].default) == (parameter.kind, parameter.default), name
        if name not in ("self", "args"):
            assert actual[name].annotation == parameter.annotation, name


@pytest.mark.upstream
def test_a_script_with_our_class_shows_no_warning_of_a_name_that_trl_uses(fresh_process):
    """It was shown for every config, and eight times in the training."""
    assert "gradient_checkpointing" not in fresh_process.stderr, fresh_process.stderr


# What acts on the loss next to the copied arithmetic, which must not be taken for it
BESIDES = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "bias_correction": {"use_bias_correction_kl": True},
    "entropy_bonus": {"entropy_coef": 0.05},
    "high_entropy_tokens": {"top_entropy_quantile": 0.5},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4},
    "sequence_ratio": {"importance_sampling_level": "sequence"},
    "truncated": {"mask_truncated_completions": True, "max_completion_length": 48},
    "one_token": {"max_completion_length": 1},
    "mask": {"trust_region": "mask"},
    "penalty": {"trust_region": "penalty"},
    "binary_penalty": {"trust_region": "penalty", "divergence_type": "binary_kl"},
    "other_clip": {"trust_region": "penalty", "epsilon": 0.1, "epsilon_high": 2.5},
    "open_clip": {"trust_region": "penalty", "epsilon": math.inf, "epsilon_high": math.inf},
    "no_clip_below": {"trust_region": "penalty", "epsilon": 1.0},
    "delta": {"trust_region": "penalty", "delta": 4.0},
    "delta_within_the_clip": {"trust_region": "penalty", "delta": 1.05},
    "masked_penalty": {"trust_region": "penalty", "off_policy_mask_threshold": 1e-4, "delta": 2.0},
    "one_completion": {
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
        "off_policy_mask_threshold": 0.1,
    },
}
# Of which no other case, and no training of test_trainer.py or test_penalty.py, has the like
ALONE = ("off_policy_mask", "truncated", "one_token", "mask", "penalty", "masked_penalty", "one_completion")
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALONE)) for name in BESIDES]
BESIDES_RLOO = {
    **{name: BESIDES[name] for name in ("accumulation", "truncated", "one_token", "penalty", "other_clip")},
    "open_above": {"trust_region": "penalty", "divergence_type": "binary_kl", "epsilon_high": math.inf},
    "beta_zero": {"beta": 0.0},
}


@pytest.mark.parametrize("name", CASES, ids=lambda name: f"{METHOD}: loss with {name}")
def test_our_arithmetic_is_that_of_trls_loss(name, tmp_path, monkeypatch):
    """For every loss type, level of the ratio, `beta` and estimate of the reference KL at the first loss of one run. An
    evaluation averages in another way, which depends on the loss type alone."""
    options, checked = ("loss_type", "importance_sampling_level", "beta", "use_bias_correction_kl"), []
    # The check itself runs the loss with the run's `beta`, and with 0
    ways = [("token", 0.1, False), ("token", 0.1, True)] + [("sequence", 0.1, True)] * (name != "mask")
    cases = {
        "train": [("dapo", "token", 0.0, False), *((kind, *way) for kind in SUPPORTED_LOSS_TYPES for way in ways)],
        "eval": [(kind, "token", 0.1, False) for kind in SUPPORTED_LOSS_TYPES],
    }

    def check(run, inputs, mode):
        own = {option: getattr(run.args, option) for option in options}
        for values in cases[mode]:
            set_options(run, **dict(zip(options, values, strict=True)))
            check_arithmetic(run, inputs, mode)
        set_options(run, **own)
        checked.append(mode)

    monkeypatch.setattr(troll_trainer, "check_arithmetic", check)
    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model"))  # its reference is loaded from there
    given = {"beta": 0.1, "eval_strategy": "steps", "eval_on_start": True, "per_device_eval_batch_size": 8}
    given |= {"model": model, "max_steps": 1} | BESIDES[name]
    make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **given).train()
    assert sorted(checked) == ["eval", "train"]


CASES_RLOO = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALONE)) for name in BESIDES_RLOO]


@pytest.mark.parametrize("name", CASES_RLOO, ids=lambda name: f"{METHOD}: RLOO's loss with {name}")
def test_our_arithmetic_is_that_of_trls_rloo_loss(name, tmp_path, monkeypatch):
    checked = []

    def check(*given):
        checked.append(given[-1])
        check_arithmetic(*given)

    monkeypatch.setattr(troll_trainer, "check_arithmetic", check)
    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model"))
    given = {"beta": 0.1, "eval_strategy": "steps", "eval_on_start": True, "per_device_eval_batch_size": 8}
    given |= {"model": model, "max_steps": 1} | BESIDES_RLOO[name]
    make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, **given).train()
    assert sorted(checked) == ["eval", "train"]


def set_options(run, **options):
    for name, value in options.items():
        setattr(run, name, value)  # which TRL's loss reads
        setattr(run.args, name, value)  # and ours
