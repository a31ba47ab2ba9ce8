"""The compatibility table lists every option once, and the tests that it names exist."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOTrainer, RLOOTrainer

from troll_trl import TrollGRPOConfig, TrollRLOOConfig

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
TABLE = (DOCS / "compatibility.md").read_text(encoding="utf-8")

# What the tables name beside options
OTHER_NAMES = {"lm_head", "nn.DataParallel", "modules_to_save", "env_mask", "log_metric", "log_extra", "None", "eager"}


def named_options():
    """Backticked names of the first column of the tables, and of the text below the last table."""
    listed = []
    tables, _, rest = TABLE.partition("## Everything around the loss")
    for line in tables.splitlines():
        if line.startswith("| ") and "|---" not in line:
            listed += re.findall(r"`([^`]+)`", line.split("|")[1])
    listed += re.findall(r"`([^`]+)`", rest.partition("## Advantage estimators")[0])
    return [name for name in listed if name not in OTHER_NAMES]


def all_options():
    options = {option.name for config in (TrollGRPOConfig, TrollRLOOConfig) for option in fields(config)}
    for trainer in (GRPOTrainer, RLOOTrainer):
        options |= set(inspect.signature(trainer.__init__).parameters) - {"self"}
    return options


def test_every_option_is_in_the_table_and_no_other():
    listed = named_options()
    assert set(listed) - all_options() == set()
    assert all_options() - set(listed) == set()
    # `loss_type` is partly refused; `gradient_accumulation_steps` stands beside what it is compared with
    repeated = {name for name in listed if listed.count(name) > 1}
    assert repeated == {"loss_type", "gradient_accumulation_steps"}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_named_tests_exist(page):
    for file, name in re.findall(r"(test_\w+\.py)::(\w+)", page.read_text(encoding="utf-8")):
        assert re.search(rf"def {name}\(", (TESTS / file).read_text(encoding="utf-8")), f"{file}::{name}"
