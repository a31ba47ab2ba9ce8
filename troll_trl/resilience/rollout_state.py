"""What a resumed run needs next to TRL's checkpoint: tensors and JSON in a safetensors file.

The file of every rank holds counters and, if the checkpoint was taken between the updates of a rollout batch, the batch
with its old policy. Its size is that of the batch: for a token with k kept ones 8·k + 8 bytes of the old policy, and,
padding included, 24 to 32 for ids, mask and log-probabilities.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from troll_trl.trust_region.ragged import RaggedDistribution

Batches = list[dict[str, Any]]


def file_name(rank: int, ranks: int) -> str:
    """Name of a rank's file in a checkpoint folder."""
    return f"rollout-state-{rank}-of-{ranks}.safetensors"


def save(path: Path, info: dict[str, Any], batches: Batches | None) -> None:
    """Write the state of this rank: `info`, which JSON can hold (NaN and infinities included), and TRL's buffer, one
    dictionary per micro-batch, of tensors, [`RaggedDistribution`]s and what JSON can hold."""
    tensors: dict[str, torch.Tensor] = {}
    others: Batches | None = None
    if batches is not None:
        others = [{} for _ in batches]
        for i, batch in enumerate(batches):
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"batch/{i}/{name}"] = value
                elif isinstance(value, RaggedDistribution):
                    others[i][name] = {"width": value.width}
                    tensors |= {f"ragged/{i}/{field}/{name}": tensor for field, tensor in value.tensors.items()}
                else:
                    others[i][name] = value
    # A copy each: micro-batches are views of one rollout batch, and safetensors takes no shared memory
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    text = json.dumps({**info, "batches": others})
    save_file(tensors, path, metadata={"info": text})


def load(path: Path, device: torch.device) -> tuple[dict[str, Any], Batches | None]:
    """Read what [`save`] wrote. Tensors go to the device; a [`RaggedDistribution`] stays on the host."""
    with safe_open(path, framework="pt", device="cpu") as file:
        info = json.loads(file.metadata()["info"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    batches = info.pop("batches")
    for name, value in tensors.items():
        if name.startswith("batch/"):
            _, i, column = name.split("/", 2)
            batches[int(i)][column] = value.to(device)
        elif name.startswith("ragged/"):
            _, i, field, column = name.split("/", 3)
            batches[int(i)][column][field] = value
    for batch in batches or ():
        ragged = {name: RaggedDistribution(**value) for name, value in batch.items() if isinstance(value, dict)}
        batch |= {name: value.to_host_of(device) for name, value in ragged.items()}
    return info, batches
