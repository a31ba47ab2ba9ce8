r"""
Train a LoRA adapter for SmolLM2-135M-Instruct with TROLL, on generated one-step word problems.

Needs:  the Hugging Face hub for the model. A GPU is optional: on one CPU core, the run takes about 40 minutes.
Run:    python examples/lora.py
Prints: a log line every ten updates, and at the end the share of 128 held-out problems solved before and after.

In a study, six runs with these settings rose from at most 3 % to between 10 and 59 %, on average to 38 %. They trained
on such problems in bfloat16 on an H100 (evidence/public-models.md).
"""

import itertools
import random

import torch
from datasets import Dataset
from peft import LoraConfig

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.rewards import math_accuracy_reward

OUTPUT = "outputs/examples/lora"
NAMES, THINGS = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily"), ("apples", "books", "coins", "cards", "pens", "shells")

problems = []
for name, thing, a, b in itertools.product(NAMES, THINGS, range(2, 13), range(2, 13)):
    problems.append((f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", a + b))
    problems.append((f"{name} has {a + b} {thing} and gives away {b}. How many {thing} are left?", a))
    problems.append((f"{name} has {a} boxes with {b} {thing} each. How many {thing} does {name} have?", a * b))
random.Random(0).shuffle(problems)
system = {"role": "system", "content": "Put the final answer in \\boxed{}."}
rows = [{"prompt": [system, {"role": "user", "content": text}], "solution": n} for text, n in problems[:640]]

config = TrollGRPOConfig(
    output_dir=OUTPUT,
    kl_bound=0.2,  # for LoRA. With 0.05, six runs ended at 31 % instead of 38 %
    max_steps=64,
    learning_rate=3e-4,  # the best of four rates in the study (evidence/public-models.md)
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=8,
    # A rollout batch, TRL's generation batch, has 128 completions. It is used twice: 8 updates of 32 completions
    per_device_train_batch_size=32,
    steps_per_generation=4,
    num_iterations=2,
    max_completion_length=32,
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=False,
    eval_strategy="steps",
    eval_steps=16,
    eval_on_start=True,
    num_generations_eval=1,
    per_device_eval_batch_size=128,
)
# No dropout: the trust region would treat its noise as a change of the policy
adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=r".*layers\.2\d\..*_proj")
data = {"train_dataset": Dataset.from_list(rows[:512]), "eval_dataset": Dataset.from_list(rows[512:])}
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
trainer = TrollGRPOTrainer(model=model, reward_funcs=math_accuracy_reward, args=config, peft_config=adapter, **data)
trainer.train()
trainer.save_model(OUTPUT)
solved = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
print(f"Solved before training: {solved[0]:.1%}. Solved after it: {solved[-1]:.1%}. The adapter is in {OUTPUT}.")
