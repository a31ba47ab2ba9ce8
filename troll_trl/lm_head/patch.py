"""add_sparse_lm_head(): lets a causal LM return sparse distributions, streaming its LM head over vocabulary tiles."""

import functools
import inspect
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput, TransformersKwargs
from trl.trainer.utils import maybe_gather_lm_head_ctx

from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head.families import check_parts, logit_transform, name_experts
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs
from troll_trl.lm_head.support_selection import select_support
from troll_trl.trust_region import DEFAULT_TAIL_MASS
from troll_trl.trust_region.sparse import UNUSED, check_range, check_support_options, rest_alone

IGNORED_LABEL = -100

# Processors also add the first two for models that do not read them, such as Gemma 3. PEFT passes a prefix by the third
# name, which transformers 5.24 takes for `cache` until 5.40
_ALSO_KNOWN = ("token_type_ids", "mm_token_type_ids", "past_key_values")


@dataclass
class SparseCausalLMOutput(ModelOutput):
    """
    Output of a model after [`add_sparse_lm_head`]. Position `i` is the distribution of token `i + 1`. If the label is
    `-100`, nothing is computed: `log_probs` and `entropy` are 0, every slot is unused and the rest has all the mass.

    Args:
        log_probs (`torch.Tensor` of shape `(B, T - 1)`, float32):
            Log-probability of each next-token label (slot 0 of `sparse_log_probs`).
        entropy (`torch.Tensor` of shape `(B, T - 1)`, float32):
            Entropy of the full next-token distribution, in nats.
        token_ids (`torch.Tensor` of shape `(B, T - 1, K)`, int32):
            Support: the label, then the other kept tokens; −1 in an unused slot.
        sparse_log_probs (`torch.Tensor` of shape `(B, T - 1, K + 1)`, float32):
            Log-probability of every kept token, and of the rest in the last slot.
        aux_loss (`torch.Tensor`, *optional*):
            MoE load-balancing loss, if the call has `output_router_logits=True`.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    sparse_log_probs: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def add_sparse_lm_head(model: PreTrainedModel, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False) -> None:
    """
    Add a sparse LM head to `model`. Every other call of the model is unchanged. The head has two uses:

    - `model(..., labels=labels, fused_lm_head=True, support_size=K, tail_mass=δ)` selects a support for every label:
      the label itself, then the most likely other tokens (see [`~troll_trl.trust_region.sparse.sparsify`]);
    - `model(..., labels=labels, fused_lm_head=True, token_ids=ids)` evaluates the model on a given support, with
      gradient. `ids` is `(B, T - 1, K)`, or shorter and aligned to the end, with the label in slot 0 of every position
      whose label is not `-100`, and no token twice.

    Both return a [`SparseCausalLMOutput`]. The head is streamed in tiles: no `(tokens, vocabulary)` tensor exists,
    forward or backward, and positions whose label is `-100` are not computed. Logit scaling and soft-capping, a head
    bias, tied embeddings, sharded heads (FSDP2, ZeRO-3) and the MoE auxiliary loss are as in TRL's
    `add_fused_lm_head`, which may have been called before. Add the head before wrapping the model with PEFT, or to its
    base model.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model to patch.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature the logits are divided by. Positive.
        cast_lm_head_to_fp32 (`bool`, *optional*, defaults to `False`):
            Whether to run the LM head in float32, outside autocast.

    With `check_finite=False`, a call does not raise for logits that are not finite, and returns NaN: several ranks can
    then decide together.

    Raises:
        ValueError: `temperature` not positive, or a model whose logits this head would get wrong. In a call:
            `support_size` or `tail_mass` out of range, a support whose slot 0 is not the label, contradictory
            arguments, logits that are not finite.
        TypeError: in a call, a keyword that neither the head nor the model's forward names.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")
    original_forward = model.forward
    transform = logit_transform(model.config.get_text_config(), temperature)
    name_experts(model.config.get_text_config())
    check_parts(model)
    known = {*inspect.signature(type(model).forward).parameters, *TransformersKwargs.__annotations__, *_ALSO_KNOWN}

    # Keep the original signature: `generate` validates its model kwargs against it
    @functools.wraps(type(model).forward)
    def forward(self, *args, support_size=None, tail_mass=None, token_ids=None, check_finite=True, **kwargs):
        if support_size is None and tail_mass is None and token_ids is None:
            return original_forward(*args, **kwargs)
        query = _Query(kwargs.pop("labels", None), token_ids, support_size, tail_mass)
        _check_query(query, kwargs.pop("fused_lm_head", False))
        if unknown := [name for name, value in kwargs.items() if value is not None and name not in known]:
            raise TypeError(  # most backbones take any keyword, and ignore it
                f"The sparse LM head got `{'`, `'.join(unknown)}`, which neither it nor {type(self).__name__}.forward "
                "names, so it would have no effect. If TRL passes it, install a tested version of TRL."
            )
        output = _sparse_forward(self, args, kwargs, query, transform, cast_lm_head_to_fp32)
        if check_finite:
            _check_finite(output.entropy)
        return output

    model.forward = types.MethodType(forward, model)


