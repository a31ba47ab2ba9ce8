"""The ranges of numeric options, TRL's own included, checked before anything is loaded."""

import math
from typing import Any

from troll_trl.fields import is_number

_RANGES = {
    "positive and finite": (
        lambda x: 0 < x < math.inf,
        ("temperature", "repetition_penalty", "num_train_epochs", "adam_epsilon"),
    ),
    "positive": (lambda x: x > 0, ("vllm_importance_sampling_clip_max", "delta")),  # inf means no limit
    "at least 0 and finite": (
        lambda x: 0 <= x < math.inf,
        (
            *("learning_rate", "weight_decay", "warmup_steps", "beta", "entropy_coef_delta"),
            *("vllm_importance_sampling_clip_min", "logging_steps", "save_steps", "regression_coef"),
        ),
    ),
    # inf means no clip
    "at least 0": (lambda x: x >= 0, ("epsilon", "epsilon_high", "max_grad_norm", "off_policy_mask_threshold")),
    "-1, to vLLM all tokens, or a whole number of at least 0": (lambda x: x >= -1 and x % 1 == 0, ("top_k",)),
    "at least 1 and finite": (lambda x: 1 <= x < math.inf, ("ratio_cap",)),
    "in [0, 1)": (lambda x: 0 <= x < 1, ("tail_mass", "adam_beta1", "adam_beta2")),
    "in (0, 1]": (lambda x: 0 < x <= 1, ("top_p",)),
    "in [0, 1]": (lambda x: 0 <= x <= 1, ("min_p", "top_entropy_quantile", "ref_model_mixup_alpha")),
    "finite": (math.isfinite, ("entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_target")),
    "a whole number of at least 1": (
        lambda x: x >= 1 and x % 1 == 0,
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("steps_per_generation", "generation_batch_size", "num_iterations", "max_completion_length"),
            *("num_generations_eval", "ref_model_sync_steps", "max_skipped_updates"),
            *("max_prompt_tokens", "max_train_samples", "max_eval_samples"),
        ),
    ),
    "a whole number of at least 2": (lambda x: x >= 2 and x % 1 == 0, ("num_generations",)),  # a group is compared
    "-1 (train for `num_train_epochs`) or a whole number of at least 1": (
        lambda x: x == -1 or (x >= 1 and x % 1 == 0),
        ("max_steps",),
    ),
}
_NEVER_NONE = ("regression_coef", "tail_mass", "max_skipped_updates", "temperature", "num_generations", "epsilon")


def check_ranges(config: Any) -> None:
    """Refuse (`ValueError`) a number of a configuration outside of its range, also those on which TRL fails late, or
    never. Options that it lacks pass, and most that are `None`."""
    for allowed, (inside, names) in _RANGES.items():
        for name in names:
            value = getattr(config, name, None)
            required = name in _NEVER_NONE and hasattr(config, name)
            if (value is not None or required) and not (is_number(value) and inside(value)):
                raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    weights = getattr(config, "reward_weights", None)
    if is_number(weights):
        raise ValueError(f"`reward_weights` must be a list with a number for each reward function, got {weights!r}.")
    for number, weight in enumerate(weights or ()):
        if not (is_number(weight) and math.isfinite(weight)):
            raise ValueError(f"`reward_weights` must be finite numbers, got {weight!r} for reward function {number}.")
