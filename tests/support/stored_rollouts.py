"""
Trains on stored completions, so that one process and several see the same global batch. Tests call `main`; for FSDP2
and ZeRO-3 on the CPU, `accelerate launch` runs this file with a folder and cases.

Every rank writes what it logged to FOLDER/<case>-rank<i>.json, and rank 0 the weights to FOLDER/<case>.pt.
"""

import json
import math
import os
import sys
from collections import Counter
from copy import deepcopy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import trl.trainer.grpo_trainer
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig
from trl.generation.vllm_generation import VLLMGeneration

from tests.support.ranks import leave_together
from tests.tiny import tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers import troll_trainer
from troll_trl.trainers.clip import ClipGRPOTrainer
from troll_trl.trainers.engine_policy import SampledLogProb, read_answer
from troll_trl.trainers.sharding import reshard

GROUP, GLOBAL_BATCH = 4, 8
FSDP2 = os.environ.get("FORCE_FSDP") == "1"
BF16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
ZERO3 = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"

# The second update of each rollout batch is off-policy. Both consume all of it, whatever the split into micro-batches.
OWN = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "rloo": {},
    "masked_rank": {"loss_type": "dapo"},
    "reference_kl": {"loss_type": "grpo", "beta": 0.3},
    "idle": {"loss_type": "dapo", "num_iterations": 1},
    "mask": {"trust_region": "mask", "divergence_bound": 0.001},
    "penalty": {"trust_region": "penalty", "divergence_type": "topk_kl", "kl_bound": 1e-4},
    "adaptive": {"adaptive_learning_rate": True, "learning_rate": 5e-2},
    "engine": {"old_policy": "engine", "use_vllm": True, "vllm_mode": "server"},
    "equal": {"loss_type": "dapo"},
}
# As the configs for FSDP2 train, with a head of its own; before every generation the weights are read as for vLLM
AS_SHIPPED = {
    **{"loss_type": "dapo", "gradient_checkpointing": True, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2},
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    **{"num_generations_eval": 2, "per_device_eval_batch_size": 4},
}
SHIPPED = {"shipped": AS_SHIPPED, "shipped_clip": AS_SHIPPED}
CASES = OWN | SHIPPED
CLASSES = {"rloo": (TrollRLOOTrainer, TrollRLOOConfig), "shipped_clip": (ClipGRPOTrainer, GRPOConfig)}


def completion(prompt_ids: list[int], sample: int) -> list[int]:
    """Sample `sample` of a prompt: 3 to 8 tokens, whatever the process that asks for it."""
    generator = torch.Generator().manual_seed(1000 * sum(prompt_ids) + sample)
    return torch.randint(3, 100, (3 + sum(prompt_ids) % 6,), generator=generator).tolist()


def stored(trainer, prompt_ids):
    first = trainer.accelerator.process_index * len(prompt_ids)  # of this rank, in the global batch
    return [completion(ids, (first + i) % GROUP) for i, ids in enumerate(prompt_ids)]


class StaleEngine:
    """In place of TRL's `VLLMGeneration`: it has the first weights for ever, and knows nothing of every fifth token."""

    mode, server_url = "server", "stored"

    def __init__(self, **_):
        self.vllm_client, self.model = self, tiny_model()

    def sync_weights(self): ...

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}}

    def generate(self, *_, **__): ...

    @torch.no_grad()
    def numbers(self, prompt_ids: list[int], ids: list[int]) -> list[SampledLogProb]:
        rows = self.model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
        likely = rows.topk(19)
        listed = [[token, *others] for token, others in zip(ids, likely.indices.tolist(), strict=True)]
        values = [rows[place, tokens].tolist() for place, tokens in enumerate(listed)]
        values[4:5] = [[math.nan] * 20 for _ in values[4:5]]
        return read_answer(ids, [20] * len(ids), [*chain(*listed)], [*chain(*values)], 19)


def weights_for_vllm(trainer) -> dict:
    """What TRL loads into a colocated engine in sleep mode before every generation."""
    engine = SimpleNamespace(accelerator=trainer.accelerator, _fix_param_name_to_vllm=lambda name, **_: name)
    return dict(VLLMGeneration._iter_fsdp2_params(engine, trainer.model))


