"""The cache of the old policy: as small as its widest row allows, and its size said once."""

import torch
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def test_bytes_per_token_are_printed_once(tmp_path, capsys):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, support_size=12, tail_mass=0.0, max_steps=8)
    trainer.train()  # two rollout batches
    lines = [line for line in capsys.readouterr().out.splitlines() if "bytes per completion token" in line]
    assert len(lines) == 1
    # 12 ids and 13 log-probabilities of 4 bytes each
    assert lines[0].startswith("TROLL: the old policy takes 100 bytes per completion token: up to 12 kept tokens")


def test_cache_is_trimmed_to_the_widest_row(tmp_path):
    """A low temperature leaves a token or two with mass; of 64 slots only the used ones are kept, in 32 bits."""
    trainer = make_trainer(
        TrollGRPOTrainer, TrollGRPOConfig, tmp_path, support_size=64, tail_mass=0.5, max_steps=1, temperature=0.5
    )
    trainer.train()
    for batch in trainer._buffered_inputs:
        ids, log_probs = batch["troll_old_token_ids"], batch["troll_old_log_probs"]
        assert ids.shape[-1] < 64 and log_probs.shape[-1] == ids.shape[-1] + 1
        assert ids.dtype == torch.int32 and log_probs.dtype == torch.float32
    assert any((batch["troll_old_token_ids"][..., -1] >= 0).any() for batch in trainer._buffered_inputs)
