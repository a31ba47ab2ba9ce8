"""The check of the kernels for `troll check`: what it finds."""

import math
import os
import subprocess
import sys

import pytest
import torch

from tests.support.limits import HANG
from tests.support.repository import ROOT
from troll_trl.kernels.dispatch import INTERPRETED, TRITON_AVAILABLE, use_triton
from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head import kernel_check as checks
from troll_trl.lm_head.kernel_check import QWEN3, Case, self_check


def test_modes(monkeypatch):
    device = torch.device("cuda")
    assert use_triton(device) == TRITON_AVAILABLE
    monkeypatch.setenv("TROLL_KERNELS", "torch")
    assert not use_triton(device)
    monkeypatch.setenv("TROLL_KERNELS", "tritn")
    with pytest.raises(ValueError, match="auto, torch, got 'tritn'"):
        use_triton(device)


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1, which the last test starts")
class TestInTheInterpreter:
    def test_every_kernel_agrees(self):
        result = self_check(torch.device("cpu"))
        assert {check.kernel for check in result} == set(checks._CHECKS) and len(result) == 16
        assert all(check.ok for check in result), result
        assert all(check.difference > 0 for check in result[:8]), "kernel and fallback round in different orders"

    def test_a_wrong_kernel_is_found(self, monkeypatch):
        right = checks.fold._fold_triton

        def wrong(tile, bias, transform, token_ids, start, state, scratch):
            right(tile, bias, transform, token_ids, start, state, scratch)
            state.sum_exp[5] *= 1.001

        def refuses(*arguments):
            raise RuntimeError("ptxas: unknown target")

        monkeypatch.setattr(checks.fold, "_fold_triton", wrong)
        monkeypatch.setattr(checks.gradient, "_gradient_triton", refuses)
        result = {check.kernel: check for check in self_check(torch.device("cpu"), [Case()])}
        assert not result["fold"].ok and 1e-5 < result["fold"].difference < 1e-2
        assert not result["gradient"].ok and "unknown target" in result["gradient"].error
        assert result["projection"].ok

    def test_wrong_token_ids_are_found(self, monkeypatch):
        right = checks.topk._choose_triton

        def wrong(blocks, bias, transform, chosen):
            right(blocks, bias, transform, chosen)
            chosen.token_ids[3, 2] += 1

        monkeypatch.setattr(checks.topk, "_choose_triton", wrong)
        assert not checks._check("choice", *checks._CHECKS["choice"], QWEN3, torch.device("cpu")).ok

    def test_a_capped_model_agrees_at_a_low_temperature(self):
        """The kernels' own tanh: 1 − exp(−2x) cancels near 0, by 3e-5 of a logit."""
        case = QWEN3._replace(vocabulary=5000, transform=LogitTransform(softcap=30.0, temperature=0.01))
        for name in ("fold", "reduce", "choice"):
            check = checks._check(name, *checks._CHECKS[name], case, torch.device("cpu"))
            assert check.ok and check.difference < checks._TOLERANCE / 4, check


@pytest.mark.parametrize("value", [math.nan, -math.inf, 2.0])
def test_a_difference_is_seen_whatever_it_is(value):
    theirs = torch.tensor([1.0, -math.inf, 4.0])
    assert checks._difference(theirs.clone(), theirs) == 0
    ours = theirs.clone()
    ours[0] = value
    assert checks._difference(ours, theirs) >= 0.25


@pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not installed (it exists for Linux only)")
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.slow
def test_checks_in_the_interpreter():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-k", "Interpreter", __file__],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
