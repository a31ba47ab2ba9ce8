"""MendedTRL: faults of TRL's GRPO and RLOO that are silent, mended or named. For TROLL's trainers and TRL's clip."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import RLOOTrainer

from troll_trl.trainers.model_card import NamesLocalModel

logger = get_logger(__name__)


class MendedTRL(NamesLocalModel):
    """
    Mixin for TRL's GRPO or RLOO trainer.

    - `_generate_and_score_completions`: a group of equal rewards has advantages of 0. TRL's are rounding, which Adam
      scales up to full steps. RLOO's rewards contain the reference KL, so RLOO with `beta` stays as it is.
    - `train`, `evaluation_loop`: vLLM loads the current weights. TRL compares only the numbers of steps, although
      `load_best_model_at_end`, a second training or the user may have changed the weights.
    - `__init__`: warns about trained weights in 16 bits, and about prompts that end in EOS.
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
        # DeepSpeed and, in mixed precision, FSDP train float32 copies
        copies = self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.accelerator.mixed_precision != "no")
        trained = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
        if (found := trained & {torch.bfloat16, torch.float16}) and not copies:
            logger.warning(
                f"Trained weights are {' and '.join(map(str, found))}: at a learning rate of 1e-6, rounding stops most "
                "of them. Load the model in float32. With `bf16=True`, it still computes in bfloat16."
            )
        ends = self._tokenizer("a")["input_ids"][-1:] == [self._tokenizer.eos_token_id]
        if ends and isinstance(next(iter(self.train_dataset)).get("prompt"), str):  # a chat template adds no EOS
            logger.warning(
                f"The tokenizer ends every prompt in {self._tokenizer.eos_token!r}, so the model takes the text to be "
                "over. Set the tokenizer's `add_eos_token` to false, or give prompts as chat messages."
            )

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(*args, **kwargs)
        rewards, self._gathered_rewards = self._gathered_rewards, None
        if rewards is not None and (self.beta == 0 or not isinstance(self, RLOOTrainer)):
            group = self.num_generations if self.model.training else self.num_generations_eval
            equal = in_equal_groups(rewards * self.reward_weights.to(rewards.device), group)
            mine = equal.view(self.accelerator.num_processes, -1)[self.accelerator.process_index]
            batch["advantages"] = batch["advantages"].masked_fill(mine, 0.0)
        return batch

    def train(self, *args, **kwargs):
        self._last_loaded_step = -1
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self._last_loaded_step = -1
        return super().evaluation_loop(*args, **kwargs)


def in_equal_groups(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return `(n,)`, whether a completion's `group` consecutive rows of `rewards` `(n, functions)` are equal. NaN means
    that a function does not apply. A completion to which none applies does not count."""
    known = ~rewards.isnan().all(1, keepdim=True)  # (n, 1)
    rewards = rewards.nan_to_num(nan=torch.inf)  # so two NaN are equal
    by_group = lambda fill: rewards.masked_fill(~known, fill).view(-1, group, rewards.shape[1])
    equal = by_group(torch.inf).amin(1) == by_group(-torch.inf).amax(1)  # (groups, functions)
    return equal.all(1).repeat_interleave(group)
