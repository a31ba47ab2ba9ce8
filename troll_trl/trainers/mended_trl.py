"""MendedTRL: what TRL's GRPO and RLOO do wrong in silence, mended or named. For TROLL's trainers and for TRL's clip."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from trl import RLOOTrainer

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class MendedTRL(_Trainer):
    """
    Mixin for TRL's GRPO or RLOO trainer.

    - `_generate_and_score_completions` sets the advantages of a group to 0 if all its rewards are equal. TRL's are
      rounding, which Adam would scale up to full steps, or worse: `normalize_then_sum` divides them by their own size.
      RLOO's reward contains the reference KL, so with `beta` its groups stay as they are;
    - `train` and `evaluation_loop` have vLLM load the current weights. TRL compares only the numbers of steps, which
      are equal after `load_best_model_at_end`, in a second training, and after changes by hand;
    - `train` drops a rollout batch that an earlier training left unfinished;
    - `__init__` warns about weights in 16 bits, and about prompts that end in EOS.
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
        self._warn_of_16_bits()
        self._warn_of_ended_prompts()

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(*args, **kwargs)
        rewards, self._gathered_rewards = self._gathered_rewards, None
        if rewards is None or (isinstance(self, RLOOTrainer) and self.beta != 0):
            return batch
        # A function of weight 0 does not count
        weighted = rewards * self.reward_weights.to(rewards.device)
        if isinstance(self, RLOOTrainer) or self.multi_objective_aggregation == "sum_then_normalize":
            weighted = weighted.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan).unsqueeze(1)  # TRL's sum
        group = self.num_generations if self.model.training else self.num_generations_eval
        equal = in_equal_groups(weighted, group)
        rows = len(batch["advantages"])
        first = self.accelerator.process_index * rows
        batch["advantages"] = batch["advantages"].masked_fill(equal[first : first + rows], 0.0)
        return batch

    def train(self, *args, **kwargs):
        self._last_loaded_step = -1
        self._step, self._buffered_inputs = 0, None
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self._last_loaded_step = -1
        return super().evaluation_loop(*args, **kwargs)

    def _warn_of_16_bits(self) -> None:
        # DeepSpeed and, in mixed precision, FSDP make float32 copies, which they train
        copies = self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.accelerator.mixed_precision != "no")
        if getattr(self.model, "is_quantized", False):  # TRL has its adapters in bfloat16, as QLoRA's authors do
            return
        trained = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
        if (found := trained & {torch.bfloat16, torch.float16}) and not copies:
            logger.warning(
                f"Trained weights are {' and '.join(map(str, found))}, which rounds small steps away: at a learning "
                "rate of 1e-6, almost no weight moves. Load the model in float32; with `bf16=True`, it still computes "
                "in bfloat16."
            )

    def _warn_of_ended_prompts(self) -> None:
        end = self._tokenizer.eos_token_id
        if self._tokenizer("a")["input_ids"][-1:] != [end]:
            return
        if isinstance(
            next(iter(self.train_dataset), {"prompt": None}).get("prompt"), str
        ):  # a chat template adds no EOS
            logger.warning(
                f"The tokenizer ends every prompt in {self._tokenizer.eos_token!r}, which tells the model that the "
                "text is over. Set the tokenizer's `add_eos_token` to false, or give prompts as chat messages."
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
