"""
The scripts that the pages give to copy run as they stand, by the pages' launch lines, on a CPU: only the model, the
number of processes, the updates, the engine, and with the model its rate are replaced (`page_script.py`).
`test_commands.py` parses the rest.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from limits import HANG
from real_problems import DATA
from repository import IMPORT_PATH, ROOT
from test_examples import save_chat_model

from math_answers.evaluation.tables import plain, results_table

FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)
LAUNCH = re.compile(r"^((?:\w+=\S+ )*)((?:accelerate launch|python) .*\.py)$", re.MULTILINE)
PAGES = {"eight-gpus": 3, "lora": 1, "rewards": 1}  # launch lines


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def launches(page: str) -> list[str]:
    return [" ".join(found) for found in LAUNCH.findall(text_of(page))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts of all pages, a tiny model and problems."""
    folder = tmp_path_factory.mktemp("pages")
    save_chat_model(folder / "model", layers=2)
    shutil.copy(DATA / "gsm8k" / "train.jsonl", folder / "problems.jsonl")
    rows = (folder / "problems.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    (folder / "problems.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for page in PAGES:
        for code, name in FILE.findall(text_of(page)):
            (folder / name).write_text(code, encoding="utf-8")
    return folder


def run(folder: Path, line: str) -> list[dict]:
    """What each process of a launch line of a page has logged. One with several processes gets two."""
    for old in folder.glob("result-*.json"):
        old.unlink()
    variables, command = {}, shlex.split(line)
    while "=" in command[0]:
        name, _, value = command.pop(0).partition("=")
        variables[name] = value
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = IMPORT_PATH
    script = [str(ROOT / "tests" / "pages" / "page_script.py"), str(folder), command[-1]]
    if command[0] == "accelerate":
        options = launch_command_parser().parse_args(command[2:])
        assert options.multi_gpu and options.num_processes in (4, 8)
        flags = ["2" if word == str(options.num_processes) else word for word in command[2:-1]]
        command = ["-m", "accelerate.commands.launch", *flags, "--main_process_port", "0", *script]
    else:
        command = script
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


def assert_it_trains_as_the_page_says(result: dict, completions: int):
    """Eight updates for a rollout batch. The policy is the old one at the first of them, and moves until the last."""
    assert (result["updates"], result["completions"]) == (8, completions)
    first, *_, last, next_batch = (line["troll/policy_kl_max"] for line in result["log"])
    assert len(result["log"]) == 9 and max(first, next_batch) < 1e-5 < last, [first, last, next_batch]


def test_every_launch_line_is_known():
    assert {page: len(launches(page)) for page in PAGES} == PAGES


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "line"), [("colocate", 0), ("server", 1)])
def test_eight_gpus(folder, mode, line):
    """On any number of processes, a rollout batch has the paper's 2,048 completions."""
    results = run(folder, launches("eight-gpus")[line])
    for result in results:
        assert (result["processes"], result["mode"]) == (2, mode)
        assert result["synced"] == 2 and result["log"][0]["reward"] == pytest.approx(0.5)
    assert_it_trains_as_the_page_says(results[0], 2048)
    assert len(results) == 2 and results[0]["servers"] == ["http://127.0.0.1:8000"] * (mode == "server")


@pytest.mark.slow
def test_lora(folder):
    [result] = run(folder, launches("lora")[0])
    assert (result["processes"], result["mode"]) == (1, "colocate")
    assert result["trained"] and all("lora_" in name for name in result["trained"])
    assert result["log"][0]["reward"] == pytest.approx(0.5)
    assert_it_trains_as_the_page_says(result, 256)


@pytest.mark.slow
def test_own_reward(folder):
    """The reward is of the module in the working folder, and reads the column."""
    [result] = run(folder, launches("rewards")[0])
    assert (result["processes"], result["mode"]) == (1, None)
    rewards = [line["rewards/exact_length/mean"] for line in result["log"] if "rewards/exact_length/mean" in line]
    assert len(rewards) >= 2 and max(rewards) < 0, rewards
    assert_it_trains_as_the_page_says(result, 256)
    assert len((folder / "prompts.jsonl").read_text().splitlines()) == 64


def test_own_reward_by_the_command(folder, monkeypatch):
    """The command of the page finds the function in the working folder, and takes the column."""
    from troll_trl.cli.reward_functions import load_reward_function

    command = re.search(r"^troll grpo .*?my_rewards.*?[^\\]$", text_of("rewards"), re.MULTILINE | re.DOTALL)[0]
    words = shlex.split(command.replace("\\\n", " "))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    reward = load_reward_function(words[words.index("--reward_funcs") + 1])
    chats = [[{"role": "assistant", "content": "one two three"}], [{"role": "assistant", "content": ""}]]
    assert reward(completions=chats, words=[3, 4], prompts=None) == [0, -1]


def test_the_output_of_math500_has_the_columns_of_the_page():
    """Its numbers are left open: the page shows the shape."""
    section = text_of("evaluation").partition("## MATH-500")[2].partition("\n## ")[0]
    [shown] = re.findall(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    metric = {"value": 0.333, "low": 0.222, "high": 0.444}
    benchmark = {"benchmark": "math500", "problems": 500, "n": [1, 1], "metrics": {"mean": metric}, "tokens": 444}
    benchmark |= dict.fromkeys(("truncated", "no_answer", "timed_out"), 0.011)
    printed = plain(*results_table([benchmark]))
    for number, written in (("33.3", "xx.x"), ("22.2", "xx.x"), ("44.4", "xx.x"), ("1.1", "x.x"), (" 444", " xxx")):
        printed = printed.replace(number, written)
    assert [line.split() for line in printed.splitlines()] == [line.split() for line in shown.splitlines()]
