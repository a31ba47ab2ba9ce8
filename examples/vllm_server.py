r"""
Train Qwen3-0.6B on GSM8K with TROLL, while a vLLM server on another GPU samples the completions.

Needs:  two GPUs of 24 GB, the Hugging Face hub, and vLLM: pip install '.[vllm]'
Run:    CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model Qwen/Qwen3-0.6B --host 127.0.0.1 --dtype float32 \
            --max_model_len 3072
        CUDA_VISIBLE_DEVICES=1 python examples/vllm_server.py
Prints: a log line per rollout batch (TRL's generation batch), and at the end the share of completions with the right
        answer in the first batch and in the last one.

The trainer waits up to four minutes for the server. This script has not been run on a GPU.
"""

from datasets import load_dataset

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.rewards import math_accuracy_reward

OUTPUT = "outputs/examples/vllm-server"


def to_prompt(row):
    problem = f"{row['question']}\n\nLet's think step by step and put the final answer in \\boxed{{}}."
    return {"prompt": [{"role": "user", "content": problem}], "solution": row["answer"]}


config = TrollGRPOConfig(
    output_dir=OUTPUT,
    max_steps=400,
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    # A rollout batch has 256 completions: 8 updates of 8 x 4 = 32 completions each
    generation_batch_size=256,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=2048,
    chat_template_kwargs={"enable_thinking": False},
    use_vllm=True,
    vllm_mode="server",
    vllm_server_host="127.0.0.1",
    vllm_server_port=8000,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    logging_steps=8,
)
trainer = TrollGRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=math_accuracy_reward,
    args=config,
    train_dataset=load_dataset("openai/gsm8k", "main", split="train").map(to_prompt),
)
trainer.train()
trainer.save_model(OUTPUT)
right = [line["reward"] for line in trainer.state.log_history if "reward" in line]
print(f"Solved in the first batch: {right[0]:.1%}. Solved in the last: {right[-1]:.1%}. The model is in {OUTPUT}.")
