"""
The commands and the code of the pages: each is parsed as its program would parse it, and each name of a Python block
exists. Nothing trains here. The scripts of examples/, the quickstart and the notebook are run by tests of their own.
"""

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
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from repository import ROOT
from training_args import parse_training_args
from transformers import TrainingArguments

from math_answers.evaluation.arguments import EvaluationArguments
from troll_trl.cli import configs, environment, main, plot, quickstart, train
from troll_trl.cli.arguments import make_arguments, training_parser
from troll_trl.cli.command_line import read_config
from troll_trl.cli.evaluate import parse_evaluation_args

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [ROOT / name / "README.md" for name in ("configs", "evidence")]
PAGES += [path for path in sorted((ROOT / "evidence").glob("*.md")) if path not in PAGES]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
OWN = re.compile(r"^# (\w+)\.py$", re.MULTILINE)  # the first line of a script that a page gives to save
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = r"(?:\w+=\S* )*(?:troll|python|make|accelerate launch(?=.*\.py)|pip install|trl vllm-serve|vllm serve"
PROGRAMS += "|sbatch)"
# Words in a sentence that stand for something of the reader's
PLACEHOLDER = re.compile(r"\b(?:any_field|[A-Z]{4,})\b|…")
OTHER_FLAGS = {
    "host",
    "logprobs-mode",
    "max-logprobs",
    "tensor_parallel_size",
    "group",
    "warm_up",
    "help",
}  # of vllm, `troll plot`, `troll quickstart` and all


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [block for language, block in FENCE.findall(text) if language in languages] if page.suffix == ".md" else []


