"""Ten minutes of checks on a GPU. Run `make check-gpu` or, with any Python that has torch and TRL,

    python benchmarks/check_gpu.py

It needs no network, no account and no `make install`. Each part is a process with a time limit; the limits add up to
ten minutes. If a part fails, the next one still runs. outputs/check-gpu/check-gpu.md has the outcome and the output of
each part, outputs/check-gpu/check-gpu.json every number. `--device cpu` tries the script with tiny sizes, and measures
nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
STEP = "--repeats 3 --shape qwen3-0.6b --trust_region projection binary-penalty"
TINY = "--device cpu --repeats 1 --vocabulary 512"
# By name: the seconds after which a part is stopped, and its command
PARTS = {
    "tests": (120, "-m pytest tests/kernels -m gpu -o addopts= -q"),
    "head": (60, "benchmarks/head.py --vocabulary 151936 --tokens 4096 --support 64"),
    "step-4x4096": (240, f"benchmarks/step.py {STEP} --completion 4096 --completions 4"),
    "step-1x2048": (120, f"benchmarks/step.py {STEP} --completion 2048 --completions 1"),
    "projection": (60, "benchmarks/projection.py"),
}
TRY = {
    "tests": (600, "-m pytest tests/kernels/test_check_gpu.py -o addopts= -q -k rows"),
    "head": (600, f"benchmarks/head.py {TINY} --tokens 16 --support 16"),
    "step-4x24": (600, f"benchmarks/step.py {TINY} --shape small --completion 24 --completions 4"),
    "projection": (600, "benchmarks/projection.py --device cpu --repeats 1 --rows 64"),
}


def run_part(name: str, limit: float, command: Sequence[str], folder: Path) -> str:
    """Run a part, and return a section of the page: how it ended, and what it printed."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{name}.log"
    start = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(  # in its own session: processes that it has started end with it
            command, cwd=HERE.parent, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(limit)
            state = f"failed with exit code {code}" if code else "done"
        except subprocess.TimeoutExpired:
            state = f"stopped at its limit of {limit:g} s"
        finally:  # also if the user interrupts
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"## {name}: {state} ({time.monotonic() - start:.0f} s)\n\n{log.read_text(errors='replace').strip()}\n\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    options.add_argument("--parts", nargs="+", metavar="NAME", help="run only these; the page keeps earlier runs")
    options.add_argument("--output", type=Path, default=HERE.parent / "outputs" / "check-gpu")
    args = options.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    page = args.output.resolve() / "check-gpu.md"
    results = args.output.resolve() / "check-gpu.json"
    for name, (limit, line) in (PARTS if args.device == "cuda" else TRY).items():
        if args.parts and name not in args.parts:
            continue
        command = [sys.executable, *line.split()]
        if name != "tests":
            command += ["--results", str(results), "--name", name]
        elif find_spec("xdist"):
            command += ["-n", str(min(os.cpu_count() or 1, 8))]
        section = run_part(name, limit, command, args.output)
        print(section, flush=True)
        with page.open("a") as file:
            file.write(section)


if __name__ == "__main__":
    main()
