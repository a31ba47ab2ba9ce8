"""Every kernel compiled ahead of time for real GPUs, down to machine code, on a machine that may have none.

It catches what the interpreter does not: types, unsupported operations, and registers that spill to memory.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from troll_trl.kernels import blocks, coefficients, fold, gradient, outcomes, projection, support, topk
from troll_trl.kernels.dispatch import FP_FUSION, INTERPRETED, TRITON_AVAILABLE, warps_for_row
from troll_trl.kernels.tiles import FLOOR, LogitTransform

if not TRITON_AVAILABLE:
    pytest.skip("Triton is not installed (it exists for Linux only)", allow_module_level=True)
if INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
PTXAS, CUOBJDUMP = (shutil.which(name, path=TOOLS) or shutil.which(name) for name in ("ptxas", "cuobjdump"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PTXAS is None, reason="this Triton comes without ptxas")]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
K = 64
VOCABULARY = 151_936
SCALARS = ("tanh_scale", "factor", "slope")


def types(kernel, pointers: dict[str, str]) -> dict[str, str]:
    """Types of a kernel's arguments: those of `pointers`, float32 for other pointers, 32-bit integers for counts."""
    result = {}
    for name in kernel.arg_names:
        if name.isupper():
            result[name] = "constexpr"
        elif name.endswith("_ptr"):
            result[name] = "*" + pointers.get(name, "fp32")
        else:
            result[name] = "fp32" if name in SCALARS else "i32"
    return result


ALIGNED = ("tile_stride", "columns", "first", "blocks_per_row")


def make(kernel, dtype, softcap, bias, warps, pointers=None, **constants):
    """The kernel's source, with pointers to 16 bytes and the stride a multiple of 16, as the launchers have them."""
    pointers = {"tile_ptr": DTYPES[dtype], "bias_ptr": DTYPES[dtype], **(pointers or {})}
    signature = types(kernel, pointers)
    constants = {"HAS_SOFTCAP": softcap, **constants}
    if "bias_ptr" in signature and not bias:
        signature["bias_ptr"], constants["bias_ptr"] = "constexpr", None
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in ALIGNED]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(kernel, signature, constants, attributes), {"num_warps": warps, "enable_fp_fusion": FP_FUSION}


def fold_source(dtype, softcap, bias, block=fold.BLOCK_SIZE):
    return make(
        fold._fold_kernel, dtype, softcap, bias, fold.NUM_WARPS,
        LOWEST=torch.finfo(dtype).min, FLOOR=FLOOR, BLOCK=block,
    )  # fmt: skip


def take_kept_source(dtype, softcap, bias):
    return make(
        fold._take_kept_kernel, dtype, softcap, bias, fold.KEPT_WARPS, {"ids_ptr": "i32"},
        LOWEST=torch.finfo(dtype).min, BLOCK=fold.KEPT_BLOCK,
    )  # fmt: skip


def gradient_source(dtype, softcap, bias, linear=True, block=gradient.BLOCK_SIZE):
    return make(
        gradient._gradient_kernel, dtype, softcap, bias, gradient.NUM_WARPS,
        HAS_LINEAR=linear, FLOOR=FLOOR, BLOCK=block,
    )  # fmt: skip


def put_kept_source(dtype, softcap, bias):
    return make(
        gradient._put_kept_kernel, dtype, softcap, bias, gradient.KEPT_WARPS, {"ids_ptr": "i32"},
        BLOCK=gradient.KEPT_BLOCK,
    )  # fmt: skip


def reduce_source(dtype, softcap, bias):
    return make(
        blocks._reduce_kernel, dtype, softcap, bias, blocks.NUM_WARPS, {"sampled_ids_ptr": "i64"},
        FLOOR=FLOOR, BLOCK=blocks.BLOCK, BLOCKS=blocks.BLOCKS_PER_PROGRAM,
    )  # fmt: skip


def unused(dtype, softcap, bias):
    return topk.unused_bits(dtype, torch.empty(0) if bias else None, LogitTransform(softcap=softcap or None))


def best_blocks_source(dtype, softcap, bias, vocabulary=VOCABULARY):
    count = triton.next_power_of_2(triton.cdiv(vocabulary, blocks.BLOCK))
    warps = topk.warps_for(count)
    return make(
        topk._best_blocks_kernel, dtype, softcap, bias, warps, {"best_blocks_ptr": "i32"},
        FLOOR=FLOOR, UNUSED_BITS=unused(dtype, softcap, bias), BLOCKS=count, GROUPS=min(K, count),
        PART=min(topk.PART * warps, count),
    )  # fmt: skip


