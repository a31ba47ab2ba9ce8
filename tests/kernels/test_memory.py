"""
Memory of the configs on the cards that they name, by arithmetic: what lasts, and the most that a micro-batch takes
beside it, counted on a CUDA device without numbers (`fake_cuda_memory.py`). With `-s` it prints the sums.

Not counted: what PyTorch's allocator loses between tensors, and what NCCL and CUDA take; for these there are 2 GiB.
"""

import json
import re
import sys

import pytest
from test_configs import CONFIGS, MODELS, parse  # noqa: F401  a fixture
from test_fake_cuda import FOLDER, build, call, needed

pytestmark = [pytest.mark.slow, *needed]
GIB = 2**30
CARDS = {"80": 79.6, "24": 23.5}  # GiB that a card of so many GB has for a process
OTHERS = 2.0
PROMPT = 256
TRAINED, EVALUATED = {"one-gpu": 4}, {"apertus-8b": 32, "one-gpu": 32}  # where it is not 8 and 64 completions at a time
# The longest completions of each model, and the config for one GPU
NAMES = {**{model: f"{model}/dapo.yaml" for model in MODELS}, "one-gpu": "qwen3-0.6b/gsm8k-one-gpu.yaml"}


def measure(folder, names) -> dict[str, dict]:
    """What is measured of each of these `NAMES`, in one process: its start takes as long as one of them."""
    sharded = lambda model: "accelerate/fsdp2.yaml" in (CONFIGS / "models" / f"{model}.yaml").read_text()
    cases = {
        name: {"name": (model := NAMES[name].split("/")[0]), "sharded": sharded(model), "rows": TRAINED.get(name, 8)}
        | {"evaluated": EVALUATED.get(name, 64), "length": PROMPT + (2048 if "gsm8k" in NAMES[name] else 4096)}
        for name in names
    }
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    library = {"FAKE_CUDA_LIBRARY": str(build(folder)), "FAKE_CUDA_STORAGE": "meta"}
    call([sys.executable, str(FOLDER / "fake_cuda_memory.py"), str(file)], **library)
    return {name: {**cases[name], **of} for name, of in json.loads(file.read_text()).items()}


def needs(of: dict, args, card: float, gpus: int) -> dict[str, float]:
    """GiB of each GPU while it trains, evaluates and generates."""
    count, part = of["parameters"], gpus if of["sharded"] else 1
    lasting = 12 * count / part  # float32 weights and Adam's two moments
    gradients = 4 * count / part  # until the update
    if of["sharded"]:
        kwargs = args.accelerator_config.gradient_accumulation_kwargs or {}
        gradients = gradients if kwargs.get("sync_each_batch") else 2 * count
        gathered = 2 * (of["head"] + 2 * of["layer"])  # the head, and the layers in work and ahead of it, in bfloat16
    else:
        lasting += 4 * count if gpus > 1 else 0  # DDP's buckets
        gathered = 0
    engine = args.vllm_gpu_memory_utilization * card * GIB
    awake = 0 if args.vllm_enable_sleep_mode else engine
    return {
        "training": (lasting + gradients + gathered + of["training"] + awake) / GIB + OTHERS,
        "evaluation": (lasting + gathered + of["evaluation"] + awake) / GIB + OTHERS,
        "generation": (lasting + engine + 4 * of["head"]) / GIB + OTHERS,  # one whole parameter is sent at a time
    }


def test_every_config_fits_its_card(tmp_path, parse):  # noqa: F811
    for name, of in measure(tmp_path, NAMES).items():
        one = name == "one-gpu"
        gpus = 1 if one else 8
        _, args, _ = parse(CONFIGS / NAMES[name], gpus)
        assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (of["rows"], of["evaluated"]), (
            name
        )
        assert args.max_completion_length + PROMPT == of["length"], name
        file = CONFIGS / (NAMES[name] if one else "base/batch.yaml")
        card = CARDS[re.search(r"GPUs? of (\d+) GB", file.read_text())[1]]
        gib = needs(of, args, card, gpus)
        print(f"\n| {name} | {', '.join(f'{what} {x:.0f}' for what, x in gib.items())} | of {card} |")
        assert max(gib.values()) <= card, (name, gib)


def test_what_sharding_every_micro_batch_saves(tmp_path, parse):  # noqa: F811
    """Without it FSDP2 holds the gradients of 14B whole: 27.5 GiB a GPU."""
    of = measure(tmp_path, ["qwen3-14b"])["qwen3-14b"]
    _, args, _ = parse(CONFIGS / NAMES["qwen3-14b"], 8)
    with_it = needs(of, args, CARDS["80"], 8)["training"]
    args.accelerator_config.gradient_accumulation_kwargs = None
    assert needs(of, args, CARDS["80"], 8)["training"] - with_it == pytest.approx(20.6, abs=0.1)
