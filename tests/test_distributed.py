"""Two processes on the CPU: no hang, the same metrics on every rank, the same weights."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
import json
import sys
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from tiny import tiny_model, tiny_prompts, tiny_tokenizer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def reward(completion_ids, **kwargs):
    return [sum((7 * token) % 13 for token in ids) / (13 * len(ids)) for ids in completion_ids]


args = TrollGRPOConfig(
    output_dir=sys.argv[1],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    steps_per_generation=4,
    gradient_accumulation_steps=1,
    learning_rate=2e-2,
    max_steps=6,
    kl_bound=0.01,
    ddp_find_unused_parameters=False,
)
trainer = TrollGRPOTrainer(tiny_model(), reward, args, tiny_prompts(), processing_class=tiny_tokenizer())
assert trainer.accelerator.num_processes == 2
assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU, trainer.accelerator.distributed_type

compute_loss = trainer._compute_loss


def mask_rank_1_once(model, inputs):
    if trainer.state.global_step == 1 and trainer.accelerator.process_index == 1:
        inputs = {**inputs, "completion_mask": torch.zeros_like(inputs["completion_mask"])}
        inputs["troll_old_token_ids"] = torch.full_like(inputs["troll_old_token_ids"], -1)
    return compute_loss(model, inputs)


trainer._compute_loss = mask_rank_1_once
trainer.train()
lines = [{k: v for k, v in line.items() if k.startswith("troll/")} for line in trainer.state.log_history]
weights = sum(p.double().sum().item() for p in trainer.model.parameters())
rank = trainer.accelerator.process_index
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps({"lines": lines, "weights": weights}))
# On a busy machine a process may abort while it exits ("terminate called without an active exception", after all of the
# above), and torchrun then ends the other. So both have written before either exits, and exit codes are not looked at.
trainer.accelerator.wait_for_everyone()
trainer.end()
"""


def test_two_ranks_log_the_same(tmp_path):
    """In the second update, rank 1 has no live token."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    tests = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), result.stderr[-3000:]
    results = [json.loads(file.read_text()) for file in files]
    assert results[0] == results[1]
    lines = [line for line in results[0]["lines"] if line]
    assert len(lines) == 3 and all(len(line) == 10 for line in lines)
    assert max(line["troll/kl_max"] for line in lines) <= 0.01 * 1.001
    assert max(line["troll/projected_fraction"] for line in lines) > 0
