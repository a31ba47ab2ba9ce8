"""
What runs start from: problems and a model. Supervised training warms up a small new model until it solves some
generated problems. A given model is trained as it is.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, Qwen3Config

from evidence.grid import Task
from evidence.problems import PHRASES, RARE_PHRASES, make_problems, make_wording, make_worked
from troll_trl.small_models import encode, make_model, make_tokenizer, warm_up, write_problems

CHANCE = "chance.json"
ATTEMPTS = 3  # for each start: some initial weights do not reach its success
ARCHITECTURES = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def make_start(folder: Path, task: Task, seed: int) -> None:
    """Write `data/`, and `model/` if the task gives none, into `folder`, unless `folder` already has this start."""
    specification = {name: value for name, value in asdict(task).items() if name != "settings"}
    key_file = folder / "key.txt"
    key = repr((specification, seed, torch.__version__, transformers.__version__))
    if key_file.exists() and key_file.read_text() == key:
        return
    key_file.unlink(missing_ok=True)
    if task.family is None:
        choose_problems(folder / "data", task)
    else:
        train, test = make_problems(task.family, seed, task.train, task.test)
        write_problems(folder / "data", train, test)
        if task.model is None:
            warm_up_model(folder, task, seed, train, test)
    key_file.write_text(key)  # last: a start that was interrupted does not count


def choose_problems(folder: Path, task: Task) -> None:
    """Choose the first `task.train` training problems and the first `task.test` test problems of the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", task.train), ("test", task.test)):
        rows = Path(str(task.dataset), f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def warm_up_model(folder: Path, task: Task, seed: int, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    """
    Train a new model on a family's problems until it solves some of them. If solutions have several forms or a wording,
    only solutions whose form and wording the model has chosen count.
    """
    assert task.family and task.architecture and task.start_success  # no model is given
    tokenizer = make_tokenizer(PHRASES if task.share is None else PHRASES + RARE_PHRASES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    worked, same_form = make_worked(task.family, train, task.share, seed)
    worked, same_wording = make_wording(worked, task.wording, seed)
    input_ids, labels = (ids.to(device) for ids in encode(tokenizer, worked))
    for attempt in range(ATTEMPTS):
        torch.manual_seed(seed + 1000 * attempt)
        model = make_model(tokenizer, ARCHITECTURES[task.architecture]).to(device)
        try:
            warm_up(model, input_ids, labels, task.start_success * same_form * same_wording)
            break
        except RuntimeError as error:  # these weights did not reach the success
            if attempt == ATTEMPTS - 1:
                raise
            print(f"{error} Trying again with other initial weights.")
    test, _ = make_wording(test, task.wording, seed)
    chance = rewarded_chance(model, *(ids.to(device) for ids in encode(tokenizer, test)))
    (folder / CHANCE).write_text(json.dumps({"start_chance": chance / same_wording}))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@torch.no_grad()
def rewarded_chance(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean probability of the solutions `labels` `(problems, length)`: the start's success without sampling noise."""
    logits = model(input_ids=input_ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum(1).neg().exp().mean().item()


def describe_start(folder: Path) -> dict[str, float | str]:
    """Return `start_chance`, the success of a generated start, and `start_digest`, of its weights: a warm-up gives
    other weights on another machine. Empty for a given model."""
    weights = folder / "model" / "model.safetensors"
    if not weights.exists():
        return {}
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    return json.loads((folder / CHANCE).read_text()) | {"start_digest": digest}
