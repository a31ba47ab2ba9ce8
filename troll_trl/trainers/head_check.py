"""At a run's first rollout the sparse LM head is checked against the model's own logits, on a few tokens."""

from functools import partial
from typing import Any

import torch

from troll_trl.trust_region.sparse import UNUSED

_TOKENS = 16  # tokens of one completion; with a vocabulary of 150,000 their logits take 10 MB
# Largest mean difference of log-probabilities, for each unit of the largest logit. If only the logits are rounded to
# bfloat16, each by up to 2⁻⁹, it is some 0.001. A model that caps or scales its logits is off by far more.
_TOLERANCE = 0.01


@torch.no_grad()
def check_head(
    model: torch.nn.Module, model_inputs: dict[str, Any], completion_length: int, support_size: int, temperature: float
) -> None:
    """
    Compare the log-probabilities of the sparse head with those of the model's own logits.

    The head multiplies the last hidden states by the matrix of the model's LM head, and does to the logits what the
    configs of known families ask for. A family that does something else to them would be trained on wrong
    log-probabilities, without any other sign. If the two differ by more than rounding, this raises a `ValueError`.
    Every rank must call this.

    `model` is wrapped as it is trained. `model_inputs` is what TRL scores a rollout with: `input_ids`, `attention_mask`
    and `labels` `(B, T)`, of which the last `completion_length` columns are the completions. Inputs of another shape,
    such as images, are left out. The `support_size` most likely tokens are compared at every position.
    """
    shape = model_inputs["input_ids"].shape
    # Only the last token of the prompt takes part: the model's own logits of a whole prompt could take gigabytes
    start = shape[1] - completion_length - 1
    inputs = {
        name: value[:1, start : start + _TOKENS + 1]
        for name, value in model_inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == shape
    }
    device = inputs["input_ids"].device
    # Both passes begin in one state of the generators, which stays: if there is dropout, both draw it alike
    same_draws = partial(torch.random.fork_rng, [device] if device.type == "cuda" else [])
    with same_draws():
        sparse = model(**inputs, fused_lm_head=True, support_size=support_size, tail_mass=0.0, check_finite=False)
    del inputs["labels"]
    with same_draws():
        logits = model(**inputs, use_cache=False).logits
    n = inputs["input_ids"].shape[1] - 1  # prompt tuning puts more in front
    logits = logits[:, -n - 1 : -1].float() / temperature  # (1, n, V)
    token_ids = sparse.token_ids[:, -n:].long()  # (1, n, K)
    kept = token_ids != UNUSED
    own = logits.log_softmax(-1).gather(-1, token_ids.clamp(min=0))
    difference = (sparse.sparse_log_probs[:, -n:, :-1] - own).abs()[kept].mean().item()
    if difference > _TOLERANCE * max(1.0, logits.abs().max().item()):  # a NaN passes: the guard finds it
        tokens = kept.any(-1).sum().item()
        raise ValueError(
            "The sparse LM head is wrong for this model: its log-probabilities differ from the model's own by "
            f"{difference:.2g} nats on average over {tokens} tokens. The model changes its logits in a way that "
            "neither this head nor TRL's implements. Train another model, and please report this one."
        )
