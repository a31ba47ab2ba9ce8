"""`troll check` finds what is broken."""

import os

import pytest
import torch

from tests.tiny import saved_model
from troll_trl.cli import check
from troll_trl.lm_head import kernel_check
from troll_trl.trainers.grpo import TrustRegionGRPO


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        check.main(words)
    return end.value.code, capsys.readouterr().out.splitlines()


def test_all_is_well(tmp_path, capsys):
    code, lines = run(capsys, "--model", saved_model(tmp_path))
    assert any(line.startswith("- TRL version: ") for line in lines)
    assert code == 0 and [line.split()[:2] for line in lines[-3:]] == [
        ["kernels", "ok"],
        ["head", "ok"],
        ["loss", "ok"],
    ]


def test_a_broken_kernel_fails(monkeypatch):
    """On a machine whose accelerator runs the kernels, one of them gives wrong numbers."""
    monkeypatch.setattr("troll_trl.kernels.dispatch.use_triton", lambda device: True)

    def wrong(case, device):
        without_kernels = os.environ.get("TROLL_KERNELS") == "torch"
        return [(torch.full((3,), 1.5 if without_kernels else 1.0), 1e-5)]

    monkeypatch.setattr(kernel_check, "_PASSES", {"training": wrong})
    ok, detail = check.check_kernels()
    assert not ok and "training" in detail


def test_a_wrong_loss_fails(capsys, monkeypatch):
    right = TrustRegionGRPO._score_policy

    def wrong(*args):
        log_probs, *others = right(*args)
        return 1.1 * log_probs, *others

    monkeypatch.setattr(TrustRegionGRPO, "_score_policy", wrong)
    code, lines = run(capsys)
    assert code == 1 and [line.split()[1] for line in lines[-3:]] == ["ok", "ok", "FAILS"]
