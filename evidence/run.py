"""
Run a study: every run of its grid that is missing from its results, with `troll grpo` and `troll eval`.

    python -m evidence.run evidence/adaptive.yaml
    python -m evidence.run evidence/adaptive.yaml --only label-2/troll/ label-2/clip/ --seeds 301 302
    python -m evidence.run evidence/gsm8k.yaml --model MODEL --dataset FOLDER --minutes 60

The first line adds every run to evidence/results/adaptive.jsonl when the run ends, so a study may be stopped at any
time and continued on another machine. Task, method, cell and seed identify a run: if you change what one of these means
in a grid that has results, give it a new name. `--retry` repeats runs that failed.

The second line runs some cells with other seeds and prints their success. Their results go to the folder of the runs,
outputs/evidence/adaptive.

The third line stops all runs after an hour. The results contain what the stopped runs had logged.
"""

import argparse
import gc
import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import accelerate.data_loader
import scipy.stats  # noqa: F401 (an evaluation imports it, and a fork of this process has it already)
import torch
from datasets import Dataset
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOTrainer

from evidence.grid import Grid, Run, Task, read_grid
from evidence.results import Record, describe, machine, make_record, of_log, read_records, run_of, write_records
from evidence.starts import describe_start, make_start
from troll_trl.cli import evaluate, train

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = "result.json"

# Every run is a fork of this process, because loading the libraries takes as long as half a run. A fork cannot use a
# GPU if its parent has called CUDA, even if only to ask whether there is one. With this variable, PyTorch asks NVML
# instead.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
_PROCESSES: Any = get_context("fork")


def run_all(
    jobs: Mapping[Path, Callable[[], None]],
    workers: int,
    after_each: Callable[[Path], None] = lambda folder: None,
    deadline: float = math.inf,
) -> None:
    """Run each job in its own process, `workers` at a time, with a `log.txt` in its folder, and print how it ended. At
    the `deadline`, by `time.monotonic`, running jobs are killed, and no other job begins."""
    waiting = list(jobs)
    total = len(jobs)
    start = time.monotonic()
    running: dict[Any, tuple[Path, Any, set[int]]] = {}  # by sentinel, which the end of a process makes ready
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[place::workers]) or set(cores) for place in range(workers)]
    gc.freeze()  # spares a fork the libraries' objects at every collection: a twentieth of a run
    while running or (waiting and time.monotonic() < deadline):
        while waiting and shares and time.monotonic() < deadline:
            folder = waiting.pop(0)
            share = shares.pop()
            process = _PROCESSES.Process(target=_run_job, args=(jobs[folder], folder, share))
            process.start()
            running[process.sentinel] = folder, process, share
        ended = connection.wait(list(running), None if deadline == math.inf else max(deadline - time.monotonic(), 0))
        if not ended:  # the deadline
            for _, process, _ in running.values():
                process.kill()
            ended = list(running)
        for sentinel in ended:
            folder, process, share = running.pop(sentinel)
            process.join()
            shares.append(share)
            state = f"failed, see {folder / 'log.txt'}" if process.exitcode else "done"
            done = total - len(waiting) - len(running)
            print(f"[{done}/{total}, {(time.monotonic() - start) / 60:.1f} min] {folder}: {state}", flush=True)
            after_each(folder)


def _run_job(job: Callable[[], None], folder: Path, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)  # also limits the number of verifier workers
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        job()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that a trainer left


