"""
Starts: small models, made on the spot and warmed up by supervised training until they solve some problems; or a model
that is there, and the problems that it solves sometimes.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import LlamaConfig, Qwen3Config

from evidence.grid import GivenTask, Task
from evidence.problems import PHRASES, make_problems
from scripts import evaluate
from scripts.quickstart import encode, make_model, make_tokenizer, warm_up, write_problems

ARCHITECTURES = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def make_start(folder: Path, task: Task, seed: int) -> None:
    """Write `model/` and `data/` of a task and a seed into `folder`, unless they are there already."""
    sources = [Path(__file__).with_name("problems.py").read_text(), Path(warm_up.__code__.co_filename).read_text()]
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    spec = {name: value for name, value in asdict(task).items() if name != "settings"}
    key = hashlib.sha256(repr((sources, versions, spec, seed)).encode()).hexdigest()
    key_file = folder / "cache_key.txt"
    if key_file.exists() and key_file.read_text() == key:
        return
    key_file.unlink(missing_ok=True)
    train, test = make_problems(task.family, seed, task.train, task.test)
    write_problems(folder / "data", train, test)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(PHRASES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(tokenizer, ARCHITECTURES[task.architecture], **task.sizes).to(device)
    input_ids, labels = encode(tokenizer, train)
    warm_up(model, input_ids.to(device), labels.to(device), target=task.start_success)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    key_file.write_text(key)  # last: a warm-up that was interrupted does not count


def choose_solvable(folder: Path, task: GivenTask, evaluation: Path) -> None:
    """
    Write `data/` into `folder`: of the first `task.candidates` training problems those of which the model gets some but
    not all samples right, and the first `task.test` test problems. Both keep their order.
    """
    data = folder / "data"
    if (data / "train.jsonl").exists():
        return
    lines = {
        split: (Path(task.dataset) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        for split, count in (("train", task.candidates), ("test", task.test))
    }
    data.mkdir(parents=True, exist_ok=True)
    candidates = folder / "candidates.jsonl"
    candidates.write_text("\n".join(lines["train"]) + "\n", encoding="utf-8")
    flags = {"model": task.model, "benchmarks": f"candidates={candidates}", "n": task.samples, "k": task.samples}
    call_script(evaluate.main, evaluation, flags | {"output": folder / "samples"} | task.prompt)
    right: Counter[int] = Counter()
    for line in (folder / "samples" / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        right[sample["index"]] += sample["reward"] == 1
    kept = [line for index, line in enumerate(lines["train"]) if 0 < right[index] < task.samples]
    if not kept:
        raise ValueError(f"{task.model} solves none of {len(lines['train'])} problems sometimes; try more of them.")
    print(f"Of {len(lines['train'])} problems {len(kept)} are solved sometimes.")
    (data / "test.jsonl").write_text("\n".join(lines["test"]) + "\n", encoding="utf-8")
    (data / "train.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")  # last: it says that all is there


def call_script(main: Callable[[], None], config: Path, flags: Mapping[str, Any]) -> None:
    """Run a script's `main` in this process, with a YAML file and flags."""
    sys.argv = [main.__module__, "--config", str(config)]
    sys.argv += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    main()
