"""TrollMixin: what stands before a TRL trainer to make it one of TROLL's, whatever the estimator of its advantages."""

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl.trainer.utils import get_config_model_id

import troll_trl
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.resilience.checkpoint import CheckpointMixin
from troll_trl.resilience.input_checks import InputChecksMixin
from troll_trl.resilience.nonfinite import NonFiniteMixin
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.head_check import check_head
from troll_trl.trainers.kernel_check import settle_kernels
from troll_trl.trainers.loss_pass import LossPass, equal_to_rounding, what_trl_reads
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.old_policy import (
    COLUMN,
    LOG_PROBS,
    OLD_LOG_PROBS,
    TOKEN_IDS,
    CopiesAhead,
    join_rows,
    with_dense,
)
from troll_trl.trainers.sharding import keep_output_dtypes, reshard
from troll_trl.trainers.trl_compat import check_trl, silence_known_warnings
from troll_trl.trainers.vllm import check_vllm, explain_lost_server
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.regions import MaskTrustRegion, ProjectionTrustRegion, TrustRegion
from troll_trl.trust_region.sparse import SparseDistribution

if TYPE_CHECKING:  # what stands behind the mixin
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

_TROLL = textwrap.dedent("""\
    @article{becker2025troll,
        title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
        author       = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and
                        Neumann, Gerhard},
        year         = 2025,
        eprint       = {arXiv:2510.03817},
    }""")


_DPPO = textwrap.dedent("""\
    @article{qi2026rethinking,
        title        = {{Rethinking the Trust Region in LLM Reinforcement Learning}},
        author       = {Qi, Penghui and Zhou, Xiangxin and Liu, Zichen and Pang, Tianyu and Du, Chao and Lin, Min and
                        Lee, Wee Sun},
        year         = 2026,
        eprint       = {arXiv:2602.04879},
    }""")


def paper_of(trainer: type, mask: bool = False) -> dict[str, str]:
    """What a model card says of the method: the paper of its trust region, and its citation beside TRL's trainer's."""
    title, number, citation = (
        ("Rethinking the Trust Region in LLM Reinforcement Learning", "2602.04879", _DPPO)
        if mask
        else ("TROLL: Trust Regions improve Reinforcement Learning for Large Language Models", "2510.03817", _TROLL)
    )
    trl_citation = trainer._paper["citation"]  # type: ignore[attr-defined]
    return {"title": title, "id": number, "citation": f"{citation}\n\n{trl_citation}"}


