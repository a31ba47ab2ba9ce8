"""
Run a study: every missing run of its grid, with `troll grpo` and `troll eval`.

    python -m evidence.run evidence/curves.yaml
    python -m evidence.run evidence/curves.yaml --only label-2/healthy/ --seeds 41 42
    python -m evidence.run evidence/peers.yaml --resume --only label-2/troll/ label-2/clip-pull/

The first line makes evidence/results/curves.jsonl. The second runs a cell with other seeds and prints its success. It
takes tuned learning rates from the results file and writes no results, except in the folders of the runs. A run whose
folder has its result is not repeated; `--retry` repeats those that failed.

The third line is for a study that takes longer than one machine is available. It skips every run that the results file
has, whichever machine made it, and writes the file after every run. The file identifies a run by task, method, cell and
seed: if you change what one of these means in a grid that has results, give it a new name. A tuned learning rate is
chosen once all runs of its tuning exist. Runs that wait for one are left out and counted.

    python -m evidence.run evidence/gsm8k.yaml --model MODEL --dataset FOLDER --workers 3 --minutes 8 --resume

This line is for a machine that is at hand for minutes. After that time all runs are stopped, and the results also have
what the stopped ones had logged. `--retry` repeats them.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
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

from evidence.grid import GivenTask, Grid, Run, content_of, prompt_of, read_grid, tuned_rates
from evidence.results import RESULT, describe, machine, make_record, of_log, read_records, run_of, write_records
from evidence.starts import make_start, read_chance, start_digest, start_key
from evidence.variants import VARIANTS
from math_answers.whole_files import write_text
from troll_trl.cli import evaluate, make_trainer, train

REPOSITORY = Path(__file__).resolve().parents[1]

# Every run is a fork of this process, because loading the libraries takes as long as half a run. A fork cannot use a
# GPU if its parent has called CUDA, not even to ask whether there is one: PyTorch is to ask NVML.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
_PROCESSES: Any = get_context("fork")


def run_all(
    jobs: Iterable[tuple[str, Callable[[], None]]],
    workers: int,
    log_of: Callable[[str], Path],
    after_each: Callable[[], None] = lambda: None,
    deadline: float = math.inf,
) -> set[str]:
    """
    Run each named job in its own process, `workers` at a time, and print how it ended. At the `deadline`, by
    `time.monotonic`, the running ones are killed. Returns the names of those that never began.
    """
    waiting = list(jobs)
    running: dict[Any, tuple[str, Any, set[int]]] = {}  # by what the end of a process makes ready
    total, start = len(waiting), time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[place::workers]) or set(cores) for place in range(workers)]
    gc.freeze()  # a fork need not walk through the libraries' objects at every collection: a twentieth of a run
    while running or (waiting and time.monotonic() < deadline):
        while waiting and shares and time.monotonic() < deadline:
            name, job = waiting.pop(0)
            share = shares.pop()
            process = _PROCESSES.Process(target=_run_job, args=(job, log_of(name), share))
            process.start()
            running[process.sentinel] = name, process, share
        left = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
        ended = connection.wait(list(running), left)
        if not ended:  # the deadline
            for _, process, _ in running.values():
                process.kill()
            ended = [connection.wait([sentinel])[0] for sentinel in running]
        for sentinel in ended:
            name, process, share = running.pop(sentinel)
            shares.append(share)
            process.join()
            done = total - len(waiting) - len(running)
            state = "failed, see " + str(log_of(name)) if process.exitcode else "done"
            print(f"[{done}/{total}, {(time.monotonic() - start) / 60:.1f} min] {name}: {state}", flush=True)
            after_each()
    return {name for name, _ in waiting}


def _run_job(job: Callable[[], None], log: Path, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)  # and no more verifier workers than these
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)  # so small a model gains nothing from a second, and loses much where the cores are busy
    _keep_freed_memory()
    try:
        job()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that a trainer left


def _keep_freed_memory() -> None:
    """
    Have glibc keep what is freed for the next tensor. It gives large tensors back to the kernel, which clears every
    page of the next one: a third of the processor time of SmolLM2's runs.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; its M_MMAP_MAX and M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)