class _Query(NamedTuple):
    """What a call asks for: the labels' positions, and a support to evaluate or to select."""

    labels: torch.Tensor  # (B, T)
    token_ids: torch.Tensor | None  # (B, T' ≤ T − 1, K)
    support_size: int | None
    tail_mass: float | None


def _check_query(query: _Query, fused_lm_head: bool) -> None:
    """Raise a `ValueError` for a call whose arguments contradict each other."""
    if query.support_size is None and query.tail_mass is not None:
        raise ValueError("`tail_mass` needs `support_size`: it has an effect only if a support is selected.")
    if query.labels is None or not fused_lm_head:
        raise ValueError("`support_size` and `token_ids` need `labels` and `fused_lm_head=True`.")
    if query.support_size is not None and query.token_ids is not None:
        raise ValueError("Pass either `support_size`, to select a support, or `token_ids`, to evaluate one.")


def _targets(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From `labels` `(B, T)`, return the N positions whose next token is a label, as indices into the flattened batch
    B·T; these labels; and the same positions as indices into the flattened output B·(T − 1). All are `(N,)`."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).flatten()  # (B·T,)
    # One `nonzero` for all tensors: each boolean index would wait for the device
    positions = (shifted != IGNORED_LABEL).nonzero().squeeze(1)
    # The output has one position fewer per row than the hidden states
    return positions, shifted.index_select(0, positions), positions - positions // labels.shape[1]


def _sparse_forward(
    model, args, kwargs, query: _Query, transform: LogitTransform, cast_lm_head_to_fp32: bool
) -> SparseCausalLMOutput:
    """Run the backbone on `args` and `kwargs`, and the head on its hidden states. Add the MoE auxiliary loss."""
    text_config = model.config.get_text_config()
    # Like the model's own forward, request router logits when the config asks for them
    if getattr(text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    # Backbone and head are looked up on each call, since FSDP and PEFT replace them after patching
    kwargs["use_cache"] = False
    backbone_outputs = model.base_model(*args, **kwargs)
    output = _head(model, backbone_outputs.last_hidden_state, query, transform, cast_lm_head_to_fp32)
    if kwargs.get("output_router_logits"):
        if not (router_logits := getattr(backbone_outputs, "router_logits", None)):
            raise ValueError(
                f"`output_router_logits` is set, but no layer of this {text_config.model_type} model gives router "
                "logits: there is no load-balancing loss. Leave this option out of the model's config."
            )
        experts, chosen = text_config.num_experts, text_config.num_experts_per_tok
        output["aux_loss"] = load_balancing_loss_func(router_logits, experts, chosen, kwargs.get("attention_mask"))
    return output


# `torch.compile` compiles the backbone into one graph. It would split this function into many graphs without a gain:
# the work is in kernels and matrix products.
@torch.compiler.disable
def _head(
    model, hidden: torch.Tensor, query: _Query, transform: LogitTransform, cast_lm_head_to_fp32: bool
) -> SparseCausalLMOutput:
    """Return the output for hidden states `(B, T, H)`."""
    lm_head = model.get_output_embeddings()
    weight, bias = lm_head.weight, lm_head.bias
    # If the model is split across devices, the backbone can end on a different device from the head
    positions, sampled_ids, outputs = (x.to(weight.device) for x in _targets(query.labels))  # (N,)
    shape = torch.Size((len(query.labels), query.labels.shape[1] - 1))
    token_ids = query.token_ids
    support_size = query.support_size
    hidden = hidden.to(weight.device).flatten(0, 1).index_select(0, positions)  # (N, H)
    if token_ids is not None:
        vocabulary = model.config.get_text_config().vocab_size
        token_ids = _supports_at(token_ids.to(weight.device), shape, outputs, sampled_ids, vocabulary)

    precision: AbstractContextManager = nullcontext()
    if cast_lm_head_to_fp32:
        hidden = hidden.float()
        precision = torch.autocast(hidden.device.type, enabled=False)
    if isinstance(weight, DTensor):  # sharded by FSDP2, in a unit that no module's forward has gathered
        weight = _gathered(weight)
        bias = None if bias is None else _gathered(bias)
    with precision, maybe_gather_lm_head_ctx(weight, bias):
        if token_ids is None:
            assert support_size is not None  # one of the two is given
            tail_mass = DEFAULT_TAIL_MASS if query.tail_mass is None else query.tail_mass
            check_support_options(support_size, tail_mass, len(weight))
            with torch.no_grad():
                token_ids, log_probs, entropy = select_support(
                    hidden, weight, bias, sampled_ids, support_size, tail_mass, transform
                )
        if support_size is None or torch.is_grad_enabled():
            log_probs, entropy = SparseLogProbs.apply(
                hidden, weight, bias, token_ids, transform, maybe_gather_lm_head_ctx
            )
    rest = rest_alone(log_probs.shape[1], log_probs.device).expand(*shape, -1)
    return SparseCausalLMOutput(
        log_probs=_scatter(log_probs[:, 0], outputs, log_probs.new_zeros(shape)),
        entropy=_scatter(entropy, outputs, entropy.new_zeros(shape)),
        token_ids=_scatter(
            token_ids.int(), outputs, token_ids.new_full((*shape, token_ids.shape[1]), UNUSED, dtype=torch.int32)
        ),
        sparse_log_probs=_scatter(log_probs, outputs, rest),
    )


def _gathered(parameter: DTensor) -> torch.Tensor:
    """Gather a sharded parameter. Its gradient is the mean over the ranks."""
    mean_over_ranks = [Partial("avg")] * parameter.device_mesh.ndim  # without this, a rank keeps its own gradient
    return parameter.full_tensor(grad_placements=mean_over_ranks)


def _supports_at(
    token_ids: torch.Tensor, shape: torch.Size, outputs: torch.Tensor, sampled_ids: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Return the supports `(N, K)` of the outputs `(N,)`, from `(B, T' ≤ T − 1, K)` aligned to the end."""
    missing = shape[1] - token_ids.shape[1]
    if token_ids.shape[0] != shape[0] or missing < 0:
        raise ValueError(
            f"`token_ids` {tuple(token_ids.shape)} must have the batch size and at most the length of the shifted "
            f"labels {tuple(shape)}."
        )
    token_ids = torch.nn.functional.pad(token_ids, (0, 0, missing, 0), value=UNUSED)
    token_ids = token_ids.flatten(0, 1).index_select(0, outputs)
    wrong = token_ids[:, 0] != sampled_ids
    outside = (token_ids < UNUSED) | (token_ids >= vocabulary)
    if not (outside.any() | wrong.any()):  # a single check, because it waits for the device
        return token_ids
    check_range("token_ids", token_ids, UNUSED, vocabulary)
    raise ValueError(
        f"Slot 0 of `token_ids` must be the label of its position, got {token_ids[wrong][0, 0].item()} for label "
        f"{sampled_ids[wrong][0].item()}. The support belongs to another batch, or labels and supports are masked "
        "differently."
    )


def _check_finite(entropy: torch.Tensor | None) -> None:
    """Raise a `ValueError` for a NaN or an infinity in any logit. Such a logit shows in the entropy `(B, T − 1)`,
    which depends on all logits (except −∞ at a kept token)."""
    if entropy is not None and not entropy.isfinite().all():
        row, position = (~entropy.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"The logits of row {row}, position {position} are not finite. The weights or activations have overflowed: "
            "lower the learning rate, or train in bfloat16 or float32 rather than float16."
        )


def _scatter(values: torch.Tensor, positions: torch.Tensor, filler: torch.Tensor) -> torch.Tensor:
    """Return `filler` `(B, T − 1, …)`, which may be modified, with the values `(N, …)` at the `positions` `(N,)` of the
    flattened batch."""
    # A batch without a label still gives a differentiable zero. Index by positions, because the gradient of a mask
    # would wait for the device.
    return filler.flatten(0, 1).contiguous().index_copy_(0, positions, values).unflatten(0, filler.shape[:2])
