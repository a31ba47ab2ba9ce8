"""The check of the kernels for `troll check`: what it finds."""

import math
import os
import subprocess
import sys

import pytest
import torch
from limits import HANG
from repository import ROOT

from troll_trl.kernels.dispatch import INTERPRETED, TRITON_AVAILABLE, use_triton
from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head import kernel_check as checks
from troll_trl.lm_head.kernel_check import Case, self_check

# As of Qwen3-0.6B with the defaults; float32 and a bound that is open; the least and the most slots
PLAIN = LogitTransform(temperature=0.7)
RUNS = [
    Case(151_936, 64, torch.bfloat16, PLAIN, bias=False, rows=5, chunk=32_768),
    Case(331, 64, torch.float32, PLAIN, bias=False, kl_bound=math.inf, rows=5, chunk=32_768),
    Case(331, 1, torch.float16, PLAIN, bias=True, rows=5, chunk=32_768),
    Case(1000, 600, torch.bfloat16, PLAIN, bias=False, rows=2, chunk=32_768),
]


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
        result = self_check(torch.device("cpu"), [Case()])
        assert {check.kernel for check in result} == set(checks._CHECKS) and len(result) == 8
        assert all(check.ok and 0 < check.difference < 1e-2 and not check.error for check in result), result

    @pytest.mark.parametrize("case", RUNS, ids=lambda case: f"{case.slots}-{case.vocabulary}-{case.dtype}")
    def test_every_kernel_agrees_on_what_a_run_asks(self, case):
        result = [checks._check(name, *how, case, torch.device("cpu")) for name, how in checks._CHECKS.items()]
        assert len(result) == 8 and all(check.ok for check in result), result

    def test_a_low_temperature_leaves_as_much_room(self):
        """With logits of 290 float32's own steps took the whole tolerance, and on an H100 more."""
        case = RUNS[0]._replace(transform=LogitTransform(temperature=0.05))
        choice = checks._check("choice", *checks._CHECKS["choice"], case, torch.device("cpu"))
        assert choice.ok and choice.difference < checks._TOLERANCE / 10, choice

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

    @pytest.mark.parametrize(
        ("name", "module", "which"),
        [
            ("support", "support._settle", 2),
            ("outcomes", "outcomes._outcomes", 3),
            ("coefficients", "coefficients._coefficients", 4),
        ],
    )
    def test_every_output_of_a_small_kernel_counts(self, monkeypatch, name, module, which):
        module, function = module.split(".")
        module = getattr(checks, module)
        right = getattr(module, f"{function}_triton")
        for output in range(which):

            def wrong(*arguments, output=output):
                result = list(right(*arguments))
                if result[output] is not None:
                    result[output] = result[output].clone()
                    result[output].view(-1)[1 if output == 0 else 0] += 1
                return result

            monkeypatch.setattr(module, f"{function}_triton", wrong)
            for case in (Case(), RUNS[0]):
                assert not checks._check(name, *checks._CHECKS[name], case, torch.device("cpu")).ok, output

    def test_rounding_keeps_no_other_number_of_tokens_in_the_check(self, monkeypatch):
        """Rounding decides where the kept mass is within some 1e-6 of its limit."""
        settle = checks.support._settle_torch

        def with_slack(*given):
            fewer, more = (settle(*given[:-1], given[-1] + slack)[0] for slack in (1e-5, -1e-5))
            assert torch.equal(fewer, more)
            return settle(*given)

        monkeypatch.setattr(checks.support, "_settle_torch", with_slack)
        monkeypatch.setattr(checks.support, "_settle_triton", settle)
        for rows in (5, 37):
            for slots in range(8, 258, 8):
                checks._check_support(Case(slots=slots, rows=rows), torch.device("cpu"))

    def test_wrong_token_ids_are_found(self, monkeypatch):
        """The check once compared the fallback's ids with themselves."""
        right = checks.topk._choose_triton

        def wrong(blocks, bias, transform, chosen):
            right(blocks, bias, transform, chosen)
            chosen.token_ids[3, 2] += 1

        monkeypatch.setattr(checks.topk, "_choose_triton", wrong)
        assert not checks._check("choice", *checks._CHECKS["choice"], RUNS[0], torch.device("cpu")).ok

    @pytest.mark.parametrize("temperature", [0.05, 0.01])
    def test_a_capped_model_agrees_at_a_low_temperature(self, temperature):
        """The kernels' tanh was off by 3e-5 of a logit near 0, where 1 − exp(−2x) cancels."""
        transform = LogitTransform(softcap=30.0, temperature=temperature)
        case = RUNS[0]._replace(vocabulary=5000, transform=transform)
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
