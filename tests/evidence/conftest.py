"""What makes the study's statistics cheap."""

import pytest

from evidence import tables


@pytest.fixture
def few_flips(monkeypatch):
    """Of signs, where no p-value is looked at that is nearly as small as one of all flips."""
    monkeypatch.setattr(tables, "FLIPS", 1 << 12)
