"""
The truly asynchronous runs of async.yaml's methods on `label-2`: TRL's own rollout worker and a real vLLM server on a
CPU generate while the trainer trains, and the weights travel as in
tests/engines/test_vllm_async.py. Needs `make test-vllm`'s environment, and writes results/async-served.jsonl.

    PYTHONPATH=tests/engines:tests/support:. VLLM_HOST_IP=127.0.0.1 .venv/vllm/bin/python -m evidence.served
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from evidence.asynchronous import CLASSES, HeldOut, Problems, make_async_record
from evidence.engine import make_cpu_trainer
from evidence.grid import Run, Task, content_of, read_grid
from evidence.results import describe, machine, mean_logged, write_records
from evidence.starts import make_start
from math_answers import math_accuracy_reward

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "async-served.jsonl"
RATE, SEED = 4e-4, 20


def serve(method: str, start: Path, url: str, folder: Path) -> dict[str, Any]:
    """Train with a method at `RATE` and TRL's default of `max_staleness`. Returns the record of the run."""
    grid = read_grid(HERE / "async.yaml")
    run = Run("label-2", method, (("learning_rate", RATE),), SEED)
    # vLLM 0.30 on a CPU crashes if the prompts of TRL's seeded requests exceed what a step of the engine takes
    served = {"vllm_server_base_url": url, "max_staleness": 4, "max_inflight_tasks": 64}
    settings = content_of(grid.training)[0] | grid.settings(run) | served
    settings.pop("versions_old")
    trainer_class, config_class = CLASSES[settings.pop("method", "troll")]
    problems, held_out = Problems(start, "train"), Problems(start, "test")
    # TRL's worker knows this template. It makes the same prompts
    problems.tokenizer.chat_template = qwen3_chat_template
    rows = [{"prompt": [{"role": "user", "content": r["problem"]}], "solution": r["answer"]} for r in problems.rows]
    curves = HeldOut(AutoModelForCausalLM.from_pretrained(start / "model").eval(), held_out)
    trainer = make_cpu_trainer(
        trainer_class, start / "model", config_class(output_dir=str(folder), **settings), None,
        reward_funcs=[math_accuracy_reward], train_dataset=Dataset.from_list(rows),
        processing_class=problems.tokenizer, callbacks=[curves],
    )  # fmt: skip
    began = time.monotonic()
    trainer.train()
    log = trainer.state.log_history
    dropped = sum(line.get("sample/dropped_stale_total", 0) for line in log)
    more = {"staleness_mean": mean_logged(log, "sample/staleness_mean"), "dropped_stale": dropped}
    record = describe(run) | make_async_record(curves.curves, log) | more
    return record | {"minutes": (time.monotonic() - began) / 60, "machine": machine()}


def main() -> None:
    from vllm_async import send_weights_by_loopback
    from vllm_server import serving

    grid, records = read_grid(HERE / "async.yaml"), []
    task = grid.tasks["label-2"]
    assert isinstance(task, Task)
    task = replace(task, sizes={"head_dim": 32})  # vLLM has no attention kernel for smaller heads on a CPU
    start = HERE.parent / "outputs" / "evidence" / "async-served" / f"seed{SEED}"
    make_start(start, task, SEED)
    send_weights_by_loopback()
    with tempfile.TemporaryDirectory() as folder, serving(str(start / "model"), Path(folder)) as server:
        for method in ("troll-4", "mask-4", "clip-4"):
            records.append(serve(method, start, server.url, Path(folder, method)))
            write_records(RESULTS, records)


if __name__ == "__main__":
    main()
