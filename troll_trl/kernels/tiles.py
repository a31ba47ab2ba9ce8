"""What both passes share: how a tile of logits is computed, transformed, and how its gradient is accumulated."""

import math
from typing import NamedTuple

import torch

# Stands for −∞ in a float32 tile: exp() of it is 0 against any logit, while 0·(−∞) would be NaN
FLOOR = -1e30
_CACHE_LINE = 16  # float32 elements
# Tokens × vocabulary columns of one tile of the training pass. Large enough for the matrix products to run at full
# speed, small enough to count for nothing: 64 MiB of float32 on a CPU, 512 MiB on a GPU. (TRL's tile has as many
# elements as the latter, in the dtype of the product.)
TRAINING_TILE = {"cpu": (1024, 16384), "accelerator": (4096, 32768)}


class LogitTransform(NamedTuple):
    """
    What a model does to the product of hidden state and head before the softmax, and the sampling temperature:
    `z = softcap·tanh(scale·y/softcap)/temperature`, or `z = scale·y/temperature` without soft-capping.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def slope(self) -> float:
        """`∂z/∂y` where soft-capping is not felt."""
        return self.scale / self.temperature

    def apply_(self, tile: torch.Tensor) -> torch.Tensor:
        """Turn a float32 tile of products into logits, in place."""
        if self.softcap is None:
            return tile if self.slope == 1.0 else tile.mul_(self.slope)
        return tile.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def softcap_derivative(self, logits: torch.Tensor) -> torch.Tensor:
        """`(∂z/∂y)/slope = 1 − tanh²`, from the transformed logits `z`."""
        assert self.softcap is not None  # called for soft-capped models only
        return 1 - (logits * (self.temperature / self.softcap)).square()


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Dtype of the matrix products: autocast's where it is on, else that of the hidden states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def logits_into(
    out: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitTransform,
) -> None:
    """
    Write the logits of one tile, after scaling, soft-capping and temperature, into `out`.

    Args:
        out (`torch.Tensor` of shape `(n, v)`, float32):
            Overwritten.
        hidden (`torch.Tensor` of shape `(n, H)`):
            In the dtype of the product.
        weight (`torch.Tensor` of shape `(v, H)`), bias (`torch.Tensor` of shape `(v,)`, *optional*):
            The head's rows of this tile, in any dtype.
        transform ([`LogitTransform`]):
            Applied in float32.
    """
    weight = weight.to(hidden.dtype).t()
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight, out=out)
    else:
        out.copy_(torch.mm(hidden, weight))
    if bias is not None:
        out.add_(bias.to(hidden.dtype))
    transform.apply_(out)


def accumulate_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """
    `acc += a @ b` in float32. Rounding every tile's product to bf16 before it is added would bias the sum over many
    tiles, and with it the training, by more than the rounding of the result.

    Args:
        acc (`torch.Tensor` of shape `(m, n)`, float32):
            Updated in place.
        a (`torch.Tensor` of shape `(m, k)`), b (`torch.Tensor` of shape `(k, n)`):
            Of one dtype.
    """
    if acc.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(a.float(), b.float())


def empty_tile(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """
    An uninitialised float32 `(rows, columns)` buffer whose row stride is an odd number of cache lines: a matrix product
    writes unaligned rows a third slower, and rows a power of two apart fall into the same cache sets.
    """
    lines = math.ceil(columns / _CACHE_LINE) | 1
    return torch.empty((rows, lines * _CACHE_LINE), device=device, dtype=torch.float32)[:, :columns]


def training_tile(device: torch.device) -> tuple[int, int]:
    """Tokens and vocabulary columns of a training tile on this device."""
    return TRAINING_TILE["cpu" if device.type == "cpu" else "accelerator"]
