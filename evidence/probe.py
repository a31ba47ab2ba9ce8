"""
How often a model solves each kind of problem in evidence/reasoning.yaml, and how many groups of samples are neither all
right nor all wrong. Prints the table of evidence/smollm2-public.md.

    python -m evidence.probe HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence.reasoning import last_number_reward, make_split
from evidence.tables import markdown

PROBLEMS, SAMPLES, TOKENS, SEED = 32, 8, 24, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    name = parser.parse_args().model
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    table = []
    for kind in yaml.safe_load(Path(__file__).with_name("reasoning.yaml").read_text()):
        _, rows = make_split([kind], PROBLEMS, PROBLEMS, SEED)
        chats = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False
        )
        batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
        torch.manual_seed(SEED)
        ids = model.generate(
            **batch, max_new_tokens=TOKENS, do_sample=True, top_k=0, num_return_sequences=SAMPLES, use_cache=True
        )
        answers = ids[:, batch.input_ids.shape[1] :]  # (problems * samples, tokens)
        texts = [[{"content": text}] for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]
        golds = [row["answer"] for row in rows for _ in range(SAMPLES)]
        rewards = torch.tensor(last_number_reward(texts, golds)).view(-1, SAMPLES)
        mixed = (rewards.mean(1) > 0) & (rewards.mean(1) < 1)
        cut = (answers != tokenizer.eos_token_id).all(1)
        shares = [100 * x.float().mean().item() for x in (rewards, mixed, cut)]
        table.append([kind, str(len(rows)), *(f"{share:.0f}" for share in shares), str(batch.input_ids.shape[1])])
        print(table[-1], texts[0], texts[SAMPLES], flush=True)
    print(markdown(["kind", "problems", "right, %", "mixed groups, %", "cut off, %", "longest prompt, tokens"], table))


if __name__ == "__main__":
    main()
