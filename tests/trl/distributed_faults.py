"""What every rank of a two-process run does in tests/trl/test_distributed_faults.py. Run by torchrun or accelerate."""

import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
import trl_comparison
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from ranks import leave_together
from tiny import token_reward
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

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
    assert trainer.accelerator.num_processes == 2
    expected = DistributedType.FSDP if os.environ.get("FORCE_FSDP") else DistributedType.MULTI_CPU
    assert trainer.accelerator.distributed_type == expected, trainer.accelerator.distributed_type
    return trainer


def local_weights(trainer):
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
    if os.environ.get("FORCE_FSDP"):
        assert any(isinstance(p, DTensor) for p in parameters.values())
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


def inject(trainer, faults):
    """`faults` maps an update to a rank and a tensor, which is not finite there."""
    compute_loss, trls_loss, rank = trainer.compute_loss, trainer._compute_loss, trainer.accelerator.process_index

    def fault():
        where, tensor = faults.get(trainer.state.global_step + 1, (None, None))
        return tensor if where == rank else None

    def with_column(model, inputs, **kwargs):
        if (tensor := fault()) in inputs:
            row, column = inputs["completion_mask"].nonzero()[0].tolist()
            inputs = {**inputs, tensor: inputs[tensor].clone()}
            inputs[tensor][row if tensor == "advantages" else (row, column)] = math.nan
        return compute_loss(model, inputs, **kwargs)

    def with_loss(model, inputs):
        loss, tensor = trls_loss(model, inputs), fault()
        if tensor == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss * math.inf if tensor == "loss" else loss

    trainer.compute_loss, trainer._compute_loss = with_column, with_loss


def faults(folder):
    trainer = make_trainer(folder, max_steps=9, max_skipped_updates=2)
    watch = Watch(trainer)
    places = {1: (1, "loss"), 3: (0, "troll_old_log_probs"), 5: (1, "gradient"), 7: (0, "advantages"), 8: (1, "loss")}
    inject(trainer, places)
    try:
        trainer.train()
    except FloatingPointError as error:
        stopped = str(error)
    skipped = [line["troll/skipped_updates"] for line in trainer.state.log_history if "loss" in line]
    total = sum(value.double().sum().item() for value in local_weights(trainer).values())
    finite = all(bool(value.isfinite().all()) for value in local_weights(trainer).values())
    return {"moved": watch.moved, "skipped": skipped, "stopped": stopped, "finite": finite, "weights": total}


def bad_reward(folder):
    """One row of rank 1, in the second rollout batch."""
    rank, calls = int(os.environ["RANK"]), []

    def spoiled(completion_ids, **kwargs):
        calls.append(1)
        return [*token_reward(completion_ids)[:-1], math.inf if rank == 1 and len(calls) == 2 else 0.0]

    trainer = make_trainer(folder, spoiled, steps_per_generation=2, max_skipped_updates=2)
    watch = Watch(trainer)
    try:
        trainer.train()
    except FloatingPointError as error:
        return {"moved": watch.moved, "stopped": str(error)}


def resume(folder):
    """Rank by rank, the run resumed after update 3 against the uninterrupted one."""
    straight = make_trainer(folder, save_strategy="steps", save_steps=3)
    straight.train()
    (resumed := make_trainer(folder)).train(f"{folder}/checkpoint-3")
    a, b = local_weights(straight), local_weights(resumed)
    logs = [[(line["loss"], line["grad_norm"], line["troll/kl_mean"]) for line in trainer.state.log_history
             if "loss" in line] for trainer in (straight, resumed)]  # fmt: skip
    files = sorted(path.name for path in Path(folder, "checkpoint-3").glob("rollout-state-*"))
    same = all(torch.equal(a[name], b[name]) for name in a)
    return {"same_weights": same, "same_log": logs[0] == logs[1], "files": files, "lines": len(logs[1])}


def sigterm(folder):
    """To rank 1 alone."""
    trainer = make_trainer(folder, save_strategy="steps", save_steps=100)

    class Send(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(Send())
    try:
        trainer.train()
    except SystemExit as stop:
        return {
            "code": stop.code,
            "step": trainer.state.global_step,
            "found": make_trainer(folder).find_checkpoint(True),
        }


def missing_file(folder):
    """Rank 1's file is gone: rank 0 must not use its own."""
    (trainer := make_trainer(folder, save_strategy="steps", save_steps=3, max_steps=3)).train()
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.process_index == 1:
        Path(folder, "checkpoint-3", "rollout-state-1-of-2.pt").unlink()
        Path(folder, "checkpoint-3", "complete.json").unlink()
    trainer.accelerator.wait_for_everyone()
    (resumed := make_trainer(folder)).train(f"{folder}/checkpoint-3")
    return {"step": resumed.state.global_step}


def raises(folder):
    def broken(completion_ids, **kwargs):
        if os.environ["RANK"] == "1":
            raise KeyError("the answer column is missing")
        return token_reward(completion_ids)

    make_trainer(folder, broken).train()


def dies(folder):
    def deadly(completion_ids, **kwargs):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return token_reward(completion_ids)

    make_trainer(folder, deadly, save_strategy="steps").train()  # with the handler of SIGTERM


def main(output: Path, names: list[str]):
    for name in names:
        result = globals()[name](output / name)
        (output / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave_together()