def rollout(prompts, trainer):
    if FSDP2 and trainer.shipped:
        assert weights_for_vllm(trainer).keys() == dict(trainer.model.named_parameters()).keys()
        trainer.synced[trainer.model.training] += 1
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    ids = stored(trainer, prompt_ids)
    mask = [[1] * len(row) for row in ids]
    if trainer.masked_rank:  # the second half of the global batch, which is the second of two ranks
        first = trainer.accelerator.process_index * len(prompts)
        half = len(prompts) * trainer.accelerator.num_processes // 2
        mask = [[int(first + i < half)] * len(row) for i, row in enumerate(ids)]
    numbers = None
    if getattr(trainer.args, "old_policy", None) == "engine":
        numbers = list(map(trainer.vllm_generation.numbers, prompt_ids, ids))
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": numbers, "env_mask": mask}


def equal_for_some(prompts, completion_ids, **_) -> list[float]:
    """Equal rewards for prompts of three words: of every rollout batch, other groups on each of two ranks."""
    rewards = token_reward(completion_ids)
    return [0.35 if len(prompt.split()) == 3 else own for prompt, own in zip(prompts, rewards, strict=True)]


def shipped_model():
    return tiny_model(tie_word_embeddings=False, num_hidden_layers=3)


def make(case: str, out: Path):
    processes = int(os.environ.get("WORLD_SIZE", 1))
    trl.trainer.grpo_trainer.VLLMGeneration = StaleEngine
    troll_trainer.check_vllm = lambda args: None
    trainer_class, config_class = CLASSES.get(case, (TrollGRPOTrainer, TrollGRPOConfig))
    shipped = case in SHIPPED
    options = {"beta": 0.0, "num_iterations": 2, "gradient_checkpointing": False, "max_steps": 4, "learning_rate": 1e-2}
    if trainer_class is not ClipGRPOTrainer:
        options["kl_bound"] = 0.002
    options |= deepcopy(CASES[case])  # transformers writes into it
    if ZERO3:  # of which accelerate knows without a GPU only once the state below is set
        TrainingArguments.world_size = property(lambda self: processes)
    args = config_class(
        output_dir=str(out / case),
        use_cpu=not ZERO3,  # accelerate has no DeepSpeed for a CPU that is asked for
        bf16=BF16,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=GLOBAL_BATCH // processes,
        num_generations=GROUP,
        max_completion_length=8,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        ddp_find_unused_parameters=False,
        **options,
    )
    assert args.device.type == "cpu"  # creates the state, in which accelerate shards for accelerators only
    if FSDP2:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if ZERO3:
        ranks = {"process_index": int(os.environ["RANK"]), "local_process_index": int(os.environ["LOCAL_RANK"])}
        PartialState._shared_state.update(num_processes=processes, backend="gloo", **ranks)
    model, extra = shipped_model() if shipped else tiny_model(), {}
    if shipped:
        extra["eval_dataset"] = tiny_prompts(8)
    if options["beta"]:  # the reference model is loaded from where the model came from
        model = str(out / "model")
        if args.process_index == 0:
            tiny_model().save_pretrained(model)
        args.distributed_state.wait_for_everyone()
    if case != "rloo":
        extra["rollout_func"] = rollout
    reward = equal_for_some if case == "equal" else token_reward
    trainer = trainer_class(model, reward, args, tiny_prompts(), processing_class=tiny_tokenizer(), **extra)
    trainer.masked_rank, trainer.shipped, trainer.synced = case == "masked_rank", shipped, Counter()
    if case == "rloo":
        trainer._generate_single_turn = lambda prompt_ids, *others: stored(trainer, prompt_ids)
    assert trainer.accelerator.num_processes == processes
    return trainer


class OnlyShardedGradients(TrainerCallback):
    """Between the micro-batches of an update a rank holds its part of the gradient, and not all of it."""

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), f"{name}: the gradient is not yet sharded"


def whole(parameter):
    if FSDP2:
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor().detach().clone()
    if ZERO3:
        import deepspeed

        assert parameter.numel() == 0, "not partitioned"
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()


def main(out: Path, cases: list[str]):
    for case in cases:
        trainer = make(case, out)
        if FSDP2 and trainer.shipped:
            trainer.add_callback(OnlyShardedGradients)
        trainer.train()
        if FSDP2 and trainer.shipped:
            assert trainer.synced[True] >= 2 and trainer.synced[False] >= 6, trainer.synced
            reshard(trainer.model)
        parameters = list(trainer.model.named_parameters())
        kind = str(trainer.accelerator.distributed_type)
        weights = {name.removeprefix("module."): whole(parameter) for name, parameter in parameters}
        rank = trainer.accelerator.process_index
        lines = {"kind": kind, "processes": trainer.accelerator.num_processes, "log": trainer.state.log_history}
        (out / f"{case}-rank{rank}.json").write_text(json.dumps(lines))
        if rank == 0:
            torch.save(weights, out / f"{case}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave_together()