def spans(page: Path) -> list[str]:
    """What is set as code within sentences and tables."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))) if page.suffix == ".md" else []


def commands(page: Path) -> list[str]:
    """The complete commands of a page, or of the head of a script."""
    if page.suffix == ".py":
        head = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or ""
        lines = head.replace("\\\n", " ").splitlines()
        found = [re.match(rf"(?:Run:|Needs:.*: )?\s*({PROGRAMS} .*?[\w'/}}])`?\.?$", line) for line in lines]
        return [match[1] for match in found if match]
    shell = "\n".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
    inline = [span for span in spans(page) if re.match(rf"{PROGRAMS} \S", span) and not PLACEHOLDER.search(span)]
    return [line for line in shell + inline if line.strip()]


# What the pages give to save, by the name of its module
OWN_SCRIPTS = {OWN.match(block)[1]: block for page in PAGES for block in blocks(page, "python") if OWN.match(block)}
CASES = [(page, command) for page in PAGES for command in dict.fromkeys(commands(page))]


def test_commands_were_found():
    programs = {re.match(r"\S+", re.sub(r"^(\w+=\S* )+", "", command))[0] for _, command in CASES}
    assert programs >= {"troll", "make", "pip", "accelerate", "python", "git", "sbatch", "trl", "vllm"}


@pytest.mark.filterwarnings("error:.*it was measured for 8 to 32")  # the page forgot the number of GPUs
@pytest.mark.parametrize(("page", "command"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_command_is_what_its_program_takes(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    while words:
        one, words = (words[: words.index("&&")], words[words.index("&&") + 1 :]) if "&&" in words else (words, [])
        while re.match(r"\w+=", one[0]):  # a variable of the environment
            one = one[1:]
        program = Path(one[0]).name
        assert program in TAKES, f"Say in this file how to check the program {program}"
        TAKES[program](one[1:], monkeypatch)


# -- How each program is checked --------------------------------------------------------------------------------------


class Parsed(BaseException):
    """A script has taken its command line. No script catches it."""


def take_troll(words, monkeypatch):
    command, words = words[0], words[1:]
    assert command in main.COMMANDS
    if words in ([], ["--method", "clip"]) and command in ("grpo", "rloo", "eval", "plot"):
        return  # the command's name in a sentence
    if words == ["--help"]:
        with pytest.raises(SystemExit, match=r"^0$"):
            train.launch(words, f"troll {command}")
    elif command in ("grpo", "rloo"):
        take_training(words, f"troll {command}", monkeypatch)
    elif command == "eval":
        parse_evaluation_args(words)
    else:
        modules = {"plot": plot, "quickstart": quickstart, "configs": configs, "env": environment}
        stop_after_parsing(monkeypatch)
        with pytest.raises(Parsed):
            modules[command].main(words)


def take_training(words, program, monkeypatch):
    """What `troll grpo` hands to its launcher and to its processes, which a CPU takes as if it were a GPU."""
    started = []
    monkeypatch.setattr(train, "_train_or_stop", lambda options, program: started.append((1, options)))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda options: started.append(launched(options)))
    train.launch([*words, "--use_cpu"], program)
    [(processes, options)] = started
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    make_arguments(options if isinstance(options, dict) else train.read_options(options, program))


def launched(options) -> tuple[int, list[str]]:
    file = options.config_file and load_config_from_file(options.config_file)
    return options.num_processes or (file.num_processes if file else 1), options.training_script_args


def take_accelerate(words, monkeypatch):
    options = launch_command_parser().parse_args(words[1:])
    processes, flags = launched(options)
    script = options.training_script
    if script == "scripts/train.py":
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
        parse_training_args([*flags, "--use_cpu"])
    else:  # the reader's own script, which the page shows, or one of examples/
        assert script == "train_async.py" or Path(script).stem in OWN_SCRIPTS or Path(script).is_file()


def take_python(words, monkeypatch):
    stop_after_parsing(monkeypatch)
    module = words[0] == "-m"
    path = Path(*words[1].split(".")).with_suffix(".py") if module else Path(words[0])
    if path.stem in OWN_SCRIPTS and len(words) == 1:
        return
    assert path.is_file()
    if "parse_args" not in path.read_text(encoding="utf-8") and path.parts[0] in ("docs", "examples"):
        assert len(words) == 1
        return
    monkeypatch.setattr(sys, "argv", words[module:])
    monkeypatch.setattr(sys, "path", [*sys.path, str(path.parent)])
    for file in re.findall(r"\S+\.yaml", " ".join(words)):
        assert read_config(file)
    with pytest.raises(Parsed):
        runpy.run_module(words[1], run_name="__main__") if module else runpy.run_path(words[0], run_name="__main__")


def stop_after_parsing(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *arguments, **options):
        parse(self, *arguments, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def take_make(words, monkeypatch):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VLLM)", ".venv/vllm")
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = f"$({name})" in makefile if is_variable else re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE)
        assert known


def take_pip(words, monkeypatch):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--no-deps", "--quiet"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-c", type=lambda file: Path(file).resolve(strict=True))
    parser.add_argument("what", nargs="+")
    assert words[0] == "install"
    for what in parser.parse_args(words[1:]).what:
        here = re.fullmatch(r"\.(\[.*\])?", what)
        wanted = Requirement(f"{PROJECT['name']}{here[1] or ''}" if here else what)
        if wanted.name == PROJECT["name"]:
            assert wanted.extras <= PROJECT["optional-dependencies"].keys()
            assert here or wanted.url == f"git+{PROJECT['urls']['Repository']}"


def take_git(words, monkeypatch):
    assert words == ["clone", PROJECT["urls"]["Repository"]]


def take_cd(words, monkeypatch):
    assert words == [Path(PROJECT["urls"]["Repository"]).name]


def take_sbatch(words, monkeypatch):
    assert words[0] == "--nodes" and Path(words[2]).is_file()
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 8 * (int(words[1]) - 1)))
    parse_training_args(["--config", *words[3:], "--use_cpu"])


def take_trl(words, monkeypatch):
    vllm_serve = importlib.import_module("trl.scripts.vllm_serve")
    assert words[0] == "vllm-serve"
    options = vllm_serve.make_parser().parse_args_and_config(words[1:], return_remaining_strings=True)
    known = {"--dtype"}  # those that TRL hands on to vLLM
    assert {word for word in options[-1] if word.startswith("--")} <= known


def take_what_is_not_installed(words, monkeypatch):
    """vLLM and lm-evaluation-harness. `make test-vllm` starts a server with the flags of the pages."""


TAKES = {
    "troll": take_troll,
    "accelerate": take_accelerate,
    "python": take_python,
    "make": take_make,
    "pip": take_pip,
    "git": take_git,
    "cd": take_cd,
    "sbatch": take_sbatch,
    "trl": take_trl,
    "vllm": take_what_is_not_installed,
    "lm_eval": take_what_is_not_installed,
}


# -- Flags in sentences, YAML and Python ------------------------------------------------------------------------------


def test_flags_in_sentences_exist():
    known = set(OTHER_FLAGS)
    for settings in ("grpo", "rloo"):
        parser = training_parser(settings, "x")
        known |= parser.hints.keys() | parser.only_launcher
    known |= {field.name for field in fields(EvaluationArguments)} | {"config"}
    named = {
        (page.name, flag)
        for page in PAGES
        for span in spans(page)
        if not span.startswith(("pip", "python"))
        for flag in re.findall(r"(?:^|\s)--([\w-]+)", PLACEHOLDER.sub("", span))
    }
    assert named and [(page, flag) for page, flag in sorted(named) if flag not in known] == []


def new_side(diff: str) -> str:
    return "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))


def is_python(block: str) -> bool:
    return re.search(r"^\s*(from|import) ", block, re.MULTILINE) is not None


PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python")]
PYTHON += [(page, new_side(block)) for page in PAGES for block in blocks(page, "diff") if is_python(new_side(block))]
YAML = [(page, block) for page in PAGES for block in blocks(page, "yaml")]
YAML += [(page, new_side(block)) for page in PAGES for block in blocks(page, "diff") if not is_python(new_side(block))]


@pytest.mark.parametrize(("page", "block"), YAML, ids=lambda value: getattr(value, "name", ""))
def test_a_yaml_block_is_a_config(page, block, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(block, encoding="utf-8")
    assert yaml.safe_load(block)
    parse_training_args(["--config", str(file), "--use_cpu", "--bf16", "false"])


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda value: getattr(value, "name", ""))
def test_a_python_block_compiles_and_its_names_exist(page, block):
    tree = ast.parse(textwrap.dedent(block))
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in OWN_SCRIPTS:
            assert all(f"def {alias.name}(" in OWN_SCRIPTS[node.module] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            parameters = inspect.signature(imported[node.func.id]).parameters
            if inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}:
                assert {keyword.arg for keyword in node.keywords if keyword.arg} - parameters.keys() == set()


def test_blocks_were_found():
    assert PYTHON and YAML
    languages = {language for page in PAGES if page.suffix == ".md" for language, _ in FENCE.findall(page.read_text())}
    assert languages <= {"", "bash", "sh", "python", "yaml", "diff", "text", "bibtex"}
