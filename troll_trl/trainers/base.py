"""TrollMixin: what TROLL changes in a TRL trainer, whatever the estimator of its advantages."""

import math
import textwrap
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl.trainer.utils import get_config_model_id

from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.trl_compat import check_trl
from troll_trl.trainers.vllm import a_lost_server_is_said, check_vllm
from troll_trl.trust_region.projection import kl_divergence, project
from troll_trl.trust_region.sparse import SparseDistribution, check_support_options, keep_nothing

if TYPE_CHECKING:  # what stands behind the mixin
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

# Columns of the rollout batch that hold the old policy; TRL shuffles and splits them with its own
_OLD_TOKEN_IDS, _OLD_LOG_PROBS = "troll_old_token_ids", "troll_old_log_probs"

PAPER = {
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


class TrollMixin(_Trainer):
    """
    Stands before a TRL trainer that samples completions and clips a probability ratio, in the list of bases.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as the trainer's is. TRL's own `_compute_loss` computes it: it is
    given `log π(a)` in place of `log p(a)` and a clip range without ends. Overridden are

    - `_generate_and_score_completions`: the pass that scores the rollout also keeps a sparse old policy of every token;
    - `_get_per_token_logps_and_entropies`: scores with the sparse head, and returns projected log-probabilities to the
      loss;
    - `_compute_loss`: adds the regression term;
    - `log`: adds the `troll/…` metrics, reduced over ranks, so that every rank must call it, and leaves out
      `clip_ratio/…`, which would always be 0.

    A trainer defines `_config_class`, `_name` and `_aggregate`.
    """

    _config_class: type[TrollOptions]
    _name: str
    beta: float  # TRL's

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        check_trl(type(self))
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self._config_class):
            args = self._config_class.from_trl(args)
        check_vllm(args)
        super().__init__(model, reward_funcs, args, *others, **kwargs)

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        vocabulary = base_model.config.get_text_config().vocab_size
        check_support_options(args.support_size, args.tail_mass, vocabulary)
        # RLOOConfig has no `cast_lm_head_to_fp32`
        add_sparse_lm_head(base_model, self.temperature, getattr(args, "cast_lm_head_to_fp32", False))
        # The projection takes the place of the clip: TRL's surrogate gets a range without ends
        self.epsilon_low = self.epsilon_high = math.inf

        self._troll_metrics = {mode: TrollMetrics(self.accelerator) for mode in ("train", "eval")}
        self._record_next_pass = False  # the next pass without gradient scores the rollout with the current weights
        self._recorded: SparseDistribution | None = None
        self._cache_size_said = False
        self._loss_pass: LossPass | None = None  # set while TRL's loss runs
        self._say_batch_arithmetic()
        self._warn_of_noise()

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

    def _warn_of_noise(self):
        # The projection would take the difference of two draws for a step of the policy, and regress on it
        if self.args.neftune_noise_alpha is not None:
            logger.warning(
                f"`neftune_noise_alpha={self.args.neftune_noise_alpha}` adds other noise in the pass that scores a "
                "rollout than in the loss, so that the policy differs from the old policy even at equal weights, and "
                "the projection acts on that noise. Remove it."
            )
        rate = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if rate > 0:
            logger.warning(
                f"The model has dropout (up to {rate:g}): the pass that scores a rollout and the loss draw different "
                "masks, so that the policy differs from the old policy even at equal weights, and the projection acts "
                "on that noise. Set `disable_dropout=True` (it covers `lora_dropout`, which is 0.05 unless set)."
            )

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _records_old_policy(self) -> bool:
        """Whether the next rollout's scoring pass keeps the old policy. Where TRL makes no such pass neither do we."""
        return not self.args.trust_region_idle

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """The loss that TRL's `_compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`."""
        raise NotImplementedError

    def _terms_of_policy(
        self, loss_pass: "LossPass", mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        """What is added to TRL's surrogate, a scalar: the regression KL(p ‖ stopgrad π)."""
        return self.args.regression_coef * self._aggregate(loss_pass.regression, mask, inputs, mode)

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # The pass that scores the rollout comes first. The reference pass goes, with PEFT, through the same model, and
        # in an idle GRPO run it is the only one: it must not be taken for the old policy.
        self._record_next_pass = records = self._records_old_policy()
        self._recorded = None
        try:
            with a_lost_server_is_said(self.args):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self._record_next_pass = False
        old, self._recorded = self._recorded, None
        if (old is not None) != records:
            raise RuntimeError(
                "TRL scored the old policy under another condition than troll_trl expects; see trainers/trl_compat.py."
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
            output = model(
                **model_inputs,
                support_size=self.args.support_size,
                tail_mass=self.args.tail_mass,
                check_finite=False,
            )
            kept = slice(-logits_to_keep, None)  # completion tokens, (b, C) of one chunk of rows
            parts.append(SparseDistribution(output.token_ids[:, kept], output.sparse_log_probs[:, kept]).trim())
            return output

        result = score(old_policy, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        self._recorded = SparseDistribution.concatenate(parts)
        self._say_cache_size(self._recorded)
        return result

    def _say_cache_size(self, old: SparseDistribution):
        """Once: the bytes that the old policy takes per completion token, padding included."""
        if self._cache_size_said or old.token_ids.numel() == 0:
            return
        self._cache_size_said = True
        tensors = (old.token_ids, old.log_probs)
        size = sum(x.numel() * x.element_size() for x in tensors) / old.token_ids[..., 0].numel()
        self.accelerator.print(
            f"TROLL: the old policy takes {size:.0f} bytes per completion token: up to {old.token_ids.shape[-1]} kept "
            "tokens in the first rollout batch, each an int32 id and a float32 log-probability, and the rest."
        )

    # -- Loss: replace the ratio's policy by its projection ---------------------------------------------------------

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]  # (B, C)
        if _OLD_TOKEN_IDS not in inputs:  # idle: π = p, with KL and regression 0
            if self._records_old_policy():
                logger.warning_once(
                    f"A batch came without the columns {_OLD_TOKEN_IDS} and {_OLD_LOG_PROBS} of its old policy: TROLL "
                    "projects nothing in it, and nothing clips its ratios. Whatever makes batches of its own must keep "
                    "these columns."
                )
            self._troll_metrics[mode].add_idle(mask)
            return super()._compute_loss(model, inputs)

        old = SparseDistribution(inputs[_OLD_TOKEN_IDS], inputs[_OLD_LOG_PROBS])
        self._loss_pass = this = LossPass(old, self.args.kl_bound, mask)
        # A reference KL in TRL's loss would be that of the projection; `_terms_of_policy` adds that of the policy
        beta, self.beta = self.beta, 0.0
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta, self._loss_pass = beta, None
        self._troll_metrics[mode].add(mask, this.projection, this.regression, this.old)
        return loss + self._terms_of_policy(this, mask, inputs, mode)

    # -- Log --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]
        prefix = "eval_" if mode == "eval" else ""
        logs.update({prefix + name: value for name, value in self._troll_metrics[mode].pop().items()})
        super().log(logs, start_time)


class LossPass:
    """One micro-batch's way through TRL's loss: evaluates the policy on the old policy's support, projects it, and
    keeps what the terms around TRL's surrogate need."""

    def __init__(self, old: SparseDistribution, kl_bound: float, mask: torch.Tensor):
        # What takes no part in the loss enters no exp. Nor does NaN, which `project` would refuse, on one rank while
        # the others wait: `nonfinite` has counted it, and the update will be skipped.
        self.dead = ~mask.bool() | old.log_probs.isnan().any(-1)  # (B, C)
        self.old = SparseDistribution(old.token_ids, keep_nothing(old.log_probs, self.dead))  # (B, C, K)
        self.kl_bound = kl_bound

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are those of the projected policy."""

        def projected_policy(**model_inputs):
            output = model(**model_inputs, token_ids=self.old.token_ids, check_finite=False)
            policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
            dead = self.dead | policy.detach().isnan().any(-1)
            policy, old_log_probs = keep_nothing(policy, dead), keep_nothing(self.old.log_probs, dead)
            self.policy_log_probs = output.log_probs[:, -completion_length:].masked_fill(dead, 0.0)  # (B, C)
            self.projection = project(policy, old_log_probs, self.kl_bound)
            # Inside the bound π is p, and the term is 0. Computed, its gradient p·(1 − Σp) is only the rounding of Σp,
            # which Adam scales up to full steps where there is no other gradient.
            regression = kl_divergence(policy, self.projection.log_probs.detach())
            self.regression = regression.masked_fill(self.projection.eta == 0, 0.0)  # (B, C)
            # Dead positions have all their mass in the rest, and −∞ for a sampled token
            sampled = self.projection.log_probs[..., 0].masked_fill(dead, 0.0)
            output.log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return output

        return projected_policy
