"""Makes small models for the quickstart, `troll check` and the studies in `evidence/`: a tokenizer, random weights, and
a supervised warm-up until the model solves some problems."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

WARM_UP_SUCCESS = 0.35  # high enough that a group of completions usually has both right and wrong ones
WARM_UP_BATCH = 256
MAX_WARM_UP_STEPS = 1500
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def write_problems(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))


def make_tokenizer(phrases: Sequence[str] = ("What is ",)) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with Qwen3's chat markers, and one token for each phrase and fixed part of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["user\n", "assistant\n", *phrases, "Answer: "])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, architecture: type[PreTrainedConfig] = Qwen3Config, **sizes: int
) -> PreTrainedModel:
    """Make a model of `architecture` with random weights. `sizes` override the quickstart's."""
    config = architecture(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES | sizes,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels `(problems, length)`. Labels are −100 except on the target text: a problem's solution
    or, without one, its answer."""
    chats = [[{"role": "user", "content": row["problem"]}] for row in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    answers = [row.get("solution", f"Answer: {row['answer']}") + tokenizer.eos_token for row in problems]
    prompt_ids, answer_ids = tokenizer(prompts).input_ids, tokenizer(answers).input_ids
    pairs = list(zip(prompt_ids, answer_ids, strict=True))
    input_ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs]
    return pad_sequence(input_ids, True, tokenizer.pad_token_id), pad_sequence(labels, True, -100)


def warm_up(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    target: float = WARM_UP_SUCCESS,
    learning_rate: float = 4e-3,
) -> None:
    """Train with supervision until a sampled answer is right with an average probability of `target`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    success = 0.0
    start = time.monotonic()
    for step in range(1, MAX_WARM_UP_STEPS + 1):
        rows = torch.randint(len(input_ids), (WARM_UP_BATCH,))
        logits = model(input_ids=input_ids[rows]).logits[:, :-1]
        targets = labels[rows, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # 0 at −100
        (losses.sum() / (targets != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # Expected success of sampling at temperature 1: the probability of the right answer, averaged over recent
        # batches
        success = 0.8 * success + 0.2 * losses.detach().sum(1).neg().exp().mean().item()
        if step % 50 == 0 or success >= target:
            taken = divmod(round(time.monotonic() - start), 60)
            progress = f"step {step} of at most {MAX_WARM_UP_STEPS}, {taken[0]}:{taken[1]:02}"
            print(f"  {progress}: solves {success:.0%}, target {target:.0%}", flush=True)
        if success >= target:
            return
    raise RuntimeError(
        f"The warm-up reached a success rate of {success:.0%} in {MAX_WARM_UP_STEPS} steps, not {target:.0%}. "
        "Try another --seed."
    )
