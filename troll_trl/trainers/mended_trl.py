"""MendedTRL: what TRL's GRPO and RLOO do wrong in silence, mended or named. For TROLL's trainers and for TRL's clip."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from trl import RLOOTrainer

from troll_trl.trainers.rollout_sampling import special_tokens_alone, warn_of_ignored_filters
from troll_trl.trainers.run_cost import RunCost
from troll_trl.trainers.sharding import reshard
from troll_trl.trainers.start_lines import describe_reuse

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class MendedTRL(_Trainer):
    """
    Mixin for TRL's GRPO or RLOO trainer.

    - `_generate`: rollouts take only the special tokens from the model's `generation_config.json`.
    - `_generate_and_score_completions`: a group of equal rewards has advantages of 0. TRL's are rounding, which Adam
      scales up to full steps. RLOO's rewards contain the reference KL, so RLOO with `beta` stays as it is. Before that,
      FSDP2 shards the weights again: [`reshard`].
    - `train`, `evaluation_loop`: vLLM loads the current weights. TRL compares only the numbers of steps, although
      `load_best_model_at_end`, a second training or the user may have changed the weights.
    - `train`: a rollout batch that an earlier training left unfinished is dropped.
    - `__init__`: says how completions are used. Warns about filters in that file, 16-bit weights, and prompts with EOS.
    - `log`: adds [`RunCost`].
    """

    _calculate_rewards: Callable[..., torch.Tensor]  # TRL's, declared for the type checker

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._gathered_rewards: Any = None  # (n, functions), of all ranks' completions
        calculate_rewards = self._calculate_rewards  # or a subclass's

        def keep_rewards(*args, **kwargs) -> torch.Tensor:
            self._gathered_rewards = calculate_rewards(*args, **kwargs)
            return self._gathered_rewards

        self._calculate_rewards = keep_rewards
        self.add_callback(RunCost)
        describe_reuse(self)
        if not self.use_vllm:  # TRL sends every filter to vLLM
            warn_of_ignored_filters(self.model, self.generation_config)
        self._warn_of_16_bits()
        self._warn_of_ended_prompts()

    def _generate(self, *args, **kwargs):
        with special_tokens_alone(self.model):
            return super()._generate(*args, **kwargs)

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        reshard(self.model)
        batch = super()._generate_and_score_completions(*args, **kwargs)
        if self.model.training:
            self._run_cost.completions += self.args.generation_batch_size
        rewards, self._gathered_rewards = self._gathered_rewards, None
        is_rloo = isinstance(self, RLOOTrainer)
        if rewards is not None and not (is_rloo and self.beta != 0):
            weighted = rewards * self.reward_weights.to(rewards.device)  # a function of weight 0 does not count
            if is_rloo or self.multi_objective_aggregation == "sum_then_normalize":
                weighted = weighted.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan).unsqueeze(1)  # TRL's sum
            group = self.num_generations if self.model.training else self.num_generations_eval
            equal = in_equal_groups(weighted, group).view(self.accelerator.num_processes, -1)
            batch["advantages"] = batch["advantages"].masked_fill(equal[self.accelerator.process_index], 0.0)
        return batch

    def train(self, *args, **kwargs):
        self._last_loaded_step = -1
        self._step, self._buffered_inputs = 0, None
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self._last_loaded_step = -1
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        logs.update(self._run_cost.metrics(self.args.device))
        super().log(logs, *args, **kwargs)

    @property
    def _run_cost(self) -> RunCost:  # `restore_callback_states_from_checkpoint` replaces callbacks
        return next(found for found in self.callback_handler.callbacks if isinstance(found, RunCost))

    def _warn_of_16_bits(self) -> None:
        # DeepSpeed and, in mixed precision, FSDP train float32 copies
        copies = self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.accelerator.mixed_precision != "no")
        # TRL has the adapters of a quantized base in bfloat16, as QLoRA's authors do
        if copies or getattr(self.model, "is_quantized", False):
            return
        trained = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
        if found := trained & {torch.bfloat16, torch.float16}:
            logger.warning(
                f"Trained weights are {' and '.join(map(str, found))}: at a learning rate of 1e-6, rounding stops most "
                "of them. Load the model in float32. With `bf16=True`, it still computes in bfloat16."
            )

    def _warn_of_ended_prompts(self) -> None:
        ends = self._tokenizer("a")["input_ids"][-1:] == [self._tokenizer.eos_token_id]
        # A chat template adds no EOS
        if ends and isinstance(next(iter(self.train_dataset), {"prompt": None}).get("prompt"), str):
            logger.warning(
                f"The tokenizer ends every prompt in {self._tokenizer.eos_token!r}, so the model takes the text to be "
                "over. Set the tokenizer's `add_eos_token` to false, or give prompts as chat messages."
            )


def in_equal_groups(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """
    Return `(n,)`, whether the completions of a row's group have equal rewards, column by column.

    Args:
        rewards (`torch.Tensor`):
            `(n, columns)`, of functions that TRL normalizes one by one, or their sum. A group is in consecutive rows.
            NaN, for a completion without a reward, is left out, as in TRL's means.
        group (`int`):
            Number of completions of a group.
    """
    by_group = lambda fill: rewards.masked_fill(rewards.isnan(), fill).view(-1, group, rewards.shape[1])
    equal = by_group(torch.inf).amin(1) >= by_group(-torch.inf).amax(1)  # (groups, columns), also if all are NaN
    return equal.all(1).repeat_interleave(group)
