"""Whose code makes the host wait for the GPU in an update: TRL's logging may, ours only where the head must."""

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

import troll_trl
from tests.tiny import tiny_model, tiny_prompts, tiny_tokenizer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

PACKAGE = str(Path(troll_trl.__file__).parent)
# Once in a micro-batch each: the number of live positions, and whether their supports are valid
OF_THE_HEAD = {"lm_head/patch.py": 2}


def waiting_file() -> str | None:
    """The file of ours, relative to the package, that has called PyTorch; `None` if another's code has."""
    frame = sys._getframe(1)
    passed = (__file__, warnings.__file__, "/torch/")
    while frame is not None and any(part in frame.f_code.co_filename for part in passed):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return name.removeprefix(f"{PACKAGE}/") if name.startswith(PACKAGE) else None


class Recording(TrollGRPOTrainer):
    """Counts the waits of ours in every update that no generation precedes."""

    def training_step(self, *args, **kwargs):
        if self._step % self.args.steps_per_generation == 0:
            return super().training_step(*args, **kwargs)
        found: Counter[str] = Counter()

        def show(message, *_, **__):
            if "synchronizing CUDA operation" in str(message) and (file := waiting_file()):
                found[file] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return super().training_step(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                self.waits.append(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{"kl_bound": 1e-3}, {"trust_region": "penalty", "divergence_type": "binary_kl"}])
def test_an_update_waits_for_the_gpu_only_in_the_head(options, tmp_path):
    Recording.waits = []
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 8}
    config = TrollGRPOConfig(str(tmp_path), bf16=False, report_to="none", steps_per_generation=4, **sizes, **options)
    trainer = Recording(
        model=tiny_model("qwen3"),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
        args=config,
        train_dataset=tiny_prompts(),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert len(Recording.waits) >= 3
    allowed = OF_THE_HEAD if "kl_bound" in options else {}
    for found in Recording.waits:
        assert {file: count for file, count in found.items() if count > allowed.get(file, 0)} == {}
