"""The check of the kernels for `troll check`: what it finds."""

import math

import pytest
import torch

from troll_trl.kernels import blocks, fold, gradient, outcomes, projection, topk
from troll_trl.kernels.dispatch import INTERPRETED, TRITON_AVAILABLE, use_triton
from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head import kernel_check as checks
from troll_trl.lm_head.kernel_check import self_check


def test_modes(monkeypatch):
    device = torch.device("cuda")
    assert use_triton(device) == TRITON_AVAILABLE
    monkeypatch.setenv("TROLL_KERNELS", "torch")
    assert not use_triton(device)
    monkeypatch.setenv("TROLL_KERNELS", "tritn")
    with pytest.raises(ValueError, match="auto, torch, got 'tritn'"):
        use_triton(device)


FEW = checks.SMALL._replace(vocabulary=1003, support_size=12, tokens=6)


def wrapped(monkeypatch, module, name, change):
    """Let `change` spoil what the kernel `name` of `module` wrote or returned; `None` keeps what it returned."""
    right = getattr(module, name)

    def wrong(*arguments):
        result = right(*arguments)
        changed = change(result, *arguments)
        return result if changed is None else changed

    monkeypatch.setattr(module, name, wrong)


def spoil_fold(_, tile, bias, transform, token_ids, start, state, scratch):
    state.sum_exp.mul_(1.02)


def spoil_one_block(_, blocks, *others):
    blocks.sum_exp[:, 7] *= 1.02


def spoil_chosen_ids(_, blocks, bias, transform, chosen):
    chosen.token_ids[3, 2] += 1


def spoil_gradient(_, tile, *others):
    tile.mul_(1.02)


SPOILED = {
    "scoring": [
        (blocks, "_reduce_triton", spoil_one_block),
        (topk, "_choose_triton", spoil_chosen_ids),
    ],
    "training": [
        (fold, "_fold_triton", spoil_fold),
        (gradient, "_gradient_triton", spoil_gradient),
        (outcomes, "_outcomes_triton", lambda result, *_: (result[0], result[1], 1.02 * result[2])),
    ],
    "projection": [(projection, "project_rows_backward", lambda result, *_: 1.001 * result)],
}


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1, which test_kernels.py starts")
class TestInTheInterpreter:
    def test_every_pass_agrees(self):
        result = self_check(torch.device("cpu"))
        assert [check.name for check in result] == 2 * ["scoring", "training", "projection"]
        assert all(check.ok for check in result), result
        assert all(check.difference > 0 for check in result), "kernels and PyTorch round in different orders"

    @pytest.mark.parametrize(
        ("name", "module", "kernel", "change"),
        [(name, *spoiled) for name, of_name in SPOILED.items() for spoiled in of_name],
    )
    def test_a_wrong_kernel_is_found(self, name, module, kernel, change, monkeypatch):
        wrapped(monkeypatch, module, kernel, change)
        assert [check.name for check in self_check(torch.device("cpu"), (FEW,)) if not check.ok] == [name]

    def test_a_kernel_that_does_not_run_is_named_with_its_error(self, monkeypatch):
        def refuses(*arguments):
            raise RuntimeError("ptxas: unknown target")

        monkeypatch.setattr(gradient, "_gradient_triton", refuses)
        result = {check.name: check for check in self_check(torch.device("cpu"), (FEW,))}
        assert not result["training"].ok and "unknown target" in result["training"].error
        assert result["projection"].ok

    def test_a_capped_model_agrees_at_a_low_temperature(self):
        """The kernels' own tanh: 1 − exp(−2x) cancels near 0, by 3e-5 of a logit."""
        case = checks.QWEN3._replace(vocabulary=5000, transform=LogitTransform(softcap=30.0, temperature=0.01))
        for check in self_check(torch.device("cpu"), (case,)):
            assert check.ok and check.difference < 1 / 4, check


@pytest.mark.parametrize("value", [math.nan, -math.inf, 2.0])
def test_a_difference_is_seen_whatever_it_is(value):
    theirs = torch.tensor([1.0, -math.inf, 4.0])
    assert checks._difference(theirs.clone(), theirs) == 0
    ours = theirs.clone()
    ours[0] = value
    assert checks._difference(ours, theirs) >= 0.25
