"""Makes Triton's interpreter round float32 to bfloat16 as a GPU does: to nearest, ties to even. By itself it truncates,
and gradients are too small by 0.2 to 0.3 %."""

import numpy as np
import torch


def round_as_a_gpu() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    truncating = InterpreterBuilder.cast_impl

    def cast_impl(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return truncating(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy().reshape(source.data.shape), to.scalar)

    InterpreterBuilder.cast_impl = cast_impl
