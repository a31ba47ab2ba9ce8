"""Completions with thoughts, and a tokenizer in which the tags of thoughts are special tokens."""

from troll_trl.small_models import make_tokenizer

TAGS = ["<|channel|>", "<|message|>", "[THINK]", "[/THINK]", "<think>", "</think>", "<|think|>", "<|content|>"]
TAGS += ["<|channel>", "<channel|>", "<|START_THINKING|>", "<|END_THINKING|>", "<answer>", "</answer>", "<|end|>"]
TAGS += ["<|inner_prefix|>", "<|inner_suffix|>"]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|channel|>final<|message|>"
# The gold answer is 4; with the right rewards
THOUGHTS = [
    (rf"{ANALYSIS}So \boxed{{4}}, but wait", 0.0),
    (rf"{ANALYSIS}So \boxed{{4}}.{FINAL}The answer is 5.", 0.0),
    (rf"{ANALYSIS}So \boxed{{5}}.{FINAL}The answer is 4.", 1.0),
    (r"[THINK]So \boxed{4}, but wait", 0.0),
    (r"<think>So \boxed{4}, but wait", 0.0),
    (r"[THINK]So \boxed{4}.[/THINK]The answer is 5.", 0.0),
    (r"<think>So \boxed{4}.</think>I do not know.", 0.0),
    (r"<|channel>thought So \boxed{5}.<channel|>The answer is 4.", 1.0),
    (r"<|channel>thought So \boxed{4}, but wait", 0.0),
    (r"<|START_THINKING|>So \boxed{5}.<|END_THINKING|>The answer is 4.", 1.0),
    (r"<|inner_prefix|>So \boxed{5}.<|inner_suffix|>The answer is 4.", 1.0),
    (r"<|inner_prefix|>So \boxed{4}, but wait", 0.0),
    (r"<|think|>So \boxed{5}.<|end|><|content|>The answer is 4.", 1.0),
    ("It is 5. <answer>4</answer>", 1.0),
    (r"So \boxed{4}.<|end|>", 1.0),
]
# After a prompt that ends with <think>
OPENED = [(r"Well.</think>The answer is \boxed{4}.", 1.0), (r"Well, \boxed{4}, but wait", 0.0)]


def thinking_tokenizer(special: bool = True, opens: str = ""):
    """A tokenizer of bytes and tags, special tokens or not, whose template ends with the tag `opens`."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": TAGS}) if special else tokenizer.add_tokens(TAGS)
    tokenizer.chat_template += opens
    return tokenizer
