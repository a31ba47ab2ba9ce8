"""What a trainer logs when it is made: its settings, how often it uses its completions, and likely mistakes."""

import math
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import has_length

logger = get_logger(__name__)


def describe_run(trainer: Any, base_model: Any) -> None:
    """Log the settings of a `trainer`'s run, and warn about likely mistakes. `base_model` has no adapters."""
    args, say = trainer.args, trainer.accelerator.print
    updates = args.updates_per_rollout_batch
    kept = ""
    if (support := trainer.support) is not None:
        kept = f"up to {support.size} tokens kept per position (tail mass {support.tail_mass:g}), "
    count = f"{updates:g} update{'' if updates == 1 else 's'}"
    say(f"TROLL: {count} per rollout batch, {kept}{trainer.trust_region.describe()}.")
    if args.old_policy == "engine":
        say(
            "The old policy is vLLM's distribution: no pass scores the rollout. In the first update of a rollout "
            "batch, the trust region bounds the difference between vLLM and the trainer."
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
    masks = {
        "top_entropy_quantile": getattr(args, "top_entropy_quantile", 1.0) < 1.0,
        "off_policy_mask_threshold": getattr(args, "off_policy_mask_threshold", None) is not None,
    }
    if any(masks.values()) and args.trust_region != "mask":
        names = " and ".join(f"`{name}`" for name, is_set in masks.items() if is_set)
        logger.warning(f"With {names}, the regression does not act on the tokens that are masked.")
    _warn_of_random_draws(trainer.model, args, base_model.config.get_text_config())


def describe_reuse(trainer: Any) -> None:
    """Log how many completions a generation and an update have, how often each is used, and how many generations the
    run makes; with `num_iterations`, also how epochs count. The `trainer` may be TRL's."""
    args, say = trainer.args, trainer.accelerator.print
    uses, generated = args.num_iterations, args.generation_batch_size
    prompts = generated // args.num_generations
    per_update = generated * args.gradient_accumulation_steps // args.steps_per_generation
    generations = None
    if args.max_steps > 0:
        generations = math.ceil(args.max_steps * per_update / (generated * uses))
    elif has_length(trainer.train_dataset):
        # TRL drops the prompts that do not fill a generation
        generations = math.ceil(args.num_train_epochs * (len(trainer.train_dataset) // prompts))
    made = "" if generations is None else f"; the run makes {generations} generation{'' if generations == 1 else 's'}"
    say(
        f"A generation for {prompts} prompts makes {generated} completions, an update uses {per_update}, and each "
        f"completion is used {'once' if uses == 1 else f'{uses} times'}{made}."
    )
    if uses > 1 and args.max_steps <= 0:
        say(
            f"With `num_iterations` {uses}, `num_train_epochs` ({args.num_train_epochs:g}) makes {uses} times as many "
            "updates as with 1, and stretches the learning rate's schedule. `max_steps` sets the number of updates."
        )


def _warn_of_random_draws(model: torch.nn.Module, args: Any, config: Any) -> None:
    """Warn about random draws that differ between the scoring of a rollout and the loss. `config` is the text
    model's."""
    dropouts = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    names = ["attention_dropout", "router_jitter_noise"]  # these have no modules, so TRL never disables them
    if all("lora_dropout" in name for name in dropouts):  # nor have these, as in OPT
        names += ["dropout", "activation_dropout", "hidden_dropout"]
    draws = {"neftune_noise_alpha": args.neftune_noise_alpha, "dropout of modules": max(dropouts.values(), default=0)}
    draws |= {name: getattr(config, name, 0) for name in names}
    # The projection would mistake the difference between two draws for a step of the policy, and regress on it
    if noisy := [f"{name} ({value:g})" for name, value in draws.items() if value]:
        logger.warning(
            f"The model draws random numbers: {', '.join(noisy)}. The loss does not "
            "draw the same ones as the pass that scores a rollout. The policy then differs from the old policy even at "
            "equal weights, and the trust region acts on that noise. Set `disable_dropout=True` for modules, and the "
            "others to 0. Options of the model's configuration belong in `model_init_kwargs`."
        )
