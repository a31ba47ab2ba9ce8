"""The older names of what is now in `math_answers`: `troll_trl.rewards.verifier` is `math_answers.rewards.verifier`."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MOVED = ("context_length", "data", "evaluation", "rewards")


class _Alias(MetaPathFinder, Loader):
    """Imports a module of `math_answers` under its older name. Both names are one module, loaded once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "troll_trl" or rest.partition(".")[0] not in MOVED or find_spec(f"math_answers.{rest}") is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace("troll_trl", "math_answers", 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already. Import has only replaced its `__spec__`, which names its file."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def keep_older_names() -> None:
    """Let the older names be imported. Nothing is loaded before that."""
    # First, because the folder of an aliased package holds modules that would be loaded twice
    sys.meta_path.insert(0, _Alias())
    # Handlers and levels of the older logger serve as before
    logging.getLogger("math_answers").parent = logging.getLogger("troll_trl.evaluation")