def best_tokens_source(dtype, softcap, bias, k=K):
    ids = {"sampled_ids_ptr": "i64", "best_blocks_ptr": "i32", "token_ids_ptr": "i32"}
    warps = topk.warps_for(k * blocks.BLOCK)
    return make(
        topk._best_tokens_kernel, dtype, softcap, bias, warps, ids,
        FLOOR=FLOOR, UNUSED_BITS=unused(dtype, softcap, bias), BLOCK=blocks.BLOCK, SLOTS=k,
        PART=min(topk.PART * warps // blocks.BLOCK, k),
    )  # fmt: skip


def projection_types(dtype) -> dict[str, str]:
    given = dict.fromkeys(("log_p_ptr", "log_q_ptr", "log_pi_ptr", "grad_ptr", "result_ptr"), DTYPES[dtype])
    return given | dict.fromkeys(("t_ptr", "policy_kl_ptr", "kl_ptr"), "fp64")


def project_source(dtype, softcap, bias, slots=K + 1, bound=0.05):
    """Always of float32: the head's log-probabilities are, whatever the dtype of its products."""
    padded = triton.next_power_of_2(slots)
    return make(
        projection._project_kernel, dtype, softcap, bias, warps_for_row(padded),
        projection_types(torch.float32), BOUND=bound, TOLERANCE=1e-5, EXP_UNDERFLOW=projection.EXP_UNDERFLOW,
        MAX_EVALUATIONS=projection.MAX_EVALUATIONS, NEWTON_EVALUATIONS=projection.NEWTON_EVALUATIONS,
        ZERO_POLICY_LOG_RATIO=projection.ZERO_POLICY_LOG_RATIO, SLOTS=padded,
    )  # fmt: skip


def project_backward_source(dtype, softcap, bias, slots=K + 1):
    padded = triton.next_power_of_2(slots)
    return make(
        projection._project_backward_kernel, dtype, softcap, bias, warps_for_row(padded),
        projection_types(torch.float32), ZERO_POLICY_LOG_RATIO=projection.ZERO_POLICY_LOG_RATIO, SLOTS=padded,
    )  # fmt: skip


def support_source(dtype, softcap, bias, k=K - 1):
    """Always of float32, as the two after it."""
    ids = {"sampled_ids_ptr": "i64", "ids_ptr": "i32", "kept_ids_ptr": "i32"}
    slots = triton.next_power_of_2(k)
    return make(support._support_kernel, torch.float32, softcap, bias, 1, ids, LIMIT=1 - 1e-5, FLOOR=FLOOR, SLOTS=slots)


def outcomes_source(dtype, softcap, bias, k=K):
    slots = triton.next_power_of_2(k)
    warps = warps_for_row(slots)
    return make(
        outcomes._outcomes_kernel, torch.float32, softcap, bias, warps, {"ids_ptr": "i32"}, FLOOR=FLOOR, SLOTS=slots
    )


def coefficients_source(dtype, softcap, bias, k=K):
    slots = triton.next_power_of_2(k)
    return make(coefficients._coefficients_kernel, torch.float32, softcap, bias, warps_for_row(slots), SLOTS=slots)


SOURCES = {
    "take_kept": take_kept_source,
    "fold": fold_source,
    "gradient": gradient_source,
    "put_kept": put_kept_source,
    "reduce": reduce_source,
    "best_blocks": best_blocks_source,
    "best_tokens": best_tokens_source,
    "support": support_source,
    "outcomes": outcomes_source,
    "coefficients": coefficients_source,
    "project": project_source,
    "project_backward": project_backward_source,
}


def compile_for(capability: int | str, source, options):
    nvidia = isinstance(capability, int)
    target = GPUTarget("cuda", capability, 32) if nvidia else GPUTarget("hip", capability, 64)
    return triton.compile(source, target=target, options=options)


def spilled_bytes(compiled, tmp_path) -> int:
    """Bytes of stack per thread, in which spilled registers are."""
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", compiled.asm["amdgcn"])[1])
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\bSTACK:(\d+)", text)[1])


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("capability", [80, 90, 100, "gfx942"])  # A100, H100, B200, MI300
def test_compiles_in_bf16_without_spilling(name, capability, tmp_path):
    compiled = compile_for(capability, *SOURCES[name](torch.bfloat16, softcap=False, bias=False))
    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.startswith(("put", "support", "project"))])
def test_compiles_with_float64_scalars(name):
    """As torch.compile passes Python's floats before torch 2.15: the type of a variable of `fold`'s loop then changed
    with them."""
    source, options = SOURCES[name](torch.bfloat16, softcap=True, bias=True)
    signature = {name: "fp64" if name in SCALARS else of for name, of in source.signature.items()}
    source = ASTSource(source.fn, signature, source.constants, source.attrs)
    assert len(compile_for(90, source, options).asm["cubin"]) > 0
