"""check_steps(): tries TRL's `_prepare_inputs`, which shuffles and splits a rollout batch and reads `_step`."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerState

from troll_trl.trainers.old_policy import OLD_POLICY_KEY
from troll_trl.trainers.probe import owner_of, probe_of
from troll_trl.trainers.trl_compat import RESUME, unsupported, warn_of

# Made-up numbers, no two of them equal: micro-batches of a rollout batch, passes over it, and micro-batches of an
# update
_MICRO_BATCHES, _PASSES, _ACCUMULATED = 3, 4, 2
_CYCLE = _MICRO_BATCHES * _PASSES
_MIDDLE, _END = _MICRO_BATCHES + 2, _CYCLE + 2


def check_steps(trainer: Any, switched_off: frozenset[str]) -> frozenset[str]:
    """
    Return what is switched off. Exact resuming joins it, after a warning, unless `_step` counts the micro-batches of a
    training, and TRL takes from it when to generate and which micro-batch of `_buffered_inputs` comes next.

    TRL's `_prepare_inputs` and `training_step` run on a copy of the trainer's attributes, with made-up rollout batches:
    to the middle of the first, and from there into the second, as a run resumes with its rollout batch and without.

    Raises:
        ImportError: TRL shuffles or splits the lists of a rollout batch in another way than its tensors. The old
            policy is such a list, and would belong to other completions.
    """
    owner = owner_of(trainer)
    try:
        fault = _fault(trainer, owner)
    except ImportError:
        raise
    except Exception as error:  # whatever TRL's methods raise if they read what the copy lacks
        fault = (
            f"`{owner.__name__}._prepare_inputs` and `training_step` cannot be tried: {type(error).__name__}: {error}"
        )
    if fault is not None and RESUME not in switched_off:
        warn_of({RESUME: unsupported(owner, fault)})
        switched_off |= {RESUME}
    return switched_off


def _fault(trainer: Any, owner: type) -> str | None:
    """A sentence on what has moved, or `None`."""
    expected = [(n % _CYCLE == 0, n % _MICRO_BATCHES, n + 1) for n in range(_END)]
    with torch.random.fork_rng(devices=[]):  # TRL shuffles a rollout batch
        begun = _Simulation(trainer, owner)
        found = begun.train(_MIDDLE)
        found += _Simulation(trainer, owner, _MIDDLE, begun.probe._buffered_inputs).train(_END)
        found += _Simulation(trainer, owner, _MIDDLE).train(_END)  # without the batch, it generates at once
    expected += [(True, *expected[_MIDDLE][1:]), *expected[_MIDDLE + 1 :]]
    for (new, number, step), wanted in zip(found, expected, strict=True):
        if (new, number, step) != wanted:
            said = lambda new: "generated" if new else "did not generate"
            return (
                f"`{owner.__name__}._step` has another meaning. After {wanted[2]} micro-batches of a training it is "
                f"{step}; TRL {said(new)} for the last one, number {number} of its rollout batch. Expected: "
                f"{wanted[2]}; TRL {said(wanted[0])}, number {wanted[1]}"
            )
    return None


class _Simulation:
    """A training of TRL's class `owner` without model, data and optimizer, from a state as [`load_state`] sets it."""

    def __init__(self, trainer: Any, owner: type, step: int = 0, batches: list[Any] | None = None):
        self.owner, self.taken, self.generated = owner, step, 0
        stubs = {"_generate_and_score_completions": self._generate}
        self.probe = probe = probe_of(trainer, owner, stubs, {"training_step": lambda *args, **kwargs: torch.zeros(())})
        probe.args = copy.copy(trainer.args)
        probe.args.report_to = []  # TRL reports how long `_prepare_inputs` takes
        probe.args.steps_per_generation, probe.args.gradient_accumulation_steps = _MICRO_BATCHES, _ACCUMULATED
        probe.args.num_iterations = probe.num_iterations = _PASSES
        probe.current_gradient_accumulation_steps = _ACCUMULATED
        probe.model, probe.state = SimpleNamespace(training=True), TrainerState(global_step=step // _ACCUMULATED)
        if step:
            probe._step, probe._buffered_inputs = step, batches

    def _generate(self, *args, **kwargs) -> dict[str, Any]:
        self.generated += 1
        rows = range(8 * _MICRO_BATCHES)
        return {"completion_ids": torch.tensor(rows).unsqueeze(1), OLD_POLICY_KEY: [*rows]}

    def train(self, until: int) -> list[tuple[bool, int, int]]:
        """For each micro-batch: whether TRL generated for it, its number in the rollout batch, and `_step` after it."""
        seen, accelerator = [], self.probe.accelerator
        synced = accelerator.sync_gradients
        try:
            while self.taken < until:
                before = self.generated
                inputs = self.probe._prepare_inputs({})
                if inputs[OLD_POLICY_KEY] != inputs["completion_ids"].flatten().tolist():
                    what = (
                        f"`{self.owner.__name__}._prepare_inputs` shuffles or splits lists in another way than tensors"
                    )
                    raise ImportError(unsupported(self.owner, what))
                number = [batch is inputs for batch in self.probe._buffered_inputs].index(True)
                self.taken += 1
                accelerator.sync_gradients = self.taken % _ACCUMULATED == 0
                self.probe.training_step(None, inputs, None)
                self.probe.state.global_step = self.taken // _ACCUMULATED
                seen.append((self.generated > before, number, self.probe._step))
        finally:
            accelerator.sync_gradients = synced
        return seen
