"""The reward functions, the answer in a text, and the verifier.
Imports neither torch nor another room: worker processes load it."""

from troll_trl.rewards.answers import extract_answer, last_boxed
from troll_trl.rewards.functions import answer_format_reward, is_parsable, math_accuracy_reward, plain_number
from troll_trl.rewards.verifier import MAX_ANSWER_CHARACTERS, is_correct

__all__ = [
    "MAX_ANSWER_CHARACTERS",
    "answer_format_reward",
    "extract_answer",
    "is_correct",
    "is_parsable",
    "last_boxed",
    "math_accuracy_reward",
    "plain_number",
]
