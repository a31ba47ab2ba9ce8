"""The commands and the code of the pages: each is parsed as its program parses it, and each imported name exists."""

import argparse
import ast
import importlib
import inspect
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from ipaddress import ip_address
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.merge import merge_command_parser
from packaging.requirements import Requirement

from tests.pages.page_texts import PAGES, SCRIPTS, blocks, commands, is_python
from tests.support.repository import ROOT
from tests.support.training_args import parse_training_args
from troll_trl.cli import main, train
from troll_trl.cli.arguments import make_arguments
from troll_trl.cli.command_line import CommandParser
from troll_trl.cli.evaluate import parse_evaluation_args

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CASES = [(page, command) for page in PAGES for command in dict.fromkeys(commands(page))]
PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python", "diff") if is_python(block)]
YAML = [(page, block) for page in PAGES for block in blocks(page, "yaml", "diff") if not is_python(block)]
name_of_page = lambda value: value.name if isinstance(value, Path) else "" if "\n" in value else value


@pytest.mark.parametrize(("page", "command"), CASES, ids=name_of_page)
def test_a_command_is_what_its_program_takes(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for part in command.split(" && "):
        words = shlex.split(part, comments=True)
        while words and re.match(r"\w+=", words[0]):  # a variable of the environment
            words.pop(0)
        if words:
            program = Path(words[0]).name
            if program not in ("git", "cd", "lm_eval"):  # the last one is not installed
                TAKES[program](words[1:], monkeypatch)


class Parsed(BaseException):
    """A script has taken its command line. No script catches it."""


def stop_after_parsing(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *arguments, **options):
        parse(self, *arguments, **options)
        raise Parsed

    for parser in (argparse.ArgumentParser, CommandParser):
        monkeypatch.setattr(parser, "parse_args", parse_and_stop)


def take_troll(words, monkeypatch):
    command, *words = words
    module, function, _ = main.COMMANDS[command]
    if not words and command in ("grpo", "rloo", "eval", "plot"):
        return  # the command's name in a sentence
    if command in ("grpo", "rloo"):
        monkeypatch.setattr(train, "_train_or_stop", lambda options, program: make_arguments(options))
        monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda options: None)
        train.launch([*words, "--use_cpu"], f"troll {command}")
    elif command == "eval":
        parse_evaluation_args(words)
    else:
        stop_after_parsing(monkeypatch)
        with pytest.raises(Parsed):
            getattr(importlib.import_module(module), function)(words, f"troll {command}")


def take_accelerate(words, monkeypatch):
    if words[0] == "merge-weights":
        merge_command_parser().parse_args(words[1:])
        return
    options = launch_command_parser().parse_args(words[1:])
    script = Path(options.training_script)
    if script.name == "train.py" and script.is_file():
        parse_training_args([*options.training_script_args, "--use_cpu"])
    else:  # the reader's own script, which the page shows, or one of examples/
        assert script.name == "train_async.py" or script.stem in SCRIPTS or script.is_file()


def take_python(words, monkeypatch):
    if words[:2] == ["-m", "pytest"]:
        assert all(Path(room).is_dir() for room in words[2:])
        return
    module, words = words[0] == "-m", [word for word in words if word != "-m"]
    path = Path(*words[0].split(".")).with_suffix(".py") if module else Path(words[0])
    assert path.is_file() or path.stem in SCRIPTS
    assert all(Path(word).is_file() for word in words if word.endswith(".yaml"))
    if len(words) > 1:
        stop_after_parsing(monkeypatch)
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "path", [*sys.path, str(path.parent)])
        with pytest.raises(Parsed):
            runpy.run_module(words[0], run_name="__main__") if module else runpy.run_path(words[0], run_name="__main__")


def take_make(words, monkeypatch):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VLLM)", ".venv/vllm")
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert f"$({name})" in makefile if is_variable else re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE)


def take_pip(words, monkeypatch):
    for what in words[1:]:
        assert not what.startswith("troll"), "this package has no name on an index"
        if what.startswith(".["):
            assert Requirement(f"x{what[1:]}").extras <= PROJECT["optional-dependencies"].keys()


def take_sbatch(words, monkeypatch):
    if "--wrap" in words:
        program, *wrapped = shlex.split(words[words.index("--wrap") + 1].removeprefix("exec "))
        TAKES[program](wrapped, monkeypatch)
        return
    assert words[0] == "--nodes" and Path(words[2]).is_file()
    parse_training_args(["--config", *words[3:], "--use_cpu"])


def take_server(words, monkeypatch):
    """Who reaches a server's port can replace the weights. `make test-vllm` starts one with the other flags."""
    address = ip_address(words[words.index("--host") + 1])
    assert address.is_private and not address.is_unspecified


TAKES = {
    "troll": take_troll,
    "accelerate": take_accelerate,
    "python": take_python,
    "make": take_make,
    "pip": take_pip,
    "sbatch": take_sbatch,
    "trl": take_server,
    "vllm": take_server,
}


@pytest.mark.parametrize(("page", "block"), YAML, ids=name_of_page)
def test_a_yaml_block_is_a_config(page, block, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(block, encoding="utf-8")
    parse_training_args(["--config", str(file), "--use_cpu", "--bf16", "false"])


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=name_of_page)
def test_a_python_block_compiles_and_its_names_exist(page, block):
    tree, imported = ast.parse(textwrap.dedent(block)), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module not in SCRIPTS:
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            parameters = inspect.signature(imported[node.func.id]).parameters
            if inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}:
                assert {keyword.arg for keyword in node.keywords if keyword.arg} <= parameters.keys()
