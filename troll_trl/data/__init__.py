"""Problems with their gold answers: from a hub or a file to prompts, checked. May import `rewards`."""

from troll_trl.data.loading import load_math_dataset

__all__ = ["load_math_dataset"]
