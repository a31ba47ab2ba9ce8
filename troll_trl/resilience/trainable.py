"""check_trainable(): refuses a model that a training could not change, or whose head TRL would score wrongly."""

from typing import Any

from accelerate.utils import is_peft_model


def check_trainable(model: Any) -> None:
    """Raise a `ValueError` for a language model that has no weight to train, or whose LM head is no single matrix."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "The model has no weight to train: `requires_grad` is False for all. Load an adapter with "
            "`PeftModel.from_pretrained(model, folder, is_trainable=True)`, or give the trainer a `peft_config`."
        )
    head = (model.get_base_model() if is_peft_model(model) else model).get_output_embeddings()
    if not hasattr(head, "bias"):  # PEFT's `TrainableTokensWrapper`
        raise ValueError(
            f"The LM head is a {type(head).__name__}, but its logits must come from one matrix, for TRL too. With "
            "`trainable_token_indices`, load a model of tied embeddings with `tie_word_embeddings=False`."
        )
