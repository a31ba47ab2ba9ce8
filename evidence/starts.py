"""Start models: small, made on the spot, and warmed up by supervised training until they solve some problems."""

import hashlib
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import LlamaConfig, Qwen3Config

from evidence.grid import Task
from evidence.problems import PHRASES, make_problems
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
    model = make_model(tokenizer, ARCHITECTURES[task.architecture], **task.sizes)
    warm_up(model, *encode(tokenizer, train), target=task.start_success)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    key_file.write_text(key)  # last: a warm-up that was interrupted does not count