class TrustRegionMixin(_Trainer):
    """
    Stands before a TRL trainer that samples completions and clips a probability ratio, in the list of bases.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as the trainer's is. TRL's own `_compute_loss` computes it: it is
    given `log π(a)` in place of `log p(a)` and a clip range without ends. DPPO's mask takes the same way: it hands on
    `log p(a)` with less gradient (see `trust_region/regions.py`). Overridden are

    - `_generate_and_score_completions`: the pass that scores the rollout also keeps a sparse old policy of every token,
      on the host;
    - `_prepare_inputs`: brings that of a micro-batch to the device, and begins to copy the next one's;
    - `_get_per_token_logps_and_entropies`: scores with the sparse head, and returns projected log-probabilities to the
      loss;
    - `_compute_loss`: adds the regression term;
    - `log`: adds the `troll/…` metrics, reduced over ranks, so that every rank must call it, and leaves out
      `clip_ratio/…`, which would always be 0.

    A trainer defines `_config_class`, `_name` and `_aggregate`.
    """

    _config_class: type[TrollOptions]
    _name: str
    # Declared for the type checker
    beta: float  # TRL's
    counters: dict[str, dict[str, Any]]  # CheckpointMixin's
    _live: Any  # NonFiniteMixin's

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        check_trl(type(self))
        silence_known_warnings()
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self._config_class):
            args = self._config_class.from_trl(args)
        check_vllm(args)
        self.trust_region = self._make_trust_region(args)
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        for function in self.reward_funcs:  # in the background, while the model is prepared
            getattr(function, "start_workers", lambda: None)()

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        config = base_model.config.get_text_config()
        self._kernels_failed = False
        if self.trust_region.needs_support:  # else TRL's own head serves
            self._kernels_failed = settle_kernels(self.accelerator)
            self.support_size = min(args.support_size, config.vocab_size)
            if args.support_size > config.vocab_size:
                logger.warning(
                    f"`support_size` ({args.support_size}) exceeds the vocabulary of {config.vocab_size} tokens: all "
                    "are kept."
                )
            # RLOOConfig has no `cast_lm_head_to_fp32`
            add_sparse_lm_head(base_model, self.temperature, getattr(args, "cast_lm_head_to_fp32", False))
        # The trust region takes the place of the clip: TRL's surrogate gets a range without ends
        self.epsilon_low = self.epsilon_high = math.inf

        for mode in ("train", "eval"):
            self.counters[mode]["trust_region"] = TrollMetrics(self.accelerator, self.trust_region)
        self._record_next_pass = False  # the next pass without gradient scores the rollout with the current weights
        # What it has kept, and the log-probabilities (B, C) of the sampled tokens, while TRL scores the rollout
        self._recorded: RaggedDistribution | None = None
        self._recorded_log_probs: torch.Tensor | None = None
        self._old_policies = CopiesAhead(self.accelerator.device)
        self._cache_size_printed = self._head_checked = False
        self._loss_pass: LossPass | None = None  # set while TRL's loss runs
        self._print_batch_arithmetic()
        self._warn_of_noise(config)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    def _print_batch_arithmetic(self):
        args, completions = self.args, self.args.generation_batch_size
        kept = (
            f"up to {_counted(self.support_size, 'token')} kept per position (tail mass {args.tail_mass:g}), "
            if self.trust_region.needs_support
            else ""
        )
        self.accelerator.print(
            f"TROLL: {_counted(completions // args.num_generations, 'prompt')} x {args.num_generations} completions "
            f"per rollout batch, {_counted(args.updates_per_rollout_batch, 'update')} per rollout batch, "
            f"{kept}{self.trust_region.describe()}."
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

    def _warn_of_noise(self, config: Any):
        # The projection would take the difference of two draws for a step of the policy, and regress on it
        looks_like_drift = (
            "the pass that scores a rollout and the loss draw it differently, so that the policy differs from the old "
            "policy even at equal weights, and the trust region acts on that noise."
        )
        if self.args.neftune_noise_alpha is not None:
            logger.warning(f"`neftune_noise_alpha={self.args.neftune_noise_alpha}`: {looks_like_drift} Remove it.")
        rate = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if rate > 0:
            logger.warning(
                f"The model has dropout (up to {rate:g}): {looks_like_drift} Set `disable_dropout=True` (it covers "
                "`lora_dropout`, which is 0.05 unless set; in our study so little cost TROLL no more than a clip)."
            )
        names = ["attention_dropout", "router_jitter_noise"]  # no modules of their own, so never disabled
        modules = [name for name, m in self.model.named_modules() if isinstance(m, torch.nn.Dropout)]
        if all("lora_dropout" in name for name in modules):  # nor have these, as in OPT
            names += ["dropout", "activation_dropout", "hidden_dropout"]
        for name in names:
            if getattr(config, name, 0):
                logger.warning(
                    f"The model's configuration has `{name}` {getattr(config, name):g}: {looks_like_drift} Load the "
                    f"model with `{name}=0`, or name it in `model_init_kwargs`."
                )

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _make_trust_region(self, args: Any) -> TrustRegion:
        """What bounds the policy. A subclass may return a trust region of its own."""
        if getattr(args, "trust_region", "projection") == "mask":  # RLOO has the projection alone
            return MaskTrustRegion(args.divergence_type, args.divergence_bound, args.ratio_cap)
        return ProjectionTrustRegion(args.kl_bound, args.pessimistic)

    def _has_old_policy(self) -> bool:
        """Whether TRL scores the next rollout with the current weights. Where it does not, neither do we."""
        return not self.args.trust_region_idle

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """The loss that TRL's `_compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`."""
        raise NotImplementedError

    def _terms_of_policy(
        self, loss_pass: LossPass, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        """What is added to TRL's surrogate, a scalar: the regression of the trust region, if it has one."""
        if loss_pass.bounded.regression is None:
            return torch.zeros((), device=mask.device)
        return self.args.regression_coef * self._aggregate(loss_pass.bounded.regression, mask, inputs, mode)

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # The pass that scores the rollout comes first. The reference pass goes, with PEFT, through the same model, and
        # in an idle GRPO run it is the only one: it must not be taken for the old policy.
        self._record_next_pass = records = self.trust_region.needs_support and self._has_old_policy()
        self._recorded = self._recorded_log_probs = None
        reshard(self.model)
        try:
            with explain_lost_server(self.args):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self._record_next_pass = False
        old, self._recorded, self._recorded_log_probs = self._recorded, None, None
        if (old is not None) != records:
            raise RuntimeError(
                "TRL scored the old policy under another condition than troll_trl expects; see trainers/trl_compat.py."
            )
        if old is not None:
            if "tool_mask" in output:  # a tool's tokens are scored, but not trained on
                old = old.keep(output["tool_mask"].cpu().bool())
            self._print_cache_size(old)
            output[COLUMN] = old.rows()
        return output

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        training = self.model.training
        join_rows(self._buffered_inputs if training else [inputs], self.accelerator.device)
        if COLUMN not in inputs or not self.trust_region.needs_support:  # a resumed batch may have more than is needed
            return inputs
        old = self._old_policies.take(inputs[COLUMN])
        step, steps = self._step + 1, self.args.steps_per_generation
        if training and step % (steps * self.num_iterations) != 0:  # else a new rollout batch comes next
            self._old_policies.start(self._buffered_inputs[step % steps][COLUMN])
        return with_dense(inputs, old)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        score = super()._get_per_token_logps_and_entropies
        if self._loss_pass is not None:
            policy = self._loss_pass.wrap(model, logits_to_keep)
            return score(policy, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if not self._record_next_pass:
            log_probs, *others = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            if self._recorded_log_probs is not None:  # the reference, after the old policy
                log_probs = equal_to_rounding(log_probs, self._recorded_log_probs)
            return log_probs, *others

        self._record_next_pass = False
        parts = []

        def old_policy(**model_inputs):
            if not self._head_checked:
                check_head(model, model_inputs, logits_to_keep, self.support_size, self.temperature)
                self._head_checked = True
            output = model(
                **model_inputs,
                support_size=self.support_size,
                tail_mass=self.args.tail_mass,
                check_finite=False,
            )
            kept = slice(-logits_to_keep, None)  # completion tokens, (b, C) of one chunk of rows
            dense = SparseDistribution(output.token_ids[:, kept], output.sparse_log_probs[:, kept])
            parts.append(RaggedDistribution.pack(dense).to("cpu"))
            return what_trl_reads(output, output.log_probs)

        result = score(old_policy, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        self._recorded, self._recorded_log_probs = RaggedDistribution.concatenate(parts), result[0]
        return result

    def _print_cache_size(self, old: RaggedDistribution):
        """Once: the bytes that the old policy takes per completion token that is trained on."""
        tokens = int((old.counts > 0).sum())
        if self._cache_size_printed or tokens == 0:
            return
        self._cache_size_printed = True
        self.accelerator.print(
            f"TROLL: the old policy takes {old.nbytes / tokens:.0f} bytes per completion token, on the host: "
            f"{len(old.token_ids) / tokens:.1f} tokens kept on average in the first rollout batch, {old.width} at "
            "most, each an int32 id and a float32 log-probability."
        )

    # -- Loss: replace the ratio's policy by its projection ---------------------------------------------------------

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        live = self._live  # (B, C)
        if (old := self._old_policy_of(inputs)) is None:  # idle: π = p, with divergences and regression 0
            if self._has_old_policy():
                column = COLUMN if self.trust_region.needs_support else OLD_LOG_PROBS
                logger.warning_once(
                    f"A batch has no column `{column}`, its old policy: no trust region and no clip limits its ratios. "
                    "Whatever makes batches of its own must keep this column."
                )
            self._trust_region_metrics(mode).add_idle(live)
            return super()._compute_loss(model, inputs)

        advantages = inputs["advantages"].reshape(len(live), -1)  # (B, 1) or (B, C)
        self._loss_pass = this = LossPass(self.trust_region, *old, live, advantages)
        # A reference KL in TRL's loss would be that of the bounded policy; `_terms_of_policy` adds that of the policy
        beta, self.beta = self.beta, 0.0
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta, self._loss_pass = beta, None
        self._trust_region_metrics(mode).add(live, this.bounded.counted)
        return loss + self._terms_of_policy(this, live, inputs, mode)

    def _old_policy_of(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Old log-probabilities `(B, C, S)` of a micro-batch and their support; `None` where policies are equal."""
        if self.trust_region.needs_support:
            return (inputs[LOG_PROBS], inputs[TOKEN_IDS]) if TOKEN_IDS in inputs else None
        old = inputs.get(OLD_LOG_PROBS)  # (B, C)
        return None if old is None else (old.unsqueeze(-1), None)

    def _trust_region_metrics(self, mode: str) -> TrollMetrics:
        return self.counters[mode]["trust_region"]

    # -- Model card -------------------------------------------------------------------------------------------------

    def create_model_card(self, *args, **kwargs):
        """TRL's model card, with what this package adds: the trust region, its version, and both methods' citations."""
        super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        options = ", ".join(f"`{name}` {value}" for name, value in self.args.trust_region_options().items())
        card = Path(self.args.output_dir, "README.md")
        heading, versions = f"### Trust region\n\n{options}.\n", f"- troll_trl: {troll_trl.__version__}\n"
        text = card.read_text(encoding="utf-8")
        before, found, after = text.partition("### Framework versions\n\n")
        text = f"{before}{heading}\n{found}{versions}{after}" if found else f"{text}\n{heading}\n{versions}"
        card.write_text(text, encoding="utf-8")

    # -- Log --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]
        prefix = "eval_" if mode == "eval" else ""
        for counter in self.counters[mode].values():
            logs.update({prefix + name: value for name, value in counter.pop().items()})
        if self._kernels_failed:
            logs[prefix + "troll/torch_kernels"] = 1.0
        super().log(logs, start_time)


class TrollMixin(NonFiniteMixin, CheckpointMixin, InputChecksMixin, TrustRegionMixin):
    """
    The bases of every TROLL trainer, in their order: a trainer of TRL's stands behind them.

    [`NonFiniteMixin`] comes first, since it hides masked positions from all that follow; [`CheckpointMixin`] holds the
    counters that the others add to.
    """


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
