"""Model families: what each does between the head's product and the softmax, and models whose logits the head would
get wrong."""

from transformers import PretrainedConfig, PreTrainedModel

from troll_trl.kernels.tiles import LogitTransform

# With these options of RecurrentGemma, xLSTM and Inkling, a model changes its logits, or omits some of them. Neither
# this head nor TRL's does this
UNSUPPORTED_LOGIT_OPTIONS = (
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_softcap",
    "logits_mup_width_multiplier",
    "unpadded_vocab_size",
)
UNSUPPORTED_TYPES = ("mpt", "chameleon")  # MPT ignores its config's scale; Chameleon masks image tokens
# These families have layers between backbone and head, which both heads would skip
_LAYERS_BEFORE_THE_HEAD = (
    "bert",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "modernbert-decoder",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


def logit_transform(config: PretrainedConfig, temperature: float) -> LogitTransform:
    """Return what an architecture does between the head's product and the softmax, read from its text `config`. Raises
    a `ValueError` for an architecture for which the head would be wrong."""
    unread = [
        f"`{name}` = {value}"
        for name in UNSUPPORTED_LOGIT_OPTIONS
        if (value := getattr(config, name, None)) is not None
    ]
    if unread or config.model_type in UNSUPPORTED_TYPES:
        how = f" through {', '.join(unread)}" if unread else ""
        raise ValueError(
            f"A {config.model_type} model changes its logits{how}, which neither the LM head of troll_trl nor "
            "TRL's does. All log-probabilities would be wrong. Train another model."
        )
    if config.model_type in _LAYERS_BEFORE_THE_HEAD:
        raise ValueError(
            f"A {config.model_type} model has layers between its backbone and its LM head, which neither the head of "
            "troll_trl nor TRL's runs. All log-probabilities would be wrong. Train another model."
        )
    # The names of Cohere, Muse Glimmer and Falcon-H1
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scale = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:  # HyperCLOVA X multiplies by it, Granite and MiniCPM3 divide
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    scale = 1.0 if scale is None else scale
    if not scale > 0:  # the largest logit is the largest product only under a positive factor
        raise ValueError(f"The {config.model_type} model scales its logits by {scale}. The scale must be positive.")
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(scale, softcap, temperature)


def name_experts(config: PretrainedConfig) -> None:
    """Give a mixture-of-experts config the attribute `num_experts`, which TRL's head reads, too: Granite-MoE, Granite 4
    and Phi-MoE call it `num_local_experts`. Raises a `ValueError` if the config lacks the numbers for the
    load-balancing loss, as in families without such a loss."""
    if not getattr(config, "output_router_logits", False):
        return
    cls = type(config)
    if not hasattr(config, "num_experts") and "num_local_experts" in vars(config):
        cls.attribute_map = {**cls.attribute_map, "num_experts": "num_local_experts"}  # as Mixtral does
    for needed in ("num_experts", "num_experts_per_tok"):
        if not hasattr(config, needed):
            raise ValueError(
                f"`output_router_logits` is set, but the config of a {config.model_type} model has no `{needed}`, from "
                "which the load-balancing loss is computed. Leave `output_router_logits` out of the model's config."
            )


def check_parts(model: PreTrainedModel) -> None:
    """Raise a `ValueError` for a model whose backbone cannot be found, or whose head has more than weight and bias."""
    if getattr(model, "base_model", None) is model:  # Llama 4's text model, Mllama's
        raise ValueError(
            f"A {type(model).__name__} names no backbone: its `base_model` is the model itself. Neither the LM head of "
            "troll_trl nor TRL's finds its hidden states. Train another model, or the vision-language model around it."
        )
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"A {type(model).__name__} names no LM head: its `get_output_embeddings()` is None.")
    more = [name for name, _ in head.named_parameters(recurse=False) if name not in ("weight", "bias")]
    if more:  # Dory scales each logit; the weights of a quantised head have scales
        raise ValueError(
            f"The LM head of the {type(model).__name__}, a {type(head).__name__}, has `{'`, `'.join(more)}` besides a "
            "weight and a bias. Neither the head of troll_trl nor TRL's reads it. All log-probabilities would be "
            "wrong. Train another model."
        )
