"""`make check-gpu` (`benchmarks/check_gpu.py`): no failure of a part stops the next one; all of it in tiny sizes."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from limits import HANG

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import check_gpu  # noqa: E402
import common  # noqa: E402
from check_gpu import Part  # noqa: E402


def python(name, code, limit=HANG, **others):
    return Part(name, f"tries {name}", [sys.executable, "-c", code, "{results}"], limit, **others)


# As `common.add_to`, without the import of torch
ROW = "import json, sys; from pathlib import Path; file = Path(sys.argv[1]); "
ROW += "content = json.loads(file.read_text()) if file.exists() else {{}}; "
ROW += "content['{name}'] = {{'environment': {{'device': 'H100'}}, 'rows': [{{'x': {x}}}]}}; "
ROW += "file.write_text(json.dumps(content))"
CHILD = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
)
CHILD += "print(child.pid, flush=True); time.sleep(600)"
PARTS = [
    python("raises", "print('so far'); raise ValueError('too many warps')"),
    python("hangs", CHILD, limit=3),
    Part("missing", "tries missing", ["/no/such/program"], HANG),
    python("without", "", needs="no_such_package"),
    python("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    python("interrupted", ROW.format(name="interrupted", x=1) + "; raise SystemExit(7)"),
    python("works", ROW.format(name="works", x=2)),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    predictions = [{"what": f"x of {name}", "part": name, "column": "x", "to": 1} for name in ("interrupted", "works")]
    records = check_gpu.run_all(PARTS, folder, predictions)
    content = json.loads((folder / "check-gpu.json").read_text())
    assert content["check_gpu"] == records
    return folder, content, {record["name"]: record for record in records}


def test_a_part_that_fails_is_reported_and_the_next_one_runs(ended):
    _, content, records = ended
    states = {name: record["state"] for name, record in records.items()}
    assert list(states) == [part.name for part in PARTS]
    assert states["raises"] == "failed with exit code 1" and "too many warps" in records["raises"]["messages"]
    assert records["raises"]["output"] == "so far"
    assert states["hangs"] == "stopped at its limit of 3 s"
    assert states["missing"].startswith("failed: ") and "/no/such/program" in states["missing"]
    assert states["without"] == "left out: no_such_package is not installed"
    assert states["killed"] == "failed with exit code -9" and states["interrupted"] == "failed with exit code 7"
    assert states["works"] == "done" and content["works"]["rows"] == [{"x": 2}]
    assert content["interrupted"]["rows"] == [{"x": 1}], "what it had measured is kept"


def test_the_page_has_every_end_with_its_messages_and_the_verdicts(ended):
    folder, _, records = ended
    page = (folder / "check-gpu.md").read_text()
    for name, record in records.items():
        assert f"| {name} | tries {name} | {record['state']} |" in page
    assert "ValueError: too many warps" in page
    assert "| x of interrupted | – | 1 | 1 | as predicted |" in page
    assert "| x of works | – | 1 | 2 | **refuted** |" in page


def test_what_a_stopped_part_has_started_ends_with_it(ended):
    child = Path("/proc", ended[2]["hangs"]["output"], "stat")
    until = time.monotonic() + HANG
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.1)


def test_another_run_replaces_the_parts_that_it_repeats_and_keeps_the_others(tmp_path):
    one, two = (python("a", ROW.format(name="a", x=1)), python("b", ROW.format(name="b", x=1)))
    check_gpu.run_all([one, two], tmp_path, [])
    check_gpu.run_all([python("a", "raise SystemExit(2)")], tmp_path, [])
    content = json.loads((tmp_path / "check-gpu.json").read_text())
    assert {record["name"]: record["state"] for record in content["check_gpu"]} == {
        "b": "done",
        "a": "failed with exit code 2",
    }
    assert "a" not in content and content["b"]["rows"] == [{"x": 1}], "no earlier number beside a failure"


KERNELS = {"_a_x": (3e-4, 1), "_a_y": (2e-4, 1)}  # seconds, launches


def prediction_row(value, **row):
    return {"part": {"rows": [{"y": value, **row}], "environment": {"device": "NVIDIA H100"}}}


@pytest.mark.parametrize(
    ("prediction", "content", "expected"),
    [
        ({"column": "y", "from": 1}, prediction_row(1), "as predicted"),
        ({"column": "y", "from": 1}, prediction_row(0.99), "**refuted**"),
        ({"column": "y", "to": 1}, prediction_row(1.01), "**refuted**"),
        ({"column": "y", "to": 1}, prediction_row(None), "not measured"),
        ({"column": "y", "to": 1, "row": {"pass": "b"}}, prediction_row(5, **{"pass": "a"}), "not measured"),
        ({"column": "y", "to": 1}, {}, "not measured"),
        ({"column": "y", "to": 1, "only": "H200"}, prediction_row(5), "is for H200"),
        ({"column": "y", "from": 1}, {"part": {"rows": [{"y": 2}, {"y": 0}]}}, "**refuted**"),
        # Milliseconds of the kernels of ours with such a name: 0.5 here
        ({"kernels": "_a_", "to": 0.4}, prediction_row(0, kernels={"ours": KERNELS}), "**refuted**"),
        ({"kernels": "_a_x", "to": 0.4}, prediction_row(0, kernels={"ours": KERNELS}), "as predicted"),
        ({"kernels": "_b_", "to": 0.4}, prediction_row(0, kernels={"ours": {}}), "not measured"),
    ],
)  # fmt: skip
def test_a_prediction_is_refuted_by_any_number_outside_of_its_range(prediction, content, expected):
    prediction = {"what": "y", "part": "part", **prediction}
    values = check_gpu.measured(prediction, content)
    device = content.get("part", {}).get("environment", {}).get("device", "")
    assert check_gpu.verdict(prediction, values, device) == expected


def test_the_first_parts_take_ten_minutes_at_most_and_are_those_of_a_try():
    parts, tiny = check_gpu.parts_of("cuda", False), check_gpu.parts_of("cpu", True)
    kind = lambda part: re.sub(r"\d+x\d+", "", part.name)
    order = ["tests", "head", "step-", "step-", "warps", "engine", "step-engine"]
    assert [kind(part) for part in parts[: len(tiny)]] == [kind(part) for part in tiny] == order
    assert sum(part.limit for part in parts[: len(tiny)]) <= 600
    assert len({part.name for part in parts}) == len(parts)


def test_the_parts_for_a_lent_gpu_exist_and_fit_its_commands():
    page = (BENCHMARKS.parent / "evidence" / "lent-gpu.md").read_text()
    commands = [(one or two).split() for one, two in re.findall(r'make check-gpu PARTS=(?:"(.*?)"|(\S+))', page)]
    parts = {part.name: part for part in check_gpu.parts_of("cuda", False)}
    limits = [sum(parts[name].limit for name in names) for names in commands]
    assert limits == [8 * 60 + 40, 3 * 60 + 20]  # as the page says
    first = [name for name, part in parts.items() if name != "engine" and part.limit <= 150]
    assert commands[0] == first, "all of the ten minutes, except what needs vLLM"


def test_every_prediction_is_about_a_part_and_says_what_would_refute_it():
    names = {part.name for part in check_gpu.parts_of("cuda", False)}
    for prediction in yaml.safe_load(check_gpu.PREDICTIONS.read_text()):
        assert prediction["part"] in names and {"from", "to"} & prediction.keys()
        assert ("column" in prediction) != ("kernels" in prediction)
        assert prediction.keys() <= {"what", "part", "row", "column", "kernels", "from", "to", "only"}


def test_rows_of_one_key_replace_each_other_in_the_file(tmp_path, capsys):
    args = common.parser("").parse_args(["--device", "cpu", "--results", str(tmp_path / "r.json"), "--name", "n"])
    report = common.Report("step", args, {"a": "", "b": ""}, key=("a",))
    for a, b in ((1, 1), (2, 1), (1, 2)):
        report.add(a=a, b=b)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["n"]["rows"] == [{"a": 2, "b": 1}, {"a": 1, "b": 2}]
    assert capsys.readouterr().out.count("| 1 |") == 3, "every row is printed"


@pytest.mark.slow
def test_all_of_it_runs_in_the_sizes_of_a_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "check_gpu.py"), "--device", "cpu", "--output", str(tmp_path)]
    command += ["--limits", "9"]  # a limit of a part is for a GPU; no speed of this machine is tested
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads((tmp_path / "check-gpu.json").read_text())
    states = {record["name"]: record["state"] for record in content["check_gpu"]}
    assert all(state == "done" for name, state in states.items() if name != "engine")
    assert content["tests"]["rows"] == [{"passed": 1, "failed": 0}]
    assert {row["trust region"] for row in content["step-4x24"]["rows"]} == {"projection", "mask"}
    assert content["step-4x24"]["options"]["completions"] == 4 and content["step-1x16"]["options"]["completions"] == 1
    warps = content["warps"]["rows"]
    assert {row["pass"] for row in warps} == {"scoring", "training", "projection"}
    assert any(row["kernel"] == "all" for row in warps) and all(row["difference"] == 0 for row in warps)
    assert {"tests", "head", "step-4x24", "step-1x16", "warps", "step-engine"} <= content.keys()
    # Every prediction finds its rows, except the numbers that only a GPU gives
    names = {"step-4x4096": "step-4x24", "step-1x2048": "step-1x16"}
    for prediction in yaml.safe_load(check_gpu.PREDICTIONS.read_text()):
        part, column = names.get(prediction["part"], prediction["part"]), prediction.get("column")
        if part not in content or column in (None, "device/trl", "to default"):
            continue  # vLLM, what follows the ten minutes, and the profiler
        assert check_gpu.measured(prediction | {"part": part}, content), prediction["what"]
