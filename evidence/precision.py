"""
How far bfloat16 autocast moves SmolLM2's policy and its gradient, at its first weights and on completions of its own:

    python -m evidence.precision HuggingFaceTB/SmolLM2-135M-Instruct
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cosine_similarity, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence.grid import Task, content_of, read_grid
from evidence.problems import make_problems

HERE = Path(__file__).parent
PROBLEMS, SAMPLES = 8, 4


def measure(model: torch.nn.Module, ids: torch.Tensor, prompt: int, bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities `(B, C, V)` of the completions in `ids` `(B, prompt + C)`, and a policy gradient, flat."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=ids, logits_to_keep=ids.shape[1] - prompt + 1).logits[:, :-1]
    log_probs = logits.float().log_softmax(-1)
    advantages = torch.tensor([1.0, -1.0]).repeat(len(ids) // 2)[:, None]  # (B, 1)
    (advantages * log_probs.gather(-1, ids[:, prompt:, None]).squeeze(-1)).mean().backward()
    return log_probs.detach(), torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


def main() -> None:
    torch.manual_seed(0)
    task = read_grid(HERE / "smollm2-rate.yaml").tasks["no-dropout"]
    assert isinstance(task, Task)
    lora = next(c for c in content_of(HERE / "train-smollm2.yaml") if "lora_r" in c)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    targets = "|".join(lora["lora_target_modules"])
    model = get_peft_model(model, LoraConfig(r=lora["lora_r"], lora_alpha=lora["lora_alpha"], target_modules=targets))
    divergences, cosines, lengths = [], [], []
    for row in make_problems(task.family, 13, task.train, task.test)[1][:PROBLEMS]:
        chat = [{"role": "system", "content": task.settings["system_prompt"]}]
        chat.append({"role": "user", "content": row["problem"]})
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        new = task.settings["max_completion_length"]
        sampling = {"do_sample": True, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new}
        with torch.no_grad():
            ids = model.generate(input_ids=prompt.repeat(SAMPLES, 1), **sampling)
        policy, gradient = measure(model, ids, prompt.shape[1], bf16=False)
        rounded, of_rounded = measure(model, ids, prompt.shape[1], bf16=True)
        divergences.append(kl_div(rounded, policy, log_target=True, reduction="none").sum(-1).flatten())
        cosines.append(cosine_similarity(gradient, of_rounded, dim=0))
        lengths.append(of_rounded.norm() / gradient.norm())
    kl = torch.cat(divergences)
    print(f"KL of a token: mean {kl.mean():.1e}, largest {kl.max():.1e}")
    print(f"Gradients: least cosine {min(cosines):.4f}, ratios of lengths {min(lengths):.3f} to {max(lengths):.3f}")


if __name__ == "__main__":
    main()
