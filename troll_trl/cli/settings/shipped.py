"""The configs that come with the package: in the wheel next to its code, in a checkout at its top level."""

import difflib
from pathlib import Path

import troll_trl

_PACKAGE = Path(troll_trl.__file__).parent


def configs_folder() -> Path:
    """The folder of the configs. A wheel holds a copy of the checkout's folder (see `pyproject.toml`)."""
    shipped = _PACKAGE / "configs"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """The names of the configs to train or evaluate with, such as `qwen3-0.6b/gsm8k`; not their parts."""
    folder = configs_folder()
    names = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(name.as_posix() for name in names if name.parts[0] not in ("base", "accelerate"))


def find_config(name: str | Path) -> Path:
    """The file that `--config` names: a path, or the name of a config that comes with the package; either without
    `.yaml`, too. If there is neither, the `ValueError` names the nearest."""
    for folder in (Path(), configs_folder()):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file():
                return path
    near = difflib.get_close_matches(str(name).removesuffix(".yaml").removeprefix("configs/"), config_names(), n=1)
    hint = f" The nearest is {near[0]}." if near else ""
    raise ValueError(f"There is no file {name}, and no config of that name (`troll configs` lists them).{hint}")
