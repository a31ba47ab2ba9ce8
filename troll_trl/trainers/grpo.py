"""TrollGRPOTrainer: the parts of TROLL that are specific to GRPO."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from troll_trl.resilience.checkpoints import CheckpointedTrainer
from troll_trl.resilience.guard import GuardedTrainer
from troll_trl.resilience.rollout_check import checked_rollouts
from troll_trl.trainers.columns import OLD_LOG_PROBS
from troll_trl.trainers.config import TrollGRPOConfig
from troll_trl.trainers.loss import LossInputs, Ratio
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.troll_trainer import TrollTrainer


class TrustRegionGRPO(TrollTrainer, GRPOTrainer):
    """GRPO with a trust region, but without the fault handling of [`TrollGRPOTrainer`]: it skips no update with a NaN,
    and saves checkpoints and resumes as TRL does."""

    _tag_names = ["trl", "grpo", "troll"]
    _name = "TROLL"
    _paper = TROLL
    _config_class = TrollGRPOConfig
    # TRL's, declared for the type checker
    get_off_policy_mask: Callable[..., torch.Tensor]
    rollout_func: Any

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.rollout_func is not None:
            self.rollout_func = checked_rollouts(self.rollout_func, self._corrects_engine)
        # On the instance: an override would not run for the mask of a subclass, which would see `log π`
        self.get_off_policy_mask = partial(self._mask_by_policy, self.get_off_policy_mask)

    @property
    def _corrects_engine(self) -> bool:
        """Whether TRL multiplies the loss by the ratio of the trainer's probabilities to vLLM's."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def _ratio(self):
        return Ratio.MEAN if self.importance_sampling_level == "sequence" else Ratio.TOKEN

    @property
    def _scores_old_policy(self):
        generate_every = self.args.steps_per_generation * self.num_iterations  # micro-batches; the test is TRL's
        return self._corrects_engine or self.args.gradient_accumulation_steps % generate_every != 0

    def _mask_by_policy(self, get_off_policy_mask: Callable[..., torch.Tensor], **arguments) -> torch.Tensor:
        """Call TRL's or a subclass's `get_off_policy_mask`, which measures the policy, with the numbers from before the
        trust region changed them, if there was an old policy."""
        if isinstance(inputs := self._scoring, LossInputs):
            before = inputs.before
            arguments |= {"per_token_logps": inputs.log_probs, "advantages": before["advantages"]}
            arguments["sampling_per_token_logps"] = before.get("sampling_per_token_logps", before[OLD_LOG_PROBS])
        return get_off_policy_mask(**arguments)

    def _keep_engine_policy(self, engine_policy, _prompts, completion_ids, tool_mask, _completions, log_probs, *_):
        if log_probs is None:
            raise ValueError(
                "`rollout_func` returned no `logprobs`, and with `old_policy='engine'` they are the old policy. Return "
                "those that `trainer.vllm_generation.generate` gives, or use `old_policy='trainer'`."
            )
        engine_policy.keep(completion_ids, log_probs=log_probs, tool_mask=tool_mask)


class TrollGRPOTrainer(GuardedTrainer, CheckpointedTrainer, TrustRegionGRPO):
    """
    GRPO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models): a
    differentiable projection of every token's distribution onto a KL trust region around the old policy replaces the
    clip of the probability ratio.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, averaged as `loss_type` specifies. TRL's own loss computes it, so loss types,
    sequence-level ratios, masks, entropy bonus, vLLM correction and MoE loss are TRL's.
    [`~troll_trl.trainers.loss`] derives how, and [`~troll_trl.trainers.troll_trainer.TrollTrainer`] says when.

    With `trust_region="penalty"`, the ratio is `p(a)/q(a)`, without a limit, and the regression stays. With
    `trust_region="mask"`, [DPPO](https://huggingface.co/papers/2602.04879) replaces TROLL: a token that has moved too
    far in the direction of its advantage loses its gradient.

    [`~troll_trl.resilience.guard.GuardedTrainer`] skips updates with a NaN, and
    [`~troll_trl.resilience.checkpoints.CheckpointedTrainer`] resumes exactly. The arguments are the same as in
    [`~trl.GRPOTrainer`], except for one:

    Args:
        args ([`TrollGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A plain `GRPOConfig` gets TROLL's defaults.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl.rewards import accuracy_reward
    >>> from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

    >>> trainer = TrollGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=TrollGRPOConfig(steps_per_generation=8, kl_bound=0.05),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```
    """
