"""What TRL's scoring pass calls in place of a model."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import is_peft_model

from troll_trl.lm_head import SparseCausalLMOutput
from troll_trl.trust_region.sparse import SparseDistribution, Support


def needs_positions(model: Any, base_model: torch.nn.Module, is_vlm: bool) -> bool:
    """Return whether `model` needs [`with_positions`]. `base_model` is the model without adapters."""
    # A vision-language model computes its own positions if it is given none. With prompt learning, virtual tokens
    # shift the positions, so ours would differ from those in generation
    if is_vlm or (is_peft_model(model) and model.active_peft_config.is_prompt_learning):
        return False
    return "position_ids" in inspect.signature(type(base_model).forward).parameters


def with_positions(model: Callable) -> Callable:
    """Wrap `model` to count positions from a row's first token. TRL passes no positions: a model with absolute
    positions would count a row's padding, and would not score the distribution that it sampled from."""

    def positioned_model(**model_inputs):
        positions = (model_inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # (B, T)
        return model(position_ids=positions, **model_inputs)

    return positioned_model


@dataclass
class SparseModel:
    """
    A `model` with a sparse head, which keeps the sparse distributions of completions of this `length`.

    With a `support`, the head selects the tokens of each. Otherwise, they are the `token_ids` `(B, length, K)`, for
    TRL's loss, which calls the model once for all rows. `check` is called before each pass, with the model, its inputs
    and the length.
    """

    model: Callable
    length: int
    check: Callable[[Callable, dict[str, Any], int], None]
    support: Support | None = None
    token_ids: torch.Tensor | None = None
    _chunks: list[SparseDistribution] = field(default_factory=list)  # one for each chunk of rows that TRL scores

    def __call__(self, **model_inputs) -> SparseCausalLMOutput:
        self.check(self.model, model_inputs, self.length)
        query: dict[str, Any] = {"token_ids": self.token_ids}
        if self.support is not None:
            query = {"support_size": self.support.size, "tail_mass": self.support.tail_mass}
        output = self.model(**model_inputs, **query, check_finite=False)  # the guard checks all ranks
        # Clones: a view would keep the prompts' positions in memory
        ids, log_probs = (x[:, -self.length :].clone() for x in (output.token_ids, output.sparse_log_probs))
        self._chunks.append(SparseDistribution(ids, log_probs))
        # Omit the supports, which TRL would keep in memory during its loss
        return SparseCausalLMOutput(log_probs=output.log_probs, entropy=output.entropy, aux_loss=output.aux_loss)

    def take_distributions(self) -> SparseDistribution:
        """Return the distributions `(B, length, K)` of TRL's pass, and free its chunks."""
        chunks, self._chunks = self._chunks, []
        return SparseDistribution.concatenate(chunks)
