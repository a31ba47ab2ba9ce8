"""
Real problems (GSM8K, MATH-500 and others), in the schemas of the hub.

The environment variable `TROLL_TEST_DATA` names a folder with the complete sets, one folder each with `train.jsonl` or
`test.jsonl`. Without it the tests run on the sample in `tests/data`, so that no clone skips them.
"""

import os
from pathlib import Path

from tests.support.repository import TESTS

FOLDER = os.environ.get("TROLL_TEST_DATA")
COMPLETE = bool(FOLDER)
DATA = Path(FOLDER).resolve() if FOLDER else TESTS / "data"

# How many problems each file holds
SIZES = (
    {
        ("gsm8k", "train"): 7473,
        ("gsm8k", "test"): 1319,
        ("math500", "test"): 500,
        ("aime24", "test"): 30,
        ("dapo", "train"): 12,
    }
    if COMPLETE
    else {("gsm8k", "train"): 40, ("gsm8k", "test"): 30, ("math500", "test"): 30, ("dapo", "train"): 3}
)

for _name, _split in SIZES:
    if not (DATA / _name / f"{_split}.jsonl").is_file():
        raise FileNotFoundError(
            f"No {_name}/{_split}.jsonl in {DATA}, which TROLL_TEST_DATA names. Unset it to test on a sample."
        )
