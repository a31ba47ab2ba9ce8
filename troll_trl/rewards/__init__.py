"""The reward functions, the answer in a text, and the verifier. Imports neither torch nor another package of ours,
because worker processes load it."""

from troll_trl.rewards.answers import extract_answer
from troll_trl.rewards.functions import answer_format_reward, math_accuracy_reward
from troll_trl.rewards.verifier import verify

__all__ = ["answer_format_reward", "extract_answer", "math_accuracy_reward", "verify"]
