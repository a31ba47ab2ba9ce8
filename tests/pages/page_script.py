"""
Runs a script of a page as it stands, on a CPU: only the model, the number of updates and the engine are replaced, and
the rate, with which so small a model would hardly move, is a thousand times the page's. Each process writes what its
trainer has logged.

    accelerate launch --multi_gpu --num_processes 2 tests/pages/page_script.py FOLDER SCRIPT

FOLDER has the model and `problems.jsonl`, and is the working folder. SCRIPT is in it.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch

import troll_trl
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

UPDATES = 9  # a rollout batch of eight, and the first of the next one
ON_A_CPU = {"use_cpu": True, "bf16": False, "disable_tqdm": True, "report_to": "none", "logging_steps": 1}
ON_A_CPU |= {"max_steps": UPDATES, "save_strategy": "no"}


def answers() -> dict[str, str]:
    """The final answers of the problems, by their questions."""
    rows = map(json.loads, Path("problems.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["question"]: row["answer"].rpartition("####")[2].strip() for row in rows}


class Engine:
    """Generates in place of vLLM: every other completion is right. TRL's `VLLMGeneration` has these methods."""

    vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})

    def __init__(self, **settings):
        self.settings, self.synced, self.answers = settings, 0, answers()
        self.tokenizer = settings["processing_class"]
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=3072)))

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        completions = []
        for number, ids in enumerate(prompts):
            text = self.tokenizer.decode(ids)
            right = next(answer for question, answer in self.answers.items() if question in text)
            told = right if number % 2 else "none"
            completions.append(self.tokenizer(f"\\boxed{{{told}}}")["input_ids"] + [self.tokenizer.eos_token_id])
        return prompts, completions, [[[-5.5] for _ in row] for row in completions], None


def main(folder: str, script: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python SCRIPT` does
    rows = datasets.load_dataset("json", data_files="problems.jsonl", split="train", cache_dir=f"{folder}/cache")
    rows = datasets.concatenate_datasets([rows] * (256 // len(rows) + 1))  # a rollout batch takes 256
    datasets.load_dataset = lambda name, *_, **__: {"openai/gsm8k": rows}[name]
    asked = []
    trl = sys.modules["trl.trainer.grpo_trainer"]
    trl.VLLMGeneration = Engine
    sys.modules["trl.generation.vllm_client"].VLLMClient = lambda url, **_: asked.append(url) or Engine.vllm_client
    trainers, chosen = [], {}

    def configure(**options):
        chosen.update(options)
        return TrollGRPOConfig(**options | ON_A_CPU | {"learning_rate": 1000 * options["learning_rate"]})

    def start(model, **arguments):
        trainers.append(TrollGRPOTrainer(model=f"{folder}/model", **arguments))
        return trainers[-1]

    troll_trl.TrollGRPOConfig, troll_trl.TrollGRPOTrainer = configure, start
    torch.manual_seed(0)
    runpy.run_path(script, run_name="__main__")
    [trainer] = trainers
    engine = getattr(trainer, "vllm_generation", None)
    result = {
        "log": [line for line in trainer.state.log_history if "loss" in line],
        "updates": trainer.args.updates_per_rollout_batch,
        "completions": trainer.args.generation_batch_size,
        "processes": trainer.accelerator.num_processes,
        "mode": trainer.args.vllm_mode if trainer.args.use_vllm else None,
        "synced": engine and engine.synced,
        "servers": asked,
        "learning_rate": chosen["learning_rate"],
        "trained": sorted(name for name, weights in trainer.model.named_parameters() if weights.requires_grad),
    }
    Path(f"result-{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    import trl.generation.vllm_client
    import trl.trainer.grpo_trainer  # noqa: F401 both are patched

    main(*sys.argv[1:])
