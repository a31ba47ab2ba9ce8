"""The cache of the old policy: the dense form's training bit for bit, and a micro-batch's share of it on the device."""

import gc
import math

import pytest
import torch
from torch.nn.functional import pad
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers.old_policy import LOG_PROBS, OLD_POLICY_KEY, TOKEN_IDS
from troll_trl.trust_region.ragged import RaggedDistribution


def with_tool_mask(trainer):
    """Every third token was a tool's: scored, and not trained on."""
    generate = trainer._generate

    def masked(prompts):
        prompt_ids, completion_ids, _, *others = generate(prompts)
        return prompt_ids, completion_ids, [[int(t % 3 < 2) for t in range(len(x))] for x in completion_ids], *others

    trainer._generate = masked


def keep_dense(trainer, monkeypatch):
    """The old policy as dense columns of the rollout batch, cut to its widest position, as it once travelled."""
    parts, pack, generate = [], RaggedDistribution.pack, trainer._generate_and_score_completions

    def recording(dense):
        parts.append((dense.token_ids, dense.log_probs))
        return pack(dense)

    def with_dense_columns(inputs):
        output = generate(inputs)
        del output[OLD_POLICY_KEY]
        widths = [int((ids >= 0).sum(-1).max()) for ids, _ in parts]
        ids = [pad(ids[..., :w], (0, max(widths) - w), value=-1) for (ids, _), w in zip(parts, widths, strict=True)]
        log_probs = [
            torch.cat([pad(x[..., :w], (0, max(widths) - w), value=-math.inf), x[..., -1:]], -1)
            for (_, x), w in zip(parts, widths, strict=True)
        ]
        output[TOKEN_IDS], output[LOG_PROBS] = torch.cat(ids), torch.cat(log_probs)
        parts.clear()
        return output

    monkeypatch.setattr(RaggedDistribution, "pack", recording)
    trainer._generate_and_score_completions = with_dense_columns


RUNS = {
    "accumulation": {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 6},
    "truncated": {"mask_truncated_completions": True, "max_completion_length": 48},
    "sparse": {"tail_mass": 0.5, "temperature": 0.6},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 3},
}


@pytest.mark.parametrize("run", [*RUNS, "tools", "rloo"])
def test_training_is_that_of_the_dense_form(run, tmp_path, monkeypatch):
    trainers, options = [], {"learning_rate": 2e-2, "kl_bound": 0.01, **RUNS.get(run, {"num_iterations": 2})}
    for dense in (True, False):
        with monkeypatch.context() as patch:
            if run == "rloo":
                trainer = make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, beta=0.0, **options)
            else:
                trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, entropy_coef=0.01, **options)
            if run == "tools":
                with_tool_mask(trainer)
            if dense:
                keep_dense(trainer, patch)
            trainer.train()
            trainers.append(trainer)
    expected, actual = trainers
    assert OLD_POLICY_KEY in actual._buffered_inputs[0] and OLD_POLICY_KEY not in expected._buffered_inputs[0]
    assert ("tool_mask" in actual._buffered_inputs[0]) == (run == "tools")
    for key in ("loss", "grad_norm", "troll/policy_kl_max", "troll/support_size_mean", "troll/rest_mass_mean"):
        assert logged(actual, key) == logged(expected, key) != []
    assert max(logged(actual, "troll/projected_fraction")) > 0
    for name, weight in weights(expected).items():
        assert torch.equal(weight, weights(actual)[name]), name


def test_only_live_positions_and_used_slots_take_memory(tmp_path):
    trainer = make_trainer(
        TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=1, tail_mass=0.5, max_completion_length=48
    )
    trainer.train()
    for batch in trainer._buffered_inputs:
        old, live = batch[OLD_POLICY_KEY], int(batch["completion_mask"].sum())
        assert live < batch["completion_mask"].numel() and len(old.token_ids) < old.width * live
        assert old.nbytes == 8 * len(old.token_ids) + 8 * live + 4 * len(old.lengths)
        # Nothing else is kept alive with it
        assert sum(x.untyped_storage().nbytes() for x in old.tensors.values()) == old.nbytes


def distributions():
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is RaggedDistribution and x.token_ids.numel() > 0]


def test_the_host_holds_the_old_policy_once(tmp_path):
    """The recorder kept the whole rollout's, of which the micro-batches are copies, until the next rollout."""
    of_others = {x.token_ids.data_ptr(): x for x in distributions()}  # of other tests in this process
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=2)
    trainer.train()
    buffered = {inputs[OLD_POLICY_KEY].token_ids.data_ptr() for inputs in trainer._buffered_inputs}
    assert len(buffered) == 4 and {x.token_ids.data_ptr() for x in distributions()} - of_others.keys() == buffered
