"""TrollGRPOTrainer: what differs from TRL's GRPOTrainer, and nothing else."""

import functools
import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from troll_trl.config import TrollGRPOConfig
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.metrics import TrollMetrics
from troll_trl.projection import kl_divergence, project
from troll_trl.sparse import SparseDistribution, check_support_options
from troll_trl.trl_seams import check_trl

logger = get_logger(__name__)

# Columns of the rollout batch that hold the old policy; TRL shuffles and splits them with its own
_OLD_TOKEN_IDS, _OLD_LOG_PROBS = "troll_old_token_ids", "troll_old_log_probs"


class TrollGRPOTrainer(GRPOTrainer):
    """
    GRPO with TROLL (Trust Region Optimization for Large Language Models, https://huggingface.co/papers/2510.03817): the
    clip of the probability ratio is replaced by a differentiable projection of every token's distribution onto a KL
    trust region around the old policy.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as `loss_type` says. TRL's own `_compute_loss` computes it: it is
    given `log π(a)` in place of `log p(a)` and a clip range without ends, so that loss types, sequence-level ratios,
    masks, entropy bonus, vLLM correction and MoE loss are TRL's. Overridden are

    - `_generate_and_score_completions`: the pass that scores the rollout also keeps a sparse old policy of every token;
    - `_get_per_token_logps_and_entropies`: scores with the sparse head, and returns projected log-probabilities to the
      loss;
    - `_compute_loss`: adds the regression term, and the reference KL of the unprojected policy;
    - `get_off_policy_mask`: sees the unprojected policy;
    - `log`: adds the `troll/…` metrics, reduced over ranks, so that every rank must call it, and leaves out
      `clip_ratio/…`, which would always be 0.

    TRL's metric `policy_loss` is the surrogate alone: the regression and the reference KL are added after it.

    Args:
        model, reward_funcs, *args, **kwargs:
            As [`~trl.GRPOTrainer`].
        args ([`TrollGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A plain `GRPOConfig` is taken with TROLL's defaults.

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

    _tag_names = ["trl", "grpo", "troll"]
    _name = "TROLL"
    _paper = {
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{becker2025troll,
                title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
                author       = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and
                                Neumann, Gerhard},
                year         = 2025,
                eprint       = {arXiv:2510.03817},
            }"""),
    }

    # TRL's, declared for the type checker, which does not follow TRL
    beta: float
    get_off_policy_mask: Callable[..., torch.Tensor]

    def __init__(self, model, reward_funcs=None, args: GRPOConfig | None = None, *others, **kwargs):
        check_trl()
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = TrollGRPOConfig(f"{model_id.split('/')[-1]}-TROLL")
        elif not isinstance(args, TrollGRPOConfig):
            args = TrollGRPOConfig.from_grpo(args)
        super().__init__(model, reward_funcs, args, *others, **kwargs)

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        vocabulary = base_model.config.get_text_config().vocab_size
        check_support_options(args.support_size, args.tail_mass, vocabulary)
        add_sparse_lm_head(base_model, self.temperature, args.cast_lm_head_to_fp32)
        # On the instance: the class keeps TRL's static method
        self.get_off_policy_mask = functools.partial(self._off_policy_mask_of_policy, self.get_off_policy_mask)
        # The projection takes the place of the clip: TRL's surrogate gets a range without ends
        self.epsilon_low = self.epsilon_high = math.inf

        self._troll_metrics = {mode: TrollMetrics(self.accelerator) for mode in ("train", "eval")}
        self._record_next_pass = False  # the next pass without gradient scores the rollout with the current weights
        self._recorded: SparseDistribution | None = None
        self._loss_pass: _LossPass | None = None  # set while TRL's loss runs
        self._say_batch_arithmetic()
        self._warn_of_dropout()

    def _say_batch_arithmetic(self):
        args, completions = self.args, self.args.generation_batch_size
        self.accelerator.print(
            f"TROLL: {completions // args.num_generations} prompts x {args.num_generations} completions per rollout "
            f"batch, {args.updates_per_rollout_batch:g} updates per rollout batch, up to {args.support_size} tokens "
            f"kept per position (tail mass {args.tail_mass:g}), KL bound {args.kl_bound:g}."
        )
        if args.trust_region_idle:
            logger.warning(
                "The trust region is idle: every update uses completions of the current weights, because "
                f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) is a multiple of "
                f"steps_per_generation x num_iterations ({args.steps_per_generation} x {args.num_iterations}). Policy "
                "and old policy are then equal, and TROLL, like a clip, changes nothing. For 8 updates per rollout "
                f"batch, as in the paper, set `steps_per_generation={8 * args.gradient_accumulation_steps}`, or raise "
                "`num_iterations`."
            )

    def _warn_of_dropout(self):
        # It would take the noise between two dropout masks for a step of the policy, and regress on it
        rate = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if rate > 0:
            logger.warning(
                f"The model has dropout (up to {rate:g}): the pass that scores a rollout and the loss draw different "
                "masks, so that the policy differs from the old policy even at equal weights, and the projection acts "
                "on that noise. Set `disable_dropout=True` (it covers `lora_dropout`, which is 0.05 unless set)."
            )

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL's own condition for scoring the rollout with the current weights. The reference pass comes after that one,
        # with PEFT through the same model, and in an idle run it is the only one: it must not be taken for the old
        # policy.
        self._record_next_pass = not self.args.trust_region_idle or (
            self.use_vllm and self.vllm_importance_sampling_correction
        )
        self._recorded = None
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._record_next_pass = False
        old, self._recorded = self._recorded, None
        if (old is None) != ("old_per_token_logps" not in output):
            raise RuntimeError(
                "TRL scored the old policy under another condition than troll_trl expects; see trl_seams.py."
            )
        if old is not None:
            output[_OLD_TOKEN_IDS], output[_OLD_LOG_PROBS] = old.token_ids, old.log_probs
        return output

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        score = super()._get_per_token_logps_and_entropies
        if self._loss_pass is not None:
            policy = self._loss_pass.wrap(model, logits_to_keep)
            return score(policy, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if not self._record_next_pass:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        self._record_next_pass = False
        parts = []

        def old_policy(**model_inputs):
            output = model(**model_inputs, support_size=self.args.support_size, tail_mass=self.args.tail_mass)
            kept = slice(-logits_to_keep, None)  # completion tokens, (b, C) of one chunk of rows
            parts.append(SparseDistribution(output.token_ids[:, kept], output.sparse_log_probs[:, kept]).trim())
            return output

        result = score(old_policy, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        self._recorded = SparseDistribution.concatenate(parts)
        return result

    # -- Loss: replace the ratio's policy by its projection ---------------------------------------------------------

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]  # (B, C)
        if _OLD_TOKEN_IDS not in inputs:  # idle: π = p, with KL and regression 0
            self._troll_metrics[mode].add_idle(mask)
            return super()._compute_loss(model, inputs)

        old = SparseDistribution(inputs[_OLD_TOKEN_IDS], inputs[_OLD_LOG_PROBS])
        self._loss_pass = _LossPass(old, self.args.kl_bound)
        beta, self.beta = self.beta, 0.0  # the reference KL below is of the policy, TRL's would be of the projection
        try:
            loss = super()._compute_loss(model, inputs)
            this = self._loss_pass
        finally:
            self.beta, self._loss_pass = beta, None
        self._troll_metrics[mode].add(mask, this.projection, this.regression, old)
        loss = loss + self.args.regression_coef * self._aggregate(this.regression, mask, inputs, mode)
        if self.beta != 0.0:
            reference_kl = self._reference_kl(this.policy_log_probs, mask, inputs)
            totals = torch.stack([(reference_kl.detach() * mask).sum(), mask.sum()])
            totals = self.accelerator.reduce(totals, reduction="sum")
            self._metrics[mode]["kl"].append((totals[0] / totals[1].clamp(min=1.0)).item())
            loss = loss + self.beta * self._aggregate(reference_kl, mask, inputs, mode)
        return loss

    def _reference_kl(self, log_probs: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's estimate of KL(p ‖ reference) `(B, C)`, of the unprojected policy, from `log p(a)` `(B, C)`."""
        log_ratio = inputs["ref_per_token_logps"] - log_probs
        kl = log_ratio.exp() - log_ratio - 1
        if self.args.use_bias_correction_kl:
            weight = log_probs - inputs["old_per_token_logps"]
            if self.importance_sampling_level == "sequence":
                weight = ((weight * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            kl = kl * weight.exp()
        return kl

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """
        The loss that TRL's `_compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`: the same
        averages, one per loss type, scaled for gradient accumulation.
        """
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        values = values * mask
        if self.loss_type == "dapo":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes  # of a rollout batch
            if mode == "train":
                tokens = tokens * accumulation / self.args.steps_per_generation  # of an update
            return values.sum() / tokens
        if self.loss_type == "grpo":
            loss = (values.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        elif self.loss_type == "bnpo":
            loss = values.sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            loss = values.sum() / (values.size(0) * self.max_completion_length)
        elif self.loss_type == "luspo":
            loss = values.sum(-1).mean()
        else:
            raise ValueError(f"Unsupported `loss_type`: {self.loss_type!r}.")
        return loss / accumulation

    def _off_policy_mask_of_policy(
        self, get_mask: Callable, *, per_token_logps: torch.Tensor, **kwargs
    ) -> torch.Tensor:
        # The projection stays near the old policy by construction; the drift to be masked is the policy's own
        if self._loss_pass is not None:
            per_token_logps = self._loss_pass.policy_log_probs
        return get_mask(per_token_logps=per_token_logps, **kwargs)

    # -- Log --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]
        prefix = "eval_" if mode == "eval" else ""
        logs.update({prefix + name: value for name, value in self._troll_metrics[mode].pop().items()})
        super().log(logs, start_time)


class _LossPass:
    """One micro-batch's way through TRL's loss: evaluates the policy on the old policy's support, projects it, and
    keeps what the terms around TRL's surrogate need."""

    def __init__(self, old: SparseDistribution, kl_bound: float):
        self.old, self.kl_bound = old, kl_bound  # (B, C, K)

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are those of the projected policy."""

        def projected_policy(**model_inputs):
            output = model(**model_inputs, token_ids=self.old.token_ids)
            policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
            self.policy_log_probs = output.log_probs[:, -completion_length:]  # (B, C)
            self.projection = project(policy, self.old.log_probs, self.kl_bound)
            self.regression = kl_divergence(policy, self.projection.log_probs.detach())  # (B, C)
            # Masked positions have all their mass in the rest, and −∞ for a sampled token
            sampled = self.projection.log_probs[..., 0].masked_fill(self.old.token_ids[..., 0] < 0, 0.0)
            output.log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return output

        return projected_policy
