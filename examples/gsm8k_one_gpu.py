r"""
Train Qwen3-0.6B on GSM8K with TROLL, on one GPU.

Needs:  a GPU of 24 GB, the Hugging Face hub, and vLLM: pip install '.[vllm]'
Run:    python examples/gsm8k_one_gpu.py
Prints: a log line per rollout batch, and at the end the share of 256 held-out problems solved before and after.

Batch and memory are as in configs/qwen3-0.6b/gsm8k-one-gpu.yaml. The config trains longer (8,008 updates instead of
400), evaluates on all 1,319 held-out problems, and sets `loss_type: bnpo`; this script keeps TRL's default. This script
has not been run on a GPU.
"""

from datasets import load_dataset

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.rewards import math_accuracy_reward

OUTPUT = "outputs/examples/gsm8k-one-gpu"


def to_prompt(row):
    problem = f"{row['question']}\n\nLet's think step by step and put the final answer in \\boxed{{}}."
    return {"prompt": [{"role": "user", "content": problem}], "solution": row["answer"]}


config = TrollGRPOConfig(
    output_dir=OUTPUT,
    max_steps=400,
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    # A rollout batch has 256 completions: 8 updates of 4 x 8 = 32 completions each
    generation_batch_size=256,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    num_generations=8,
    max_completion_length=2048,
    chat_template_kwargs={"enable_thinking": False},
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    vllm_max_model_length=3072,
    # vLLM rounds differently from the trainer. This option corrects the difference for each token
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    eval_strategy="steps",
    eval_steps=80,
    eval_on_start=True,
    num_generations_eval=1,
    per_device_eval_batch_size=32,
    logging_steps=8,
    save_steps=80,
    save_total_limit=2,
)
trainer = TrollGRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=math_accuracy_reward,
    args=config,
    train_dataset=load_dataset("openai/gsm8k", "main", split="train").map(to_prompt),
    eval_dataset=load_dataset("openai/gsm8k", "main", split="test").select(range(256)).map(to_prompt),
)
trainer.train()
trainer.save_model(OUTPUT)
solved = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
print(f"Solved before training: {solved[0]:.1%}. Solved after it: {solved[-1]:.1%}. The model is in {OUTPUT}.")
