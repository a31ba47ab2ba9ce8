"""Tiny models and a tokenizer, built in memory: nothing is downloaded."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = [f"w{i}" for i in range(97)]
SIZES = {
    **{"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1},
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_config(architecture: str = "qwen3", **overrides):
    options = SIZES | {"tie_word_embeddings": True} | overrides
    return (Qwen3Config if architecture == "qwen3" else LlamaConfig)(**options)


def tiny_model(architecture: str = "qwen3", seed: int = 0, spread: float = 6.0, **overrides):
    """A random model whose next-token distributions are neither uniform nor one-hot."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **overrides)
    model = (Qwen3ForCausalLM if architecture == "qwen3" else LlamaForCausalLM)(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread)
    return model


def certain_model():
    """A model with an entropy of 0.9 nats, whose probabilities move by more than a bound."""
    return tiny_model(spread=25.0)


def saved_model(folder, *args, **options) -> str:
    """A tiny model and its tokenizer in a folder: a reference model is loaded from where the model came from."""
    tiny_model(*args, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_prompts(rows: int = 32) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(WORDS), (rows, 5), generator=generator)
    return Dataset.from_dict({"prompt": [" ".join(WORDS[i] for i in row[: 3 + r % 3]) for r, row in enumerate(ids)]})


@torch.no_grad()
def padded_logits(model, rows: list[list[int]]) -> torch.Tensor:
    """Float32 logits `(B, T, V)` of one batch, padded on the right, where no token looks."""
    return model(pad_sequence([torch.tensor(row) for row in rows], batch_first=True)).logits.float()


def sample_tokens(logits, rows: list[list[int]], counts: list[int], generator: torch.Generator) -> list[list[int]]:
    """Samples as many tokens as `counts` says after each of the rows, at once. `logits` gets rows and their numbers."""
    rows, starts, left = [*map(list, rows)], [*map(len, rows)], {n: count for n, count in enumerate(counts) if count}
    while left:
        for number, scores in zip([*left], logits([rows[n] for n in left], [*left]), strict=True):
            probabilities = scores[len(rows[number]) - 1].softmax(-1)
            rows[number].append(torch.multinomial(probabilities, 1, generator=generator).item())
        left = {number: count - 1 for number, count in left.items() if count > 1}
    return [row[start:] for row, start in zip(rows, starts, strict=True)]


def token_reward(completion_ids, **kwargs) -> list[float]:
    """A deterministic reward that differs between completions."""
    return [sum((7 * token) % 13 for token in ids) / (13 * len(ids)) for ids in completion_ids]
