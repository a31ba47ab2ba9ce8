"""The reward functions, the answer in a text, and the verifier. Imports neither torch nor another package of ours,
because worker processes load it."""

from math_answers.rewards.answers import extract_answer, opened_thought
from math_answers.rewards.functions import answer_format_reward, math_accuracy_reward
from math_answers.rewards.verifier.golds import is_no_answer

__all__ = ["answer_format_reward", "extract_answer", "is_no_answer", "math_accuracy_reward", "opened_thought"]
