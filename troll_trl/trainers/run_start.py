"""What a trainer checks and logs at its start: its arguments, the sizes of its batches, and random draws that look like
drift."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.resilience import PROMPTS
from troll_trl.resilience.best_model import warn_of_several_sets
from troll_trl.resilience.nameless import check_names
from troll_trl.resilience.prompt_length import check_prompts
from troll_trl.resilience.rollout_check import checked_rollouts
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.reward_models import whole_reward_models
from troll_trl.trainers.rollout_sampling import warn_of_unused_options
from troll_trl.trust_region.regions import TrustRegion

logger = get_logger(__name__)


def checked_arguments(
    init: Callable, model: Any, reward_funcs: Any, args: Any, *others: Any, **kwargs: Any
) -> inspect.BoundArguments:
    """The arguments of TRL's constructor `init`, as TRL should get them. A `ValueError` names one that cannot serve."""
    given = inspect.signature(init).bind(model, whole_reward_models(reward_funcs, args), args, *others, **kwargs)
    if rollout_func := given.arguments.get("rollout_func"):
        corrects = bool(args.use_vllm and args.vllm_importance_sampling_correction)
        given.arguments["rollout_func"] = checked_rollouts(rollout_func, corrects)
    check_names(given.arguments)
    return given


def describe_run(trainer: Any, base_model: Any, given: inspect.BoundArguments) -> None:
    """Print and warn what a reader of the log should know of a `trainer`, and check the prompts. It was made with the
    `given` arguments, and `base_model` is its model without adapters."""
    args = trainer.args
    print_batches(trainer.accelerator, args, trainer.trust_region, trainer.support_size)
    warn_of_several_sets(args, trainer.eval_dataset)
    warn_of_unused_options(trainer.model, getattr(trainer, "generation_config", None))
    warn_stochastic_forward(trainer.model, args, base_model.config.get_text_config())
    makers = {"rollout_func", "environment_factory"}  # they make what the model reads in place of the prompts
    if PROMPTS not in trainer.switched_off and not any(given.arguments.get(name) for name in makers):
        check_prompts(trainer)


def print_batches(accelerator: Accelerator, args: TrollOptions, trust_region: TrustRegion, support_size: int) -> None:
    """Print how many updates share a rollout batch, and warn if the trust region is idle."""
    prompts, updates = args.generation_batch_size // args.num_generations, args.updates_per_rollout_batch
    kept = ""
    if trust_region.needs_support:
        kept = f"up to {support_size} tokens kept per position (tail mass {args.tail_mass:g}), "
    accelerator.print(
        f"TROLL: {prompts} prompts x {args.num_generations} completions per rollout batch, {updates:g} "
        f"update{'' if updates == 1 else 's'} per rollout batch, {kept}{trust_region.describe()}."
    )
    if args.old_policy == "engine":
        accelerator.print(
            "The old policy is vLLM's distribution: no pass scores the rollout, and "
            "`vllm_importance_sampling_correction` is off. The trust region acts in every update. In the first one of "
            "a rollout batch it bounds what vLLM and the trainer disagree on."
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


def warn_stochastic_forward(model: torch.nn.Module, args: TrollOptions, config: Any) -> None:
    """Warn of random draws that differ between the scoring of a rollout and the loss. `config` is the text model's."""
    dropouts = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    names = ["attention_dropout", "router_jitter_noise"]  # these have no modules, so TRL never disables them
    if all("lora_dropout" in name for name in dropouts):  # nor have these, as in OPT
        names += ["dropout", "activation_dropout", "hidden_dropout"]
    draws = {"neftune_noise_alpha": args.neftune_noise_alpha, "dropout of modules": max(dropouts.values(), default=0)}
    draws |= {name: getattr(config, name, 0) for name in names}
    # The projection would take the difference of two draws for a step of the policy, and regress on it
    if noisy := [f"{name} ({value:g})" for name, value in draws.items() if value]:
        logger.warning(
            f"The model draws random numbers: {', '.join(noisy)}. The pass that scores a rollout and the loss draw "
            "them differently. The policy then differs from the old policy even at equal weights, and the trust region "
            "acts on that noise. Set `disable_dropout=True` for modules, and the others to 0. Options of the model's "
            "configuration belong in `model_init_kwargs`."
        )
