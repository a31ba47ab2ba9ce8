"""TrollRLOOTrainer: what differs from TRL's RLOOTrainer, and nothing else."""

from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import RLOOConfig, RLOOTrainer
from trl.trainer.rloo_trainer import RewardFunc

from troll_trl.trainers.config import TrollRLOOConfig
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.troll_trainer import EvalDataset, TrollTrainer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


class TrollRLOOTrainer(TrollTrainer, RLOOTrainer):
    """
    RLOO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models):
    REINFORCE with a leave-one-out baseline. A differentiable projection of every token's distribution onto a KL trust
    region around the old policy replaces its clip.

    RLOO's ratio is the ratio of a whole completion. With policy `p`, old policy `q`, projection `π` and advantage `A`,
    the loss of a completion is `−exp(Σ_t log π_t(a_t) − log q_t(a_t))·A + α·Σ_t KL(p_t ‖ stopgrad π_t)`, averaged over
    the micro-batch. The trust region bounds each token. Unlike RLOO's clip, it does not bound the ratio of a
    completion, which is a product over its tokens. The reference KL is part of the reward in RLOO; TROLL does not
    change it.

    [`~troll_trl.trainers.troll_trainer.TrollTrainer`] has the overrides. The arguments are the same as in
    [`~trl.RLOOTrainer`], except for one:

    Args:
        args ([`TrollRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            Configuration. A plain `RLOOConfig` gets TROLL's defaults.
    """

    _tag_names = ["trl", "rloo", "troll"]
    _name = "TROLL-RLOO"
    _paper = TROLL
    _config_class = TrollRLOOConfig

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc],
        args: TrollRLOOConfig | RLOOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
    ):
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if not self.trust_region.needs_support:
            raise ValueError("RLOO needs a trust region with a support: it keeps no old log-probability of a token.")

    def _keep_engine_policy(self, recorder, _prompts, completion_ids, *_):
        recorder.keep(completion_ids, recorder.answered, None)  # TRL's RLOO asks once, and drops the numbers

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        # A ratio of completions sums over tokens. Not scaled for gradient accumulation: the Trainer scales RLOO's loss
        return (values * mask).sum(-1).mean()
