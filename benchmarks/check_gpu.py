"""What whoever has a GPU for ten minutes runs first: `make check-gpu`, or with a Python that has torch and TRL

    python benchmarks/check_gpu.py

It needs no network, no account and no `make install`. The first parts take at most ten minutes, in the order in which a
cut loses least. All other benchmarks follow. Each part is a process with a time limit. If one fails, the next one runs.

    outputs/check-gpu/check-gpu.md      to send back: how each part ended, predictions, and the tables of all parts
    outputs/check-gpu/check-gpu.json    to send back: every measured number

Both are written while the parts run, and keep the parts of earlier runs (`--parts`). `predictions.yaml` has what we
expect. Without a GPU the parts run with tiny sizes, which tries the script and measures nothing.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions.yaml"
TAIL = 3000  # characters of a failed part's messages
MOST_OUTPUT = 20_000  # characters of a part's output
INTERVAL = 2.0  # seconds between two writes of the page


@dataclass(frozen=True)
class Part:
    """A process: `command` in the root of the repository, for at most `limit` seconds. `{results}` in the command is
    the file of results. Without the package `needs` the part is left out."""

    name: str
    what: str
    command: Sequence[str]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


def benchmark(name: str, what: str, limit: float, script: str, *flags: object, **others: Any) -> Part:
    """A part that is one of the scripts next to this one, with its rows in the file of results."""
    command = [sys.executable, str(HERE / f"{script}.py"), *map(str, flags)]
    return Part(name, what, [*command, "--results", "{results}", "--name", name], limit, **others)


def parts_of(device: str, tiny: bool) -> list[Part]:
    """Ten minutes, then everything else of `make bench`; `tiny` sizes for a try."""
    run, step = ("--device", device), ("--shape", "small" if tiny else "qwen3-0.6b")
    pair = ("--trust_region", "projection", "mask")
    head = ("--vocabulary", 151_936, "--tokens", 4096, "--support", 64)
    if tiny:
        step += ("--vocabulary", 512, "--repeats", 1)
        head = ("--vocabulary", 512, "--tokens", 16, "--support", 16, "--repeats", 1)
    long, short = (24, 16) if tiny else (4096, 2048)
    warps = ("--vocabulary", 300, "--tokens", 8, "--hidden", 16, "--support", 4) if tiny else ()
    interpreted = {"TRITON_INTERPRET": "1"} if tiny else {}
    ten_minutes = [
        Part("tests", "the kernels' tests", tests_command(tiny), 100, interpreted),
        benchmark("head", "the LM head, ours and TRL's", 50, "head", *run, *head),
        benchmark(
            f"step-4x{long}", "whole steps", 150, "step", *run, *step, *pair, "--completion", long, "--completions", 4
        ),
        benchmark(
            f"step-1x{short}", "whole steps", 80, "step", *run, *step, *pair, "--completion", short, "--completions", 1
        ),
        benchmark("warps", "other warps and rows", 80, "warps", *run, *warps, environment=interpreted),
        benchmark("engine", "vLLM's log-probabilities", 80, "engine_policy", *run, needs="vllm"),
        benchmark(
            "step-engine", "a step with `old_policy: engine`", 60, "step",
            *run, *step, "--completion", short, "--completions", 2, "--old_policy", "engine",
        ),
    ]  # fmt: skip
    if tiny:
        return ten_minutes
    penalties = ("--trust_region", "binary-penalty", "penalty", "--completion", long, "--completions", 4)
    return [
        *ten_minutes,
        benchmark("step-penalty", "whole steps with the penalty", 200, "step", *run, *step, *penalties),
        Part("counts", "counts, which need no GPU", [sys.executable, str(HERE / "counts.py")], 600),
        *(benchmark(f"all-{name}", f"all of {name}.py", 900, name, *run) for name in ("head", "projection", "step")),
        benchmark("all-scaling", "all of scaling.py", 900, "scaling", *run),
    ]


def tests_command(tiny: bool) -> list[str]:
    # Without the project's options, which a Python without pytest-timeout refuses
    command = [sys.executable, "-m", "pytest", "tests/kernels/test_kernels.py", "-o", "addopts=", "-q"]
    if tiny:
        return [*command, "-k", "interpreter and state_starts"]
    parallel = ["-n", str(min(os.cpu_count() or 1, 8))] if find_spec("xdist") else []
    return [*command, "-m", "gpu", *parallel]


def run_part(part: Part, folder: Path, watch: Any) -> dict[str, Any]:
    """How a part ended: its `state`, seconds, and output. `watch` is called while it runs."""
    record: dict[str, Any] = {"name": part.name, "what": part.what, "limit": part.limit}
    if part.needs is not None and find_spec(part.needs) is None:
        return record | {"state": f"left out: {part.needs} is not installed", "seconds": 0.0, "output": ""}
    command = [str(folder / "check-gpu.json") if word == "{results}" else word for word in part.command]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    logs = [folder / "logs" / f"{part.name}.{kind}" for kind in ("out", "err")]
    start = time.monotonic()
    with logs[0].open("w") as out, logs[1].open("w") as err:
        process = subprocess.Popen(  # in a session of its own: what it has started ends with it
            command, cwd=HERE.parent, env=environment | part.environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = None
            while code is None and (left := start + part.limit - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left, INTERVAL))
                watch(record | {"state": "running", "seconds": time.monotonic() - start, "output": _end_of(logs[0])})
        finally:  # also if the user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    state = {None: f"stopped at its limit of {part.limit:g} s", 0: "done"}.get(code, f"failed with exit code {code}")
    record |= {"state": state, "seconds": time.monotonic() - start, "output": _end_of(logs[0])}
    return record if code == 0 else record | {"messages": _end_of(logs[1], TAIL)}


def _end_of(log: Path, most: int = MOST_OUTPUT) -> str:
    return log.read_text(errors="replace")[-most:].strip()


def run_all(parts: Iterable[Part], folder: Path, predictions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Run the parts one after the other, whatever happens to one of them, and write page and JSON as results come. Earlier
    results in `folder` stay, except those of the same parts. Returns how these parts ended.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    results, ended = folder / "check-gpu.json", []
    for part in parts:
        content = read_json(results)
        content.pop(part.name, None)
        records = [record for record in content.get("check_gpu", []) if record["name"] != part.name]
        write(results, json.dumps(content, indent=1) + "\n")
        print(f"{part.name}: {part.what}, at most {part.limit:g} s", flush=True)
        try:
            watch = lambda running, records=records: write_page(folder, [*records, running], predictions)
            record = run_part(part, folder, watch)
        except OSError as error:  # no such program, no memory for a process
            record = {"name": part.name, "what": part.what, "limit": part.limit, "seconds": 0.0, "output": ""}
            record |= {"state": f"failed: {error}"}
        ended.append(record)
        records.append(record)
        content = read_json(results)
        if part.name == "tests":
            counts = re.findall(r"(\d+) (passed|failed|skipped|error)", record["output"].rpartition("\n")[2])
            content["tests"] = {"rows": [{"passed": 0, "failed": 0} | {what: int(count) for count, what in counts}]}
        write(results, json.dumps(content | {"check_gpu": records}, indent=1) + "\n")
        write_page(folder, records, predictions)
        print(record["output"] + f"\n{part.name}: {record['state']} after {record['seconds']:.0f} s", flush=True)
        if "messages" in record:
            print(record["messages"], file=sys.stderr, flush=True)
    return ended


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, text: str) -> None:
    """Either whole or not at all: the machine may be taken away at any moment."""
    unfinished = file.with_suffix(".partial")
    unfinished.write_text(text)
    unfinished.replace(file)


def measured(prediction: dict[str, Any], content: dict[str, Any]) -> list[float]:
    """The numbers in the results of all parts that a prediction is about."""
    values = []
    for row in content.get(prediction["part"], {}).get("rows", []):
        if all(row.get(key) == value for key, value in prediction.get("row", {}).items()):
            if "kernels" in prediction:  # milliseconds of ours whose names match
                of_row = row.get("kernels", {}).get("ours", {})
                found = [seconds for name, (seconds, _) in of_row.items() if re.search(prediction["kernels"], name)]
                values += [1e3 * sum(found)] if found else []
            elif row.get(prediction["column"]) is not None:
                values.append(row[prediction["column"]])
    return values


def verdict(prediction: dict[str, Any], values: Sequence[float], device: str) -> str:
    if not values:
        return "not measured"
    if prediction.get("only", "") not in device:
        return f"is for {prediction['only']}"
    low, high = prediction.get("from", -float("inf")), prediction.get("to", float("inf"))
    return "as predicted" if all(low <= value <= high for value in values) else "**refuted**"


def write_page(folder: Path, records: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> None:
    content = read_json(folder / "check-gpu.json")
    environments = [entry["environment"] for entry in content.values() if "environment" in entry]
    device = str(environments[0]["device"]) if environments else "unknown device"
    lines = [f"# check-gpu: {', '.join(f'{k} {v}' for k, v in environments[0].items()) if environments else device}"]
    lines += ["", "| part | what | how it ended | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['what']} | {r['state']} | {r['seconds']:.0f} |" for r in records]
    lines += ["", "| predicted | from | to | measured | |", "|---|---|---|---|---|"]
    for prediction in predictions:
        values = measured(prediction, content)
        bounds = (prediction.get(key, "–") for key in ("from", "to"))
        numbers = ", ".join(f"{value:.4g}" for value in values)
        if len(values) > 3:
            numbers = f"{min(values):.4g} to {max(values):.4g}"
        of_part = content.get(prediction["part"], {}).get("environment", {}).get("device", "")
        cells = (prediction["what"], *bounds, numbers, verdict(prediction, values, str(of_part)))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for record in records:
        lines += ["", f"# {record['name']}: {record['state']}", "", record["output"]]
        if record.get("messages"):
            lines += ["", "```", record["messages"], "```"]
    write(folder / "check-gpu.md", "\n".join(lines) + "\n")


def main() -> int:
    import torch  # asked for nothing but whether there is a device, so that all of it is left to the parts
    import yaml

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if available else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as without a GPU")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts")
    parser.add_argument("--limits", type=float, default=1.0, metavar="FACTOR", help="of the time limits, on a slow GPU")
    parser.add_argument("--output", type=Path, default=HERE.parent / "outputs" / "check-gpu", help="folder")
    args = parser.parse_args()
    tiny = args.tiny or args.device == "cpu"
    parts = parts_of(args.device, tiny)
    if unknown := set(args.parts or ()) - {part.name for part in parts}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}.")
    chosen = [part for part in parts if not args.parts or part.name in args.parts]
    chosen = [Part(**vars(part) | {"limit": part.limit * args.limits}) for part in chosen]
    predictions = [] if tiny else yaml.safe_load(PREDICTIONS.read_text())
    records = run_all(chosen, args.output.resolve(), predictions)
    print(f"Send back {args.output}/check-gpu.md and check-gpu.json.")
    return int(any(not record["state"].startswith(("done", "left out")) for record in records))


if __name__ == "__main__":
    sys.exit(main())
