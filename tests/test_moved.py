"""What moved from troll_trl to math_answers still has its older names: one module, whichever name is imported first."""

import logging
import multiprocessing
import pickle
import pkgutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module, reload
from pathlib import Path

import pytest
from logged import logged

import math_answers
import troll_trl.rewards as older_rewards
from math_answers import math_accuracy_reward
from math_answers.evaluation import arguments
from troll_trl.cli.reward_functions import is_math_accuracy, load_reward_function
from troll_trl.moved import MOVED

MODULES = [module.name for module in pkgutil.walk_packages(math_answers.__path__, "math_answers.")]
# Such as held-out code imports
PINNED = [
    *("context_length", "data", "data.files", "data.loading", "data.prompts", "evaluation", "evaluation.benchmarks"),
    *("evaluation.generation", "evaluation.runner", "evaluation.scoring", "evaluation.statistics", "rewards"),
    *("rewards.answers", "rewards.functions", "rewards.verifier", "rewards.verifier.pool", "rewards.verifier.worker"),
]


def test_every_package_has_an_older_name():
    assert {name.split(".")[1] for name in MODULES} == {*MOVED}
    assert {f"math_answers.{name}" for name in PINNED} < {*MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_an_older_name_is_the_same_module(name):
    older = import_module(name.replace("math_answers", "troll_trl", 1))
    module = import_module(name)
    assert older is module and sys.modules[name] is module
    assert (module.__name__, module.__spec__.name) == (name, name) and module.__spec__.origin == module.__file__


def test_an_older_name_that_is_imported_first_loads_one_module_and_no_torch():
    code = """
import sys
import troll_trl.rewards.verifier.pool as older
from troll_trl.rewards import math_accuracy_reward
import math_answers.rewards.verifier.pool as module
assert older is module and module.__spec__.name == module.__name__ == "math_answers.rewards.verifier.pool"
assert math_accuracy_reward is sys.modules["math_answers"].math_accuracy_reward
assert not {"torch", "transformers", "trl", "datasets", "math_answers.evaluation"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[1])


def test_a_module_that_was_aliased_can_be_loaded_again():
    import_module("troll_trl.evaluation.arguments")
    kept = arguments.EvaluationArguments
    try:
        assert reload(arguments) is arguments and arguments.EvaluationArguments is not kept
    finally:
        arguments.EvaluationArguments = kept


@pytest.mark.parametrize("name", ["troll_trl.rewards.nothing", "troll_trl.data_files", "troll_trl.evaluation.a.b"])
def test_a_module_that_never_was_is_missing_by_the_name_that_was_asked_for(name):
    with pytest.raises(ModuleNotFoundError, match="No module named 'troll_trl"):
        import_module(name)


def test_a_reward_by_its_older_name_goes_through_pickles_and_spawned_processes():
    assert pickle.loads(b"ctroll_trl.rewards.functions\nmath_accuracy_reward\n.") is math_accuracy_reward
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        reward = pool.submit(older_rewards.math_accuracy_reward, [r"\boxed{1,2}", r"\boxed{3}"], ["2, 1", "4"])
        assert reward.result() == [1.0, 0.0]


def test_handlers_of_the_older_logger_get_the_messages():
    with logged("troll_trl.evaluation") as older, logged("math_answers") as newer:
        logging.getLogger("math_answers.evaluation.summary").info("done")
    assert older == newer == ["done"]


@pytest.mark.parametrize(
    "path",
    [
        *("math_accuracy", "math_answers.math_accuracy_reward", "math_answers.rewards.math_accuracy_reward"),
        *("troll_trl.rewards.math_accuracy_reward", "troll_trl.rewards.functions.math_accuracy_reward"),
    ],
)
def test_the_reward_is_known_by_every_path(path):
    """Else its rows would not get gold answers."""
    assert is_math_accuracy(path) and load_reward_function(path) is math_accuracy_reward


@pytest.mark.parametrize(
    "path", ["mine.math_accuracy_reward", "troll_trl.rewards.answer_format_reward", "accuracy_reward"]
)
def test_other_rewards_are_not_taken_for_it(path):
    assert not is_math_accuracy(path)


def test_the_names_of_the_package_exist():
    assert all(callable(getattr(math_answers, name)) for name in math_answers.__all__)
    assert not hasattr(math_answers, "nothing")
