"""
Run a study: every run of its grid that is not there yet, with `troll grpo` and `troll eval`.

    python -m evidence.run evidence/cpu.yaml
    python -m evidence.run evidence/cpu.yaml --only sorting/troll/learning_rate=0.0002/ --seeds 20 21 22

The first makes evidence/results/cpu.jsonl. The second runs a cell with other seeds, at the learning rate that this file
tells, prints its success, and writes no results but those in the runs' folders. What is there already is not run again,
also after an interruption; what failed is, with `--retry`.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from evidence.grid import GivenTask, Grid, Run, content_of, prompt_of, read_grid, tuned_rates
from evidence.results import RESULT, describe, make_record, read_records, run_of, write_records
from evidence.starts import call_script, make_start, start_key
from evidence.variants import VARIANTS
from troll_trl.cli import evaluate, train, training

REPOSITORY = Path(__file__).resolve().parents[1]

# On a CPU the libraries are loaded once, and every run is a fork of this process: to load them takes as long as half a
# run. A fork cannot use a GPU that its parent has asked after.
_PROCESSES: Any = get_context("spawn" if torch.cuda.is_available() else "fork")


def run_all(jobs: Iterable[tuple[str, Callable[[], None]]], workers: int, log_of: Callable[[str], Path]) -> None:
    """Run named jobs in processes of their own, `workers` at a time, and say how each ended."""
    waiting = list(jobs)
    running: dict[Any, tuple[str, Any, set[int]]] = {}  # by what the end of a process makes ready
    total, start = len(waiting), time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[place::workers]) or set(cores) for place in range(workers)]
    while waiting or running:
        while waiting and shares:
            name, job = waiting.pop(0)
            share = shares.pop()
            process = _PROCESSES.Process(target=_run_job, args=(job, log_of(name), share))
            process.start()
            running[process.sentinel] = name, process, share
        for sentinel in connection.wait(list(running)):
            name, process, share = running.pop(sentinel)
            shares.append(share)
            process.join()
            done = total - len(waiting) - len(running)
            state = "failed, see " + str(log_of(name)) if process.exitcode else "done"
            print(f"[{done}/{total}, {(time.monotonic() - start) / 60:.1f} min] {name}: {state}", flush=True)


def _run_job(job: Callable[[], None], log: Path, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)  # and no more verifier workers than these
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)  # so small a model gains nothing from a second, and loses much where the cores are busy
    try:
        job()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # no waiting for what a trainer leaves behind


class Runner:
    """A grid's runs in a folder: `starts/<task>/seed<n>` and `runs/<task>/<method>/<cell>/seed<n>`."""

    def __init__(self, grid: Grid, folder: Path, workers: int):
        self.grid, self.folder, self.workers = grid, folder, workers

    def record(self, run: Run) -> dict[str, Any] | None:
        """The record of a run of this very identity; `None` if there is none."""
        file = self.folder / "runs" / run.folder / RESULT
        record = json.loads(file.read_text()) if file.exists() else None
        return record if record is not None and record.pop("identity") == self._identity(run) else None

    def run(self, runs: Iterable[Run], retry: bool) -> None:
        """Make the starts that are missing, and then the runs."""
        waiting = [run for run in runs if (record := self.record(run)) is None or (retry and "error" in record)]
        starts = {str(self._start(run)): partial(self._make_start, run) for run in waiting}
        run_all(starts.items(), self.workers, lambda name: self.folder / name / "log.txt")
        jobs = [(str(run.folder), partial(self._execute, run)) for run in waiting]
        run_all(jobs, self.workers, lambda name: self.folder / "runs" / name / "log.txt")
        for run in waiting:
            if self.record(run) is None:
                self._write(run, describe(run) | {"error": "the process was killed"})

    def _identity(self, run: Run) -> str:
        """A digest of all that decides what a run does, but for the code of the package."""
        task, method, grid = self.grid.tasks[run.task], self.grid.methods[run.method], self.grid
        files = [content_of(path) for path in (grid.training, grid.evaluation)]
        key = start_key(task, run.seed, grid.evaluation)
        return hashlib.sha256(repr((task, method, run, files, key)).encode()).hexdigest()

    def _start(self, run: Run) -> Path:
        """Relative to the study's folder. A model that is given is the same for every seed."""
        given = isinstance(self.grid.tasks[run.task], GivenTask)
        return Path("starts", run.task, "" if given else f"seed{run.seed}")

    def _make_start(self, run: Run) -> None:
        make_start(self.folder / self._start(run), self.grid.tasks[run.task], run.seed, self.grid.evaluation)

    def _execute(self, run: Run) -> None:
        task, start, settings = self.grid.tasks[run.task], self.folder / self._start(run), self.grid.settings(run)
        model = task.model if isinstance(task, GivenTask) else start / "model"
        folder = self.folder / "runs" / run.folder
        try:
            variant = self.grid.methods[run.method].variant
            if variant is not None:
                training.TRAINERS["grpo", "troll"] = VARIANTS[variant]
            paths = {"model_name_or_path": model, "dataset_name": start / "data", "output_dir": folder}
            call_script(train.main, self.grid.training, settings | paths)
            # From inside of its folder: the seed of a sample depends on the model's name, which is then that of every
            # run, so that equal models get equal samples
            os.chdir(folder)
            benchmark = f"held-out={start / 'data' / 'test.jsonl'}"
            flags = {"model": ".", "benchmarks": benchmark, "output": "eval", "overwrite": True}
            call_script(evaluate.main, self.grid.evaluation, flags | prompt_of(task))
            record = make_record(run, folder)
        except BaseException as error:  # SystemExit too: it is in the results, and not lost in a log
            if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 130:  # interrupted
                raise
            said = (folder / "log.txt").read_text().rstrip().rpartition("\n")[2]  # by the script, before it left
            record = describe(run) | {"error": f"{type(error).__name__}: {error}; {said}"}
            traceback.print_exc()
        shutil.rmtree(folder / "eval", ignore_errors=True)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        self._write(run, record)
        if "error" in record:
            raise SystemExit(1)

    def _write(self, run: Run, record: dict[str, Any]) -> None:
        file = self.folder / "runs" / run.folder / RESULT
        unfinished = file.with_suffix(".partial")
        unfinished.write_text(json.dumps(record | {"identity": self._identity(run)}))
        unfinished.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file of the study")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: outputs/evidence/NAME)")
    workers = 1 if torch.cuda.is_available() else os.cpu_count()
    parser.add_argument("--workers", type=int, default=workers, help=f"runs at a time (here: {workers})")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="runs whose folders begin with one")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds in place of those of the studies")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    options = parser.parse_args()
    grid = read_grid(options.grid.resolve())
    results = grid.file.parent / "results" / f"{grid.file.stem}.jsonl"
    folder = options.output or REPOSITORY / "outputs" / "evidence" / grid.file.stem
    runner = Runner(grid, folder.resolve(), options.workers)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    if options.seeds is None:
        runner.run(grid.runs(grid.tuning), options.retry)
        tuning = [runner.record(run) for run in grid.runs(grid.tuning)]
        rates = tuned_rates([record | {"studies": [grid.tuning]} for record in tuning if record], grid.tuning)
    else:
        if not results.exists():
            parser.error(f"--seeds takes the learning rates of {results}, which is not there; run the study first.")
        rates = tuned_rates(read_records(results), grid.tuning)
        studies = {name: replace(study, seeds=options.seeds) for name, study in grid.studies.items()}
        runner.grid = grid = replace(grid, studies=studies)
    studies_of = grid.all_runs(rates)
    asked = [run for run in studies_of if str(run.folder).startswith(tuple(options.only))]
    runner.run(asked, options.retry)
    records = [record | {"studies": studies_of[run]} for run in asked if (record := runner.record(run))]
    if options.seeds is not None:
        for record in records:
            print(f"{run_of(record).folder}: {record.get('success', float('nan')):.1%}")
    failed = sum("error" in record for record in records)
    print(f"{len(records)} runs, {failed} of them failed.")
    if options.seeds is None and options.only == [""]:
        write_records(results, records)
        print(f"Results: {results}")


if __name__ == "__main__":
    main()
