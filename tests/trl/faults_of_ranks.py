"""What every rank of a two-process run does in tests/trl/test_faults_of_ranks.py. Called, or run by accelerate."""

import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tests import trl_comparison
from tests.support.ranks import leave_together
from tests.tiny import token_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def config(**options):
    args = TrollGRPOConfig(**options)
    if os.environ.get("FORCE_FSDP"):  # accelerate turns it on for accelerators only
        assert args.device.type == "cpu"  # creates the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def make_trainer(folder, function=token_reward, **options):
    own = {"per_device_train_batch_size": 4, "learning_rate": 2e-2, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    own |= {"max_steps": 6, "kl_bound": 0.01, "ddp_find_unused_parameters": False}
    trainer = trl_comparison.make_trainer(TrollGRPOTrainer, config, folder, reward=function, **own | options)
    expected = DistributedType.FSDP if os.environ.get("FORCE_FSDP") else DistributedType.MULTI_CPU
    assert trainer.accelerator.distributed_type == expected and trainer.accelerator.num_processes == 2
    return trainer


def local_weights(trainer):
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in parameters.items()}


class Watch(TrainerCallback):
    """After which updates this rank's weights were others."""

    def __init__(self, trainer):
        self.trainer, self.moved, self.before = trainer, [], None
        trainer.add_callback(self)

    def on_step_begin(self, *args, **kwargs):
        self.before = local_weights(self.trainer)

    def on_step_end(self, *args, **kwargs):
        after = local_weights(self.trainer)
        self.moved.append(any(not torch.equal(after[name], self.before[name]) for name in after))


def faults(folder):
    """A loss, an entry of the rollout batch, a gradient, and a reward of one rank are not finite."""

    def reward(completion_ids, **kwargs):
        calls.append(1)
        return [*token_reward(completion_ids)[:-1], math.inf if len(calls) == 3 and rank == 1 else 0.0]

    calls = []
    trainer = make_trainer(folder, reward, max_steps=12, max_skipped_updates=2)
    watch, rank = Watch(trainer), trainer.accelerator.process_index
    compute_loss, trls_loss = trainer.compute_loss, trainer._compute_loss
    at = lambda update, bad_rank: trainer.state.global_step + 1 == update and rank == bad_rank

    def with_column(model, inputs, **kwargs):
        if at(3, 0):
            inputs["old_sparse_logps"][tuple(inputs["completion_mask"].nonzero()[0].tolist())] = math.nan
        return compute_loss(model, inputs, **kwargs)

    def with_loss(model, inputs):
        loss = trls_loss(model, inputs)
        if at(5, 1):
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss * math.inf if at(1, 1) else loss

    trainer.compute_loss, trainer._compute_loss = with_column, with_loss
    try:
        trainer.train()
    except FloatingPointError as error:
        stopped = str(error)
    skipped = [line["troll/skipped_updates"] for line in trainer.state.log_history if "loss" in line]
    finite = all(bool(value.isfinite().all()) for value in local_weights(trainer).values())
    return {"moved": watch.moved, "skipped": skipped, "stopped": stopped, "finite": finite}


def resume(folder):
    """Rank by rank, the run resumed after update 3 against the uninterrupted one."""
    (straight := make_trainer(folder, save_strategy="steps", save_steps=3)).train()
    (resumed := make_trainer(folder)).train(f"{folder}/checkpoint-3")
    logs = [[(line["loss"], line["grad_norm"], line["troll/kl_mean"]) for line in trainer.state.log_history
             if "loss" in line] for trainer in (straight, resumed)]  # fmt: skip
    files = sorted(path.name for path in Path(folder, "checkpoint-3").glob("rollout-state-*"))
    a, b = local_weights(straight), local_weights(resumed)
    same = all(torch.equal(a[name], b[name]) for name in a)
    return {"same": same and logs[0] == logs[1], "files": files, "lines": len(logs[1])}


def sigterm(folder):
    """To rank 1 alone. Then its file is gone: rank 0 must not use its own."""
    trainer = make_trainer(folder, save_strategy="steps", save_steps=100)

    class Send(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(Send())
    try:
        trainer.train()
    except SystemExit as stop:
        code = stop.code
    resumed = make_trainer(folder)
    found = resumed.find_checkpoint(True)
    if trainer.accelerator.process_index == 1:
        Path(found, "rollout-state-1-of-2.pt").unlink()
        Path(found, "complete.json").unlink()
    trainer.accelerator.wait_for_everyone()
    resumed.train(found)
    return {"code": code, "found": Path(found).name, "step": resumed.state.global_step}


def main(output: Path, names: list[str]):
    for name in names:
        result = globals()[name](output / name)
        (output / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave_together()
