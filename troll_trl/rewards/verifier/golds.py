"""Gold answers: the bare answer in a text, and which texts have none."""

import re
from functools import lru_cache

from troll_trl.rewards.answers import MAX_ANSWER_CHARACTERS, extract_answer
from troll_trl.rewards.verifier.notation import normalise

# What public training sets have in place of an answer
_PLACEHOLDERS = frozenset(("proof", "notfound", "not found", "nan", "null", "n/a", "see solution"))
_PYTHON_LIST = re.compile(r"\[\s*['\"].*\]", re.DOTALL)  # ['70']


@lru_cache(maxsize=65536)
def bare_gold(gold: str) -> str | None:
    """Return the normalised answer of a gold text, which may be a worked solution that states one; `None` if it is no
    answer: empty, longer than an answer, or a placeholder (`proof`, `notfound`, `nan`, `['70']`).
    [`~troll_trl.rewards.math_accuracy_reward`] gives such a row `None`."""
    bare = (extract_answer(gold) or gold).strip()
    if len(bare) > MAX_ANSWER_CHARACTERS or _PYTHON_LIST.fullmatch(bare):
        return None
    normalised = normalise(bare)
    words = re.sub(r"\\text|[{}]", "", normalised).strip().casefold()
    return normalised if re.search(r"\w|\\", normalised) and words not in _PLACEHOLDERS else None