class Runner:
    """Runs a grid in a folder, with `starts/<task>/seed<n>` and `runs/<task>/<method>/<cell>/seed<n>`, and writes the
    file of `results`. A run in this file is done, whichever machine made it. No run continues beyond the `deadline`, by
    `time.monotonic`."""

    def __init__(self, grid: Grid, folder: Path, results: Path, workers: int, deadline: float = math.inf):
        self.grid = grid
        self.folder = folder
        self.results = results
        self.workers = workers
        self.deadline = deadline
        self.records = {run_of(record): record for record in read_records(results)} if results.exists() else {}

    def run(self, studies_of: Mapping[Run, list[str]], retry: bool = False) -> None:
        """Make the missing starts and runs, seed by seed, so a study that is cut off has complete seeds."""
        lacking = lambda run: run not in self.records or (retry and "error" in self.records[run])
        waiting = [run for run in studies_of if lacking(run)]
        for seed in dict.fromkeys(run.seed for run in waiting):
            runs = {self._folder(run): run for run in waiting if run.seed == seed}
            starts = {self._start(run): partial(self._make_start, run) for run in runs.values()}
            run_all(starts, self.workers, deadline=self.deadline)

            def keep(folder: Path, runs: dict[Path, Run] = runs) -> None:
                self._keep(runs[folder], studies_of[runs[folder]])

            jobs = {folder: partial(self._execute, run) for folder, run in runs.items()}
            run_all(jobs, self.workers, keep, self.deadline)

    def _keep(self, run: Run, studies: list[str]) -> None:
        """Add the record of a run that has ended to the results."""
        folder = self._folder(run)
        if (folder / RESULT).exists():
            record = json.loads((folder / RESULT).read_text())
        else:
            error = "the process was killed" if time.monotonic() < self.deadline else "its time was up"
            record = describe(run) | of_log(run, folder) | {"error": error}
        self.records[run] = record | {"machine": machine(), "studies": studies}
        write_records(self.results, self.records.values())

    def _folder(self, run: Run) -> Path:
        return self.folder / "runs" / run.folder

    def _start(self, run: Run) -> Path:
        """The folder of the start. Problems that are chosen from a dataset are the same for every seed."""
        chosen = self.grid.tasks[run.task].dataset is not None
        return self.folder / "starts" / run.task / ("" if chosen else f"seed{run.seed}")

    def _make_start(self, run: Run) -> None:
        torch.set_num_threads(1)
        make_start(self._start(run), self.grid.tasks[run.task], run.seed)

    def _execute(self, run: Run) -> None:
        """In a separate process, train, evaluate, and write the record into the folder of the run."""
        folder = self._folder(run)
        for path in folder.iterdir():  # files of a stopped run: `troll grpo` refuses a folder that has a run
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "log.txt":
                path.unlink()
        try:
            record = self.train_and_evaluate(run, folder) | describe_start(self._start(run))
        except BaseException as error:  # SystemExit too: the results record it
            if isinstance(error, KeyboardInterrupt):
                raise
            said = (folder / "log.txt").read_text().rstrip().rpartition("\n")[2]  # the last line of the command
            record = describe(run) | of_log(run, folder) | {"error": f"{type(error).__name__}: {error}; {said}"}
            traceback.print_exc()
        shutil.rmtree(folder / "eval", ignore_errors=True)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        (folder / RESULT).write_text(json.dumps(record))
        if "error" in record:
            raise SystemExit(1)

    def train_and_evaluate(self, run: Run, folder: Path) -> Record:
        task = self.grid.tasks[run.task]
        start = self._start(run)
        # A small model gains nothing from a second thread, and loses much if the cores are busy
        torch.set_num_threads(len(os.sched_getaffinity(0)) if task.model else 1)
        _write_the_log()
        _keep_rows_of_last_batch()
        GRPOTrainer.prediction_step = _rewards_alone
        paths = {"model_name_or_path": task.model or start / "model", "dataset_name": start / "data"}
        train.main(_words(self.grid.training, self.grid.settings(run) | paths | {"output_dir": folder}))
        peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}
        if self.grid.evaluation is None:
            return make_record(run, folder) | peak
        # Evaluate from inside the run's folder: the seed of a sample depends on the model's name. With one name for all
        # runs, equal models get equal samples
        os.chdir(folder)
        problems = start / "data" / "test.jsonl"
        flags: dict[str, Any] = {
            "model": ".",
            "benchmarks": f"held-out={problems}",
            "output": "eval",
            "overwrite": True,
        }
        flags |= {key: value for key, value in task.settings.items() if key in ("instruction", "system_prompt")}
        flags["max_new_tokens"] = task.settings["max_completion_length"]
        evaluate.main(_words(self.grid.evaluation, flags))
        return make_record(run, folder) | peak