class Runner:
    """A grid's runs in a folder: `starts/<task>/seed<n>` and `runs/<task>/<method>/<cell>/seed<n>`."""

    def __init__(self, grid: Grid, folder: Path, workers: int, results: Path | None = None, deadline: float = math.inf):
        """With a file of `results`, its runs count as done, and the file is written after every run. No run goes on
        after the `deadline`, by `time.monotonic`."""
        self.grid, self.folder, self.workers, self.results, self.deadline = grid, folder, workers, results, deadline
        known = read_records(results) if results is not None and results.exists() else []
        self.known = {run_of(record): record for record in known}

    def record(self, run: Run) -> dict[str, Any] | None:
        """The record in the results, or in the folder of a run of the same identity; `None` if there is none."""
        if run in self.known:
            return self.known[run]
        file = self.folder / "runs" / run.folder / RESULT
        record = json.loads(file.read_text()) if file.exists() else None
        return record if record is not None and record.pop("identity") == self._identity(run) else None

    def run(self, runs: Iterable[Run], retry: bool) -> None:
        """
        Seed by seed, or as many seeds together as the workers need, make the missing starts, then the runs: a study
        that is cut off has whole seeds.
        """
        waiting = [run for run in runs if (record := self.record(run)) is None or (retry and "error" in record)]
        for run in waiting:
            self.known.pop(run, None)  # it failed
        log_of = lambda name: self.folder / "runs" / name / "log.txt"
        left_out: set[str] = set()
        for group in self._seeds_together(waiting):
            starts = {str(self._start(run)): partial(self._make_start, run) for run in group}
            run_all(starts.items(), self.workers, lambda name: self.folder / name / "log.txt", deadline=self.deadline)
            jobs = [(str(run.folder), partial(self._execute, run)) for run in group]
            left_out |= run_all(jobs, self.workers, log_of, self._save, self.deadline)
        for run in waiting:
            if self.record(run) is None and str(run.folder) not in left_out:
                error = "the process was killed" if time.monotonic() < self.deadline else "its time was up"
                so_far = of_log(run, self.folder / "runs" / run.folder)
                self._write(run, describe(run) | so_far | {"error": error, "machine": machine()})
        self._save()

    def _seeds_together(self, runs: Iterable[Run]) -> list[list[Run]]:
        """The runs by seed. Seeds with fewer runs than workers are together, or workers would wait."""
        of_seeds: dict[int, list[Run]] = {}
        for run in runs:
            of_seeds.setdefault(run.seed, []).append(run)
        groups: list[list[Run]] = []
        for of_seed in of_seeds.values():
            if groups and len(groups[-1]) < self.workers:
                groups[-1] += of_seed
            else:
                groups.append(of_seed)
        return groups

    def rates(self) -> dict[tuple[str, str], float]:
        """The learning rates of the tasks and methods whose tuning is complete."""
        tuning = {run: self.record(run) for run in self.grid.tuning_runs()}
        missing = {(run.task, run.method) for run, record in tuning.items() if record is None}
        records = [r | {"studies": self.grid.tuning} for r in tuning.values() if r is not None]
        return tuned_rates([r for r in records if (r["task"], r["method"]) not in missing], self.grid.tuning)

    def records(self, studies_of: Mapping[Run, list[str]]) -> list[dict[str, Any]]:
        """The records that exist, with the names of their studies."""
        return [r | {"studies": studies} for run, studies in studies_of.items() if (r := self.record(run)) is not None]

    def _save(self) -> None:
        if self.results is not None:
            studies_of = self.grid.all_runs(self.rates())
            kept = [
                record for run, record in self.known.items() if run not in studies_of
            ]  # nothing is ever thrown away
            write_records(self.results, self.records(studies_of) + kept)

    def _identity(self, run: Run) -> str:
        """A digest of everything that decides what a run does, except the code of the package."""
        task, method, grid = self.grid.tasks[run.task], self.grid.methods[run.method], self.grid
        files = [content_of(path) for path in (grid.training, grid.evaluation)]
        key = start_key(task, run.seed)
        return hashlib.sha256(repr((task, method, run, files, key)).encode()).hexdigest()

    def _start(self, run: Run) -> Path:
        """The folder of the start, relative to the study's. A choice from a dataset is the same for every seed."""
        chosen = isinstance(self.grid.tasks[run.task], GivenTask)
        return Path("starts", run.task, "" if chosen else f"seed{run.seed}")

    def _make_start(self, run: Run) -> None:
        make_start(self.folder / self._start(run), self.grid.tasks[run.task], run.seed)

    def _execute(self, run: Run) -> None:
        start, folder = self.folder / self._start(run), self.folder / "runs" / run.folder
        try:
            record = self.train_and_evaluate(run, start, folder) | read_chance(start) | start_digest(start)
            record["machine"] = machine()
        except BaseException as error:  # SystemExit too: the results record it
            if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 130:  # interrupted
                raise
            said = (folder / "log.txt").read_text().rstrip().rpartition("\n")[2]  # the script's last words
            record = describe(run) | of_log(run, folder) | {"error": f"{type(error).__name__}: {error}; {said}"}
            traceback.print_exc()
        shutil.rmtree(folder / "eval", ignore_errors=True)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        self._write(run, record)
        if "error" in record:
            raise SystemExit(1)

    def train_and_evaluate(self, run: Run, start: Path, folder: Path) -> dict[str, Any]:
        """The record of a run from `start`, which leaves its files in `folder`."""
        task, settings = self.grid.tasks[run.task], self.grid.settings(run)
        model = task.model or start / "model"
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # of a run that was stopped
        if task.model:  # large enough to use all cores of its worker
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            _write_every_log()
        variant = self.grid.methods[run.method].variant
        if variant is not None:
            make_trainer.TRAINERS["grpo", "troll"] = VARIANTS[variant]
        _keep_rows_of_last_batch()
        GRPOTrainer.prediction_step = _rewards_alone
        paths = {"model_name_or_path": model, "dataset_name": start / "data", "output_dir": folder}
        _call_script(train.main, self.grid.training, settings | paths)
        # From inside its folder: the seed of a sample depends on the model's name. With one name for all runs, equal
        # models get equal samples
        os.chdir(folder)
        benchmark = f"held-out={start / 'data' / 'test.jsonl'}"
        flags = {"model": ".", "benchmarks": benchmark, "output": "eval", "overwrite": True}
        _call_script(evaluate.main, self.grid.evaluation, flags | prompt_of(task))
        return make_record(run, folder)

    def _write(self, run: Run, record: dict[str, Any]) -> None:
        file = self.folder / "runs" / run.folder / RESULT
        write_text(file, json.dumps(record | {"identity": self._identity(run)}))


