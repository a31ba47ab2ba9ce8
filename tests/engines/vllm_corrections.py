"""The importance-sampling correction of TRL, under a vLLM engine that rounds."""

import torch
from pytest import approx
from trl_comparison import assert_same_movement, logged, train_both, weights
from vllm_engine import SGD

# Narrow, so that each acts on the difference between bfloat16 and float32
CORRECTIONS = {
    "token_truncate": {"vllm_importance_sampling_clip_max": 1.002},
    "token_mask": {"vllm_importance_sampling_clip_max": 1.003, "vllm_importance_sampling_clip_min": 0.997},
    "sequence_truncate": {"vllm_importance_sampling_clip_max": 1.005},
    "sequence_mask": {"vllm_importance_sampling_clip_max": 1.005},
}


def assert_correction_is_trls(folder, model: str, mode: str | None, **options):
    """
    TROLL's trainer at open bound and TRL's without a clip take the same weights from one rollout batch of an engine in
    bfloat16. A second would start from weights that differ by their rounding.

    Args:
        folder (`Path`):
            Of the runs.
        model (`str`):
            Folder of a model in float32.
        mode (`str`, *optional*):
            Of the importance-sampling correction, a key of `CORRECTIONS`, whose limit is seen to act; `None` for none.
        **options:
            Of both trainers.
    """
    options |= {**SGD, "max_steps": 4, "vllm_importance_sampling_correction": mode is not None}
    if mode is not None:
        options |= {"vllm_importance_sampling_mode": mode, **CORRECTIONS[mode]}
    start, trl_run, troll_run = train_both("grpo", folder, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))
    for end in ("min", "mean", "max"):
        key = f"sampling/importance_sampling_ratio/{end}"
        # Two programs score in float32: on a processor without AVX-512 their ratios agree to four digits
        assert logged(troll_run, key) == approx(logged(trl_run, key), rel=1e-3)
    if mode is not None:
        applied = torch.cat([batch["importance_sampling_ratio"].flatten() for batch in troll_run._buffered_inputs])
        limit = CORRECTIONS[mode]["vllm_importance_sampling_clip_max"]
        assert (applied == (0.0 if mode.endswith("mask") else torch.tensor(limit))).any(), "the limit was not reached"
