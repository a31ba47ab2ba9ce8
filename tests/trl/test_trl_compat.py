"""A TRL that lacks a private name is refused by that name, and one that was not tested is warned of."""

import pytest
import trl
from trl import GRPOTrainer

from tests.trl_comparison import make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def test_a_missing_private_name_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(ImportError, match=r"GRPOTrainer\._get_per_token_logps_and_entropies"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)


def test_a_version_that_was_not_tested_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with caplog.at_level("WARNING"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path)
    assert "trl 1.99.0" in caplog.text and "`troll check`" in caplog.text
