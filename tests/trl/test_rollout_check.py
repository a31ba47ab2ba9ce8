"""A rollout function's rows, lengths and token ids are checked before TRL pads them."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_config, tiny_tokenizer
from tests.trl_comparison import logged, make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.resilience.rollout_check import checked_rollouts

TRAINER = SimpleNamespace(model=SimpleNamespace(config=tiny_config(vocab_size=100)))


def rollout(change, prompts=3, corrects=False):
    """Check the rows of a rollout, of 4, 5 and 6 tokens, after a `change` of them."""
    lengths = [4 + n % 3 for n in range(prompts)]
    output = {"prompt_ids": [[3]] * prompts, "completion_ids": [[3 + n] * n for n in lengths]}
    output |= {"logprobs": [[-1.0] * n for n in lengths], "env_mask": [[1] * n for n in lengths]}
    change(output)
    return checked_rollouts(lambda *_: output, corrects)(["w1"] * prompts, TRAINER)


@pytest.mark.parametrize(("change", "named"), [
    (lambda output: output["logprobs"][1].pop(), "4 numbers in row 1 of `logprobs`.* 5 tokens"),
    (lambda output: output["completion_ids"].pop(), "3 prompts.* 2 rows of `completion_ids`"),
    *[(lambda output, bad=bad: output["completion_ids"].__setitem__(1, [5, bad, 6, 6, 6]), f"{bad!r} in row 1 of .*100")
      for bad in (100, -1, 5.0)],
    (lambda output: output["completion_ids"].__setitem__(2, []), "row 2 of `completion_ids`"),
    (lambda output: output["env_mask"].__setitem__(2, None), "None in row 2 of `env_mask`"),
    (lambda output: output.update(target=[1] * 4), "4 rows of `target`"),
])  # fmt: skip
def test_a_wrong_row_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        rollout(change)


def test_no_log_probs_are_refused_if_the_correction_reads_them():
    without = lambda output: output.update(logprobs=None)
    assert rollout(without)["logprobs"] is None
    with pytest.raises(ValueError, match="`logprobs`"):
        rollout(without, corrects=True)


@pytest.mark.parametrize("as_rows", [torch.tensor, tuple])
def test_rows_of_other_kinds_pass(as_rows):
    def change(output):
        for name in ("completion_ids", "env_mask"):
            output[name] = [as_rows(row) for row in output[name]]
        output |= {"of_all": "a text", "more": (1, 2)}

    assert rollout(change)["of_all"] == "a text"


def test_a_trainer_checks_its_rollout_function(tmp_path):
    def own(prompts, trainer):
        ids = [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts]
        last = 7 if trainer.state.global_step == 0 else 100  # 100 is no token of the model
        return {"prompt_ids": ids, "completion_ids": [[5, 6, last]] * len(ids), "logprobs": None}

    options = {"rollout_func": own, "steps_per_generation": 2, "max_steps": 4}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    with pytest.raises(ValueError, match=r"100 in row \d of `completion_ids`"):
        trainer.train()
    assert len(logged(trainer, "loss")) == 2
