"""The length of text that a model was made for."""

from typing import Any


def context_length(config: Any) -> int | None:
    """Tokens that a model with this config was made for, prompt and completion together; `None` if the config does not
    say. Scaled positions (YaRN and others) may reach further than its `max_position_embeddings`."""
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return max(context, int(original * factor)) if context and original and factor else context