def _call_script(main: Callable[[], None], config: Path, flags: Mapping[str, Any]) -> None:
    """Run a script's `main` in this process, with a YAML file and flags."""
    sys.argv = [main.__module__, "--config", str(config)]
    sys.argv += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    main()


def _keep_rows_of_last_batch() -> None:
    """
    TRL's loader reads the rows of a whole rollout batch again at every update, and accelerate walks through them to
    move them to a device. With 32 updates per rollout batch that took a third of a run.
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


def _write_every_log() -> None:
    """TRL writes a run's log when the run ends. A long one may be stopped before."""
    log = GRPOTrainer.log

    def log_and_write(trainer: GRPOTrainer, *args: Any, **kwargs: Any) -> None:
        log(trainer, *args, **kwargs)
        trainer.state.save_to_json(str(Path(trainer.args.output_dir, TRAINER_STATE_NAME)))

    GRPOTrainer.log = log_and_write


def _rewards_alone(trainer: GRPOTrainer, _model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Any, None, None]:
    """
    TRL's evaluation step without its loss and its old policy. The study reads rewards alone, and the rest took a
    seventh of a run.
    """
    args, accumulated = trainer.args, trainer.args.gradient_accumulation_steps
    args.gradient_accumulation_steps = args.steps_per_generation * trainer.num_iterations  # TRL then scores nothing
    try:
        trainer._prepare_inputs(inputs)
    finally:
        args.gradient_accumulation_steps = accumulated
    return torch.zeros(()), None, None


def main(runner_class: type[Runner] = Runner) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file of the study")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: outputs/evidence/NAME)")
    workers = 1 if torch.cuda.is_available() else os.cpu_count()
    parser.add_argument("--workers", type=int, default=workers, help=f"runs at a time (here: {workers})")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="runs whose folders begin with one")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds that replace the seeds of the studies")
    parser.add_argument("--model", help="folder or hub name that replaces the tasks' model")
    parser.add_argument("--dataset", help="folder with train.jsonl and test.jsonl that replaces the tasks' dataset")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which all runs are stopped")
    parser.add_argument("--resume", action="store_true", help="keep the results file's runs, and add every new one")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    grid = read_grid(options.grid.resolve())
    if options.model is not None:
        given = {name: replace(task, model=options.model) for name, task in grid.tasks.items() if task.model}
        grid = replace(grid, tasks=grid.tasks | given)
    if options.dataset is not None:
        replaced = lambda task: replace(task, dataset=options.dataset) if isinstance(task, GivenTask) else task
        grid = replace(grid, tasks={name: replaced(task) for name, task in grid.tasks.items()})
    results = grid.file.parent / "results" / f"{grid.file.stem}.jsonl"
    folder = options.output or REPOSITORY / "outputs" / "evidence" / grid.file.stem
    if options.resume and options.seeds is not None:
        parser.error("--resume and --seeds exclude each other: --seeds writes no results. Leave one out.")
    runner = runner_class(grid, folder.resolve(), options.workers, results if options.resume else None, deadline)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    is_asked = lambda run: str(run.folder).startswith(tuple(options.only))

    if options.seeds is None:
        tuning = grid.tuning_runs()
        runner.run([run for run in tuning if is_asked(run) or not options.resume], options.retry)
        rates = runner.rates()
    else:
        if not results.exists():
            parser.error(f"--seeds needs the learning rates in {results}, which does not exist. Run the study first.")
        rates = tuned_rates(read_records(results), grid.tuning)
        studies = {name: replace(study, seeds=options.seeds) for name, study in grid.studies.items()}
        runner.grid = grid = replace(grid, studies=studies)
    studies_of = {run: studies for run, studies in grid.all_runs(rates).items() if is_asked(run)}
    runner.run(studies_of, options.retry)
    records = runner.records(studies_of)
    if options.seeds is not None:
        for record in records:
            print(f"{run_of(record).folder}: {record.get('success', float('nan')):.1%}")
    failed = sum("error" in record for record in records)
    print(f"{len(records)} runs, {failed} of them failed.")
    if waiting := grid.waiting(rates):
        print(f"{waiting} runs wait for the learning rates of their tasks and methods.")
    if options.seeds is None and options.only == [""]:
        write_records(results, records)
        print(f"Results: {results}")


if __name__ == "__main__":
    main()
