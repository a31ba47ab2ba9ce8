"""What a resumed run needs beyond TRL's checkpoint to be the uninterrupted one: tensors and JSON in a safetensors file.

The file of every rank holds the states of its random generators, the counters of a step and, if the checkpoint was
taken between the updates of a rollout batch, the batch with its old policy. Its size is that of the batch: for a token
with k kept ones 8·k + 8 bytes of the old policy, and, padding included, 24 to 32 for ids, mask and log-probabilities.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from troll_trl.trust_region.ragged import RaggedDistribution

Batches = list[dict[str, Any]]

# What the saved rollout batch must agree with: its cut into updates, and what its log-probabilities were computed by.
# RLOO has not all of them.
_LAYOUT = (
    *("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "temperature", "cast_lm_head_to_fp32", "bf16", "fp16", "use_vllm"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)


def file_name(rank: int, ranks: int) -> str:
    """Name of a rank's file in a checkpoint folder."""
    return f"rollout-state-{rank}-of-{ranks}.safetensors"


def save(path: Path, info: dict[str, Any], batches: Batches | None) -> None:
    """Write the state of this rank: `info`, which JSON can hold (NaN and infinities included), and TRL's buffer, one
    dictionary per micro-batch, of tensors, [`RaggedDistribution`]s and what JSON can hold."""
    tensors, generator_info = _generator_states()
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
    text = json.dumps({**info, "generators": generator_info, "batches": others})
    save_file(tensors, path, metadata={"info": text})


def load(path: Path, device: torch.device) -> tuple[dict[str, Any], Batches | None]:
    """Read what [`save`] wrote, and set the random generators. Tensors go to the device; a [`RaggedDistribution`] stays
    on the host."""
    with safe_open(path, framework="pt", device="cpu") as file:
        info = json.loads(file.metadata()["info"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    _set_generators(tensors, info.pop("generators"))
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


def layout_of(args: Any, beta: float) -> dict[str, Any]:
    """What a saved rollout batch must agree with, of a run's `args`."""
    layout = {name: getattr(args, name) for name in _LAYOUT if hasattr(args, name)}
    return layout | {"beta": beta != 0}  # without it there is no reference log-probability


def why_a_fresh_batch(
    info: dict[str, Any], batches: Batches | None, layout: dict[str, Any], needs_support: bool
) -> str:
    """Why a run of this `layout` cannot continue the batch of a checkpoint; empty if it can."""
    if changed := [name for name, value in layout.items() if info["layout"].get(name) != value]:
        return f"The checkpoint was made with another {', '.join(changed)}."
    if info["unfinished"] and batches is None:
        return "The checkpoint was made with `save_rollouts=False`."
    if info["unfinished"] and needs_support and not info["support"]:
        return "The checkpoint keeps no support, which this trust region needs."
    return ""


def changed_options(saved: dict[str, Any], options: dict[str, Any]) -> str:
    """Which options of the trust region were others in a checkpoint, in words."""
    pairs = {name: (saved.get(name, "unused"), options.get(name, "unused")) for name in saved | options}
    return ", ".join(f"`{name}` {then} (now {now})" for name, (then, now) in pairs.items() if then != now)


def _generator_states() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "generator/python": torch.tensor(words),
        "generator/numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "generator/torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        tensors["generator/device"] = torch.get_device_module().get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}


def _set_generators(tensors: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    version, gauss = info["python"]
    random.setstate((version, tuple(tensors["generator/python"].tolist()), gauss))
    kind, position, has_gauss, cached = info["numpy"]
    np.random.set_state((kind, tensors["generator/numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["generator/torch"])
    if "generator/device" in tensors and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(tensors["generator/device"])
