r"""
Train Qwen3-0.6B on GSM8K while a vLLM server generates. A mask bounds how far tokens move from the sampling policy.

Needs:  two GPUs that TRL's attention kernel, flash-attn3, supports, such as the H100; the Hugging Face hub; and vLLM:
        pip install '.[async]'
Run:    CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --host 127.0.0.1 --dtype float32 \
            --max-model-len 3072 --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs
        CUDA_VISIBLE_DEVICES=1 accelerate launch examples/asynchronous.py
Prints: a log line per update, and at the end the mean reward of the first 20 and of the last 20 updates.

This script has not been run on a GPU. Without a GPU, run asynchronous_cpu.py. Like TRL's asynchronous trainer, ours is
experimental.
"""

from datasets import load_dataset

from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer
from troll_trl.rewards import math_accuracy_reward

OUTPUT = "outputs/examples/asynchronous"


def to_prompt(row):
    problem = f"{row['question']}\n\nLet's think step by step and put the final answer in \\boxed{{}}."
    return {"prompt": [{"role": "user", "content": problem}], "solution": row["answer"]}


def main():
    config = AsyncTrollGRPOConfig(
        output_dir=OUTPUT,
        max_steps=400,
        save_steps=80,
        trust_region="mask",  # the default; docs/async.md
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=2048,
        chat_template_kwargs={"enable_thinking": False},
        vllm_server_base_url="http://127.0.0.1:8000",
    )
    trainer = AsyncTrollGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=math_accuracy_reward,
        args=config,
        train_dataset=load_dataset("openai/gsm8k", "main", split="train").map(to_prompt),
    )
    trainer.train()
    trainer.save_model(OUTPUT)
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    first, last = (sum(part) / len(part) for part in (rewards[:20], rewards[-20:]))
    print(f"Mean reward of the first updates: {first:.3f}, of the last ones: {last:.3f}. The model is in {OUTPUT}.")


if __name__ == "__main__":  # the rollout worker, another process, imports this file again
    main()
