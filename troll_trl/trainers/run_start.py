"""What a trainer logs at its start: the arithmetic of its batches, an idle trust region, noise like drift."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.trainers.config import TrollOptions
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.regions import TrustRegion

logger = get_logger(__name__)


def print_batches(accelerator: Accelerator, args: TrollOptions, trust_region: TrustRegion, support_size: int) -> None:
    """Print how many updates share a rollout batch, and warn if the trust region is idle."""
    completions = args.generation_batch_size
    kept = (
        f"up to {_counted(support_size, 'token')} kept per position (tail mass {args.tail_mass:g}), "
        if trust_region.needs_support
        else ""
    )
    accelerator.print(
        f"TROLL: {_counted(completions // args.num_generations, 'prompt')} x {args.num_generations} completions "
        f"per rollout batch, {_counted(args.updates_per_rollout_batch, 'update')} per rollout batch, "
        f"{kept}{trust_region.describe()}."
    )
    if args.trust_region_idle:
        logger.warning(
            "The trust region is idle: every update uses completions of the current weights, because "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) is a multiple of "
            f"steps_per_generation x num_iterations ({args.steps_per_generation} x {args.num_iterations}). Policy "
            "and old policy are then equal, and a trust region, like a clip, changes nothing. For 8 updates per "
            f"rollout batch, as in the paper, set `steps_per_generation={8 * args.gradient_accumulation_steps}`, or "
            "raise `num_iterations`."
        )


def print_cache_size(accelerator: Accelerator, old: RaggedDistribution) -> bool:
    """Print the bytes that the old policy of a rollout takes per trained completion token. Returns `False` if it has no
    such token."""
    tokens = int((old.counts > 0).sum())
    if tokens > 0:
        accelerator.print(
            f"TROLL: the old policy takes {old.nbytes / tokens:.0f} bytes per completion token, on the host: "
            f"{len(old.token_ids) / tokens:.1f} tokens kept on average in the first rollout batch, {old.width} at "
            "most, each an int32 id and a float32 log-probability."
        )
    return tokens > 0


def warn_of_noise(model: torch.nn.Module, args: TrollOptions, config: Any) -> None:
    """Warn of random draws that differ between the scoring of a rollout and the loss. `config` is the text model's."""
    # The projection would take the difference of two draws for a step of the policy, and regress on it
    looks_like_drift = (
        "the pass that scores a rollout and the loss draw it differently. The policy then differs from the old policy "
        "even at equal weights, and the trust region acts on that noise."
    )
    if args.neftune_noise_alpha is not None:
        logger.warning(f"`neftune_noise_alpha={args.neftune_noise_alpha}`: {looks_like_drift} Remove it.")
    rate = max((m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
    if rate > 0:
        logger.warning(
            f"The model has dropout (up to {rate:g}): {looks_like_drift} Set `disable_dropout=True` (it covers "
            "`lora_dropout`, which is 0.05 unless set; in our study so little cost TROLL no more than a clip)."
        )
    names = ["attention_dropout", "router_jitter_noise"]  # no modules of their own, so never disabled
    modules = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)]
    if all("lora_dropout" in name for name in modules):  # nor have these, as in OPT
        names += ["dropout", "activation_dropout", "hidden_dropout"]
    for name in names:
        if getattr(config, name, 0):
            logger.warning(
                f"The model's configuration has `{name}` {getattr(config, name):g}: {looks_like_drift} Load the "
                f"model with `{name}=0`, or name it in `model_init_kwargs`."
            )


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
