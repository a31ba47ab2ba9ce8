"""What the host spends on a scoring pass on a GPU: Python, PyTorch's dispatch and Triton's launches, measured on a CPU.

    python benchmarks/host.py --tiles 1 6

Both heads run as on a GPU, without what a GPU would compute: matrix products are left out, and kernels stop before the
call of the driver (Triton still binds their arguments, and compiles them for sm_90). 4,096 tokens at V = 151,936 have
six tiles in our head (`--tiles 6`), and one tile with five chunks in TRL's. A ratio above 1 means that ours takes more
of the host's time. The time of both includes a backbone without layers.
"""

import argparse
import statistics

import torch
import trl.kernels.chunked_logprob
import trl.trainer.utils
from common import paired_seconds, ratio
from head import Heads
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from troll_trl.kernels import blocks, support, tiles, topk
from troll_trl.lm_head import patch, support_selection

# Size of a tile. For so few numbers, the computation itself takes a CPU no time
VOCABULARY = 4096
ROWS = 16


class NoDriver:
    """What a launch asks a driver before it calls the driver."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)


def leave_out_what_a_gpu_computes() -> None:
    driver.set_active(NoDriver())
    launch = jit.JITFunction.run
    jit.JITFunction.run = lambda *args, **kwargs: launch(*args, **kwargs | {"warmup": True})
    torch.mm = lambda a, b, out=None: a.new_empty(len(a), b.shape[1]) if out is None else out
    for module in (blocks, support, tiles, topk, support_selection):
        module.use_triton = lambda device: True
    for module in (trl.kernels.chunked_logprob, trl.trainer.utils):
        module._use_triton = lambda device: True
    patch._check_finite = lambda entropy: bool(entropy.isfinite().all())  # nothing is computed: do not raise
    support_selection._ROWS_STEP["cpu"] = 4
    support_selection._TILE_ELEMENTS["cpu"] = ROWS * VOCABULARY
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = VOCABULARY // 5 + 1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tiles", type=int, nargs="+", default=[1, 6], help="tiles of our head (default: 1 6)")
    options.add_argument("--repeats", type=int, default=1000, help="pairs per figure (default: 1000)")
    args = options.parse_args()
    torch.set_num_threads(1)
    leave_out_what_a_gpu_computes()
    print("| tiles | ours / TRL's | ours ms | TRL's ms | backbone ms |\n|---|---|---|---|---|")
    for count in args.tiles:
        heads = Heads("cpu", torch.bfloat16, 8, VOCABULARY, count * ROWS, 64)
        backbone = torch.no_grad()(lambda heads=heads: heads.model.base_model(input_ids=heads.ids, use_cache=False))
        runs = {name: lambda heads=heads, name=name: heads.run(name, "scoring") for name in ("ours", "trl")}
        seconds = paired_seconds(runs | {"backbone": backbone}, args.repeats, "cpu")
        median = [f"{1e3 * statistics.median(seconds[name]):.2f}" for name in seconds]
        print(f"| {count} | {ratio(seconds['ours'], seconds['trl'])['ratio']:.2f} | {' | '.join(median)} |", flush=True)


if __name__ == "__main__":
    main()