def _words(config: Path, flags: Mapping[str, Any]) -> list[str]:
    """The command line of a YAML file and flags."""
    return ["--config", str(config), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def _keep_rows_of_last_batch() -> None:
    """
    Keep the rows of the last batch in memory. TRL's loader reads the rows of a whole rollout batch again at every
    update, and accelerate walks through them to move them to a device. With 32 updates per rollout batch, this took a
    third of a run.
    """
    read_rows = Dataset.__getitems__
    last: dict[tuple[str, tuple[int, ...]], list[Any]] = {}

    def rows(dataset: Dataset, keys: list[int]) -> list[Any]:
        key = dataset._fingerprint, tuple(keys)
        if key not in last:
            last.clear()
            last[key] = read_rows(dataset, keys)
        return last[key]

    Dataset.__getitems__ = rows
    if not torch.cuda.is_available():
        accelerate.data_loader.send_to_device = lambda batch, *_, **__: batch


def _write_the_log() -> None:
    """Add the `seconds` of [`make_record`] to a run's log, and write the log every 8 updates. TRL writes it when the
    run ends, and a long run may be stopped before. Writing at every update would take a tenth of a small run."""
    log, clock = GRPOTrainer.log, time.perf_counter if torch.cuda.is_available() else time.process_time

    def log_and_write(trainer: GRPOTrainer, logs: dict[str, float], *args: Any) -> None:
        log(trainer, logs | {"seconds": clock()}, *args)
        if trainer.state.global_step % 8 == 0:
            trainer.state.save_to_json(str(Path(trainer.args.output_dir, TRAINER_STATE_NAME)))

    GRPOTrainer.log = log_and_write


def _rewards_alone(trainer: GRPOTrainer, _model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Any, None, None]:
    """
    TRL's evaluation step without its loss and its old policy. The study reads only rewards, and the rest took a seventh
    of a run.
    """
    args = trainer.args
    accumulated = trainer.args.gradient_accumulation_steps
    args.gradient_accumulation_steps = args.steps_per_generation * trainer.num_iterations  # TRL then scores nothing
    try:
        trainer._prepare_inputs(inputs)
    finally:
        args.gradient_accumulation_steps = accumulated
    return torch.zeros(()), None, None


def _given(task: Task, model: str | None, dataset: str | None) -> Task:
    """The task with another model and dataset, if the task names them. Folders become absolute paths, because a run
    changes its working folder."""
    absolute = lambda name: str(Path(name).resolve()) if name is not None and Path(name).is_dir() else name
    return replace(
        task,
        model=absolute(model or task.model) if task.model else None,
        dataset=absolute(dataset or task.dataset) if task.dataset else None,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file of the study")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: outputs/evidence/NAME)")
    workers = 1 if torch.cuda.is_available() else os.cpu_count()
    parser.add_argument("--workers", type=int, default=workers, help=f"runs at a time (here: {workers})")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="only runs in these folders")
    parser.add_argument("--studies", nargs="+", metavar="NAME", help="only runs of these studies of the grid")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds that replace the seeds of the studies")
    parser.add_argument("--model", help="folder or hub name that replaces the tasks' model")
    parser.add_argument("--dataset", help="folder with train.jsonl and test.jsonl that replaces the tasks' dataset")
    parser.add_argument("--minutes", type=float, default=math.inf, help="minutes after which all runs are stopped")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    deadline = time.monotonic() + 60 * options.minutes
    name = options.grid.stem
    grid = read_grid(options.grid.resolve())
    tasks = {key: _given(task, options.model, options.dataset) for key, task in grid.tasks.items()}
    folder = (options.output or REPOSITORY / "outputs" / "evidence" / name).resolve()
    results = folder / "results.jsonl" if options.seeds else options.grid.resolve().parent / f"results/{name}.jsonl"
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    asked = lambda run: str(run.folder).startswith(tuple(options.only))
    grid = replace(grid, studies={name: grid.studies[name] for name in options.studies or grid.studies})
    studies_of = {run: studies for run, studies in grid.runs(options.seeds).items() if asked(run)}
    runner = Runner(replace(grid, tasks=tasks), folder, results, options.workers, deadline)
    runner.run(studies_of, options.retry)
    made = {run: runner.records[run] for run in studies_of if run in runner.records}
    for run, record in made.items() if options.seeds else ():
        print(f"{run.folder}: {record.get('success', math.nan):.1%}")
    failed = sum("error" in record for record in made.values())
    print(f"{len(made)} of {len(studies_of)} runs, {failed} of them failed. Results: {results}")


if __name__ == "__main__":
    main()
