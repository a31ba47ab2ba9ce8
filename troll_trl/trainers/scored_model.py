"""What TRL's scoring pass calls in place of a model."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model

from troll_trl.lm_head import SparseCausalLMOutput
from troll_trl.trust_region.sparse import SparseDistribution


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


class SparseModel:
    """
    A `model` with a sparse head, which keeps the sparse distributions of completions of this `length`.

    The `query` asks the head for them: with `support_size` and `tail_mass`, on new supports; with `token_ids`, on given
    ones. `check` is called before each pass, with the model, its inputs and the length.
    """

    def __init__(self, model: Callable, length: int, check: Callable[[Callable, dict[str, Any], int], None], **query):
        self.model = model
        self.length = length
        self.check = check
        self.query = query
        self._chunks: list[SparseDistribution] = []  # one for each chunk of rows for which TRL calls the model

    def __call__(self, **model_inputs) -> SparseCausalLMOutput:
        self.check(self.model, model_inputs, self.length)
        output = self.model(**model_inputs, **self.query, check_finite=False)
        # Clones: a view would keep the prompts' positions in memory
        ids, log_probs = (x[:, -self.length :].clone() for x in (output.token_ids, output.sparse_log_probs))
        self._chunks.append(SparseDistribution(ids, log_probs))
        # Omit the supports, which TRL would keep in memory during its loss
        return SparseCausalLMOutput(log_probs=output.log_probs, entropy=output.entropy, aux_loss=output.aux_loss)

    def take_distributions(self) -> SparseDistribution:
        """Return the distributions `(B, length, K)` of TRL's pass, and forget its chunks."""
        chunks, self._chunks = self._chunks, []
        return SparseDistribution.concatenate(chunks)
