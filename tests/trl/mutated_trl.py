"""TRL, transformers and accelerate as a newer version may have them: classes whose methods are rewritten in memory."""

import functools
import inspect
import re
import textwrap

import torch
from trl import GRPOTrainer, RLOOTrainer
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer

TRAINERS = {GRPOTrainer: (TrollGRPOTrainer, TrollGRPOConfig), RLOOTrainer: (TrollRLOOTrainer, TrollRLOOConfig)}
# In each half of this run a rollout batch is unfinished
OPTIONS = {
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 3,
    "learning_rate": 2e-2,
    "kl_bound": 1e-3,
    "beta": 0.0,
}


def run_of(folder, trainer=GRPOTrainer, **options):
    return make_trainer(*TRAINERS[trainer], folder, **OPTIONS | options)


def assert_equal(first, second):
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=0)


def replace(monkeypatch, owner, changes, only=None):
    """[`rewrite`] with texts in place of patterns."""
    rewrite(monkeypatch, owner, {re.escape(old): new for old, new in changes.items()}, only=only)


def rewrite(monkeypatch, owner, changes, may_be_missing=False, only=None):
    """In the source of a class's methods (of those in `only`), replace patterns by texts, and compile what changed."""
    missing = set(changes)
    for name, value in list(vars(owner).items()):
        function = function_of(value)
        if function is None or (only and name not in only):
            continue
        source = changed = textwrap.dedent(source_of(function))
        for pattern, text in changes.items():
            if re.search(pattern, changed):
                missing.discard(pattern)
                changed = re.sub(pattern, text, changed)
        if changed != source:
            monkeypatch.setattr(owner, name, compiled(changed, function, owner))
    assert may_be_missing or not missing, f"{owner.__name__} contains nowhere {missing}"


def compiled(source, function, owner):
    """A method of the class `owner` from its source, in the module of the `function` that it replaces."""
    name = re.search(r"def (\w+)", source)[1]
    lines = ["from __future__ import annotations", "def make(__class__):", textwrap.indent(source, "    ")]
    scope = {}
    exec("\n".join([*lines, f"    return {name}"]), function.__globals__, scope)
    return scope["make"](owner)


def rename(monkeypatch, owners, *names):
    """Give methods or attributes of the classes `owners` other names wherever they use them."""
    uses = rf"\b(self|super\(\))\.({'|'.join(names)})\b"
    found = set()
    for owner in owners:
        functions = filter(None, map(function_of, vars(owner).values()))
        used = {name for function in functions for _, name in re.findall(uses, source_of(function))}
        if used:
            rewrite(monkeypatch, owner, {uses: r"\1.\2_elsewhere"})
        defined = vars(owner).keys() & {*names}
        for name in defined:
            monkeypatch.setattr(owner, f"{name}_elsewhere", vars(owner)[name], raising=False)
            monkeypatch.delattr(owner, name)
        found |= used | defined
    assert found == {*names}, f"no class has {set(names) - found}"


def score_reference_first(monkeypatch, trainer):
    """Have TRL's `trainer` score the reference before the policy that generated the rollout."""
    first = {
        "GRPOTrainer": " {8}generate_every = ",
        "RLOOTrainer": " {8}# Compute the per-token log probabilities for the current model\n",
    }[trainer.__name__]
    reference = (
        r" {8}# Compute the per-token log probabilities for the reference model\n.*?ref_per_token_logps = None\n"
    )
    rewrite(monkeypatch, trainer, {f"(?s)({first}.*?)({reference})": r"\2\1"})


def lengthen(monkeypatch, name, owners, default):
    """Give the method `name` of the classes `owners` one more argument, and have them call it with 7. Returns the list
    of what it is called with."""
    seen = []
    for owner in owners:
        rewrite(
            monkeypatch, owner, {rf"\bself\.{name}\(": f"__import__('functools').partial(self.{name}, extra=7)("}, True
        )
        if name in vars(owner):
            monkeypatch.setattr(owner, name, longer(vars(owner)[name], default, seen))
    return seen


def longer(method, default, seen):
    @functools.wraps(method)
    def with_one_more(*args, **kwargs):
        seen.append(kwargs.pop("extra", None))
        return method(*args, **kwargs)

    *parameters, last = inspect.signature(method).parameters.values()
    extra = inspect.Parameter("extra", inspect.Parameter.KEYWORD_ONLY, default=default)
    ends = [extra, last] if last.kind is last.VAR_KEYWORD else [last, extra]
    with_one_more.__signature__ = inspect.Signature([*parameters, *ends])
    return with_one_more


source_of = functools.cache(inspect.getsource)  # of all methods of a trainer it takes 0.1 s


def function_of(value):
    """The function that a class has as a method or property, without its decorators; else `None`."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    function = inspect.unwrap(value) if callable(value) else value
    return function if inspect.isfunction(function) else None
