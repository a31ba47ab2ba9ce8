"""What a run checks and logs at its start: the support, the LM head and its gradient, idle trust regions, random
draws."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import has_length

from troll_trl.trust_region.projection import project, project_rows, project_rows_backward
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

logger = get_logger(__name__)

_TOKENS = 16  # tokens of a completion that are compared; with a vocabulary of 150,000 two rows of logits take 20 MB
# Largest mean difference of log-probabilities, relative to the largest logit. If only the logits are rounded to
# bfloat16, each by up to 2⁻⁹, it is about 0.001. A model that caps or scales its logits is off by far more.
_TOLERANCE = 0.01
# Largest difference of a gradient, relative to its norm: rounding to bfloat16 causes about 0.005
_GRADIENT_TOLERANCE = 0.03
_LOWEST = -1e30  # replaces a logit of −∞ until its log-probability is set to −∞
_KL_BOUND = 0.05  # of the projection whose gradient is compared, on made-up old policies
_REPORT = "Train another model or method, and please report this with the versions of torch, Triton and the driver."


def fitting_support_size(args: Any, model: Any) -> int:
    """Return the number of tokens to keep. Raise a `ValueError` if `support_size` is not the default and exceeds the
    `model`'s vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    if args.support_size > vocabulary and args.support_size != args._default_support_size:
        raise ValueError(
            f"`support_size` must be at most the model's vocabulary of {vocabulary} tokens, got {args.support_size}."
        )
    return min(args.support_size, vocabulary)


def describe_run(trainer: Any, base_model: Any) -> None:
    """Log the settings of a `trainer`'s run, and warn about likely mistakes. `base_model` is its model without
    adapters."""
    args = trainer.args
    trust_region = trainer.trust_region
    say = trainer.accelerator.print
    prompts = args.generation_batch_size // args.num_generations
    updates = args.updates_per_rollout_batch
    kept = ""
    if trust_region.needs_support:
        kept = f"up to {trainer.support_size} tokens kept per position (tail mass {args.tail_mass:g}), "
    say(
        f"TROLL: {prompts} prompts x {args.num_generations} completions per rollout batch, {updates:g} "
        f"update{'' if updates == 1 else 's'} per rollout batch, {kept}{trust_region.describe()}."
    )
    for line in describe_reuse(args, trainer.train_dataset):
        say(line)
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
    if any(masks.values()) and not args.uses_mask:
        names = " and ".join(f"`{name}`" for name, is_set in masks.items() if is_set)
        logger.warning(f"With {names}, the regression does not act on the tokens that are masked.")
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    batch = args.per_device_eval_batch_size * trainer.accelerator.num_processes
    sizes = [len(x) * trainer.num_generations_eval for x in sets.values() if x is not None and has_length(x)]
    if uneven := [size for size in sizes if size % batch]:
        logger.warning(
            f"`eval_reward` is a mean of batch means: {uneven[0]} completions do not fill batches of {batch}, so the "
            "completions of the last batch weigh more."
        )
    _warn_of_random_draws(trainer.model, args, base_model.config.get_text_config())


def describe_reuse(args: Any, train_dataset: Any) -> list[str]:
    """Return lines that say how many completions a generation and an update have, how often each is used, and how many
    generations the run makes; with `num_iterations`, also how epochs count. `args` is a config."""
    uses, generated = args.num_iterations, args.generation_batch_size
    per_update = generated * args.gradient_accumulation_steps // args.steps_per_generation
    line = (
        f"A generation makes {generated} completions, an update uses {per_update}, and each completion is used "
        f"{'once' if uses == 1 else f'{uses} times'}"
    )
    generations = None
    if args.max_steps > 0:
        generations = math.ceil(args.max_steps / args.updates_per_rollout_batch)
    elif train_dataset is not None and has_length(train_dataset):  # TRL drops the prompts that do not fill a generation
        generations = math.ceil(args.num_train_epochs * (len(train_dataset) // (generated // args.num_generations)))
    made = "" if generations is None else f"; the run makes {generations} generation{'' if generations == 1 else 's'}"
    lines = [f"{line}{made}."]
    if uses > 1 and args.max_steps <= 0:
        lines.append(
            f"With `num_iterations` {uses}, `num_train_epochs` ({args.num_train_epochs:g}) makes {uses} times as many "
            f"updates as with 1, and the learning rate's schedule is {uses} times as long. `max_steps` sets the number "
            "of updates."
        )
    return lines


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


def check_head(
    model: Any, model_inputs: dict[str, Any], completion_length: int, support_size: int, temperature: float
) -> bool:
    """
    Compare the sparse head and the projection with the model's own logits in plain PyTorch, on a few tokens of the most
    and the least padded row.

    The head multiplies the last hidden states by the matrix of the model's LM head, and transforms the logits as the
    configs of known families specify. If a family transforms its logits in another way, or a kernel is wrong on a new
    device, the run would train on wrong numbers without any other sign. Every rank must call this. Return whether there
    was anything to compare.

    Args:
        model (`torch.nn.Module`):
            The policy, wrapped as it is trained.
        model_inputs (`dict[str, Any]`):
            What TRL scores with: `input_ids`, `attention_mask` and `labels` `(B, T)`, of which the last
            `completion_length` columns are the completions. Inputs of another shape, such as images, are left out.
        completion_length, support_size (`int`):
            C and K.
        temperature (`float`):
            The temperature by which the head divides the logits.

    Raises:
        ValueError: log-probabilities, or their gradient with respect to the last hidden states, differ by more than
            rounding. The gradient is not compared if the weights are sharded.
    """
    shape = model_inputs["input_ids"].shape
    # Include only the last token of the prompt: the model's own logits for a whole prompt could take gigabytes
    start = shape[1] - completion_length - 1
    lengths = model_inputs["attention_mask"].sum(1)
    rows = sorted({int(lengths.argmax()), int(lengths.argmin())})
    inputs = {
        name: value[rows, start : start + _TOKENS + 1]
        for name, value in model_inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == shape
    }
    device = inputs["input_ids"].device
    # All passes begin with the same state of the random generators, which is restored: with dropout, all draw the same
    same_draws = partial(torch.random.fork_rng, [device] if device.type == "cuda" else [])
    selection = {"fused_lm_head": True, "support_size": support_size, "tail_mass": 0.0, "check_finite": False}
    labels = inputs.pop("labels")
    with torch.no_grad(), same_draws():
        sparse = model(**inputs, labels=labels, **selection)
    with torch.no_grad(), same_draws():
        logits = model(**inputs, use_cache=False).logits
    n = labels.shape[1] - 1  # prompt tuning puts more positions in front
    token_ids = sparse.token_ids[:, -n:].long()  # (b, n, K)
    kept = token_ids != UNUSED
    own = (logits[:, -n - 1 : -1].float() / temperature).log_softmax(-1).gather(-1, token_ids.clamp(min=0))
    kept &= own != -math.inf  # a logit of −∞ is a probability of 0
    difference = (sparse.sparse_log_probs[:, -n:, :-1] - own).abs()[kept].mean().item()
    if not math.isfinite(difference):  # no token to compare, or logits that are not finite, which the guard finds
        return False
    if difference > _TOLERANCE * max(1.0, logits.masked_fill(logits == -math.inf, 0.0).abs().max().item()):
        raise ValueError(
            "The sparse LM head is wrong for this model: its log-probabilities differ from the model's own by "
            f"{difference:.2g} nats on average over {kept.any(-1).sum().item()} tokens. {_REPORT}"
        )
    unwrapped = extract_model_from_parallel(model)
    sharded = any(isinstance(x, DTensor) or hasattr(x, "ds_id") for x in unwrapped.parameters())
    if not sharded and hasattr(unwrapped, "base_model"):
        gradients = _gradients(unwrapped, inputs, labels, token_ids, temperature, same_draws)
        if gradients is None:
            return True
        ours, theirs = gradients
        difference = ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()
        if difference > _GRADIENT_TOLERANCE:
            raise ValueError(
                "The gradient of head and projection differs from the gradient of the model's own logits by "
                f"{difference:.2g} of its norm. {_REPORT}"
            )
    return True


@torch.enable_grad()
def _gradients(
    model: Any,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    same_draws: Callable[[], AbstractContextManager],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two gradients `(b, n + 1, H)` of projected log-probabilities, with made-up old policies, with respect to
    the last hidden states: through head and kernels, and through the model's own logits in plain PyTorch. Return `None`
    if the model's own forward does not call its `base_model`, as in OPT."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    leaves: list[torch.Tensor] = []

    def make_leaf(_module, _args, output):
        output.last_hidden_state = output.last_hidden_state.detach().requires_grad_()
        leaves.append(output.last_hidden_state)
        return output

    n = token_ids.shape[1]
    live = labels[:, 1:] != -100  # (b, n)
    hook = base.base_model.register_forward_hook(make_leaf)
    try:
        with same_draws():
            ours = base(**inputs, labels=labels, fused_lm_head=True, token_ids=token_ids.int(), check_finite=False)
        policy = ours.sparse_log_probs[live]  # (N, K + 1)
        generator = torch.Generator(policy.device).manual_seed(0)
        noise = torch.randn(policy.shape, generator=generator, device=policy.device)
        old = (policy.detach() + noise).log_softmax(-1)
        upstream = torch.rand(policy.shape, generator=generator, device=policy.device)
        upstream[:, 0] += 10  # as in a loss, whose gradient mostly comes from the sampled token
        projected = project(policy, old, _KL_BOUND).log_probs
        (gradient,) = torch.autograd.grad(_finite(projected, upstream), leaves[0])

        with same_draws():
            logits = base(**inputs, use_cache=False).logits[:, -n - 1 : -1].float() / temperature
        if len(leaves) < 2:
            return None
        logits = logits.masked_fill(logits == -math.inf, _LOWEST)
        plain = SparseDistribution.log_probs_on_support(logits[live], token_ids[live])
        plain = plain.masked_fill(plain < _LOWEST / 2, -math.inf)
        log_pi, t, *_ = project_rows(plain.detach(), old, _KL_BOUND)
        upstream = upstream.masked_fill(log_pi == -math.inf, 0.0)
        through = project_rows_backward(upstream, plain.detach(), old, log_pi, t)
        (expected,) = torch.autograd.grad(plain, leaves[1], through.masked_fill(plain.detach() == -math.inf, 0.0))
    finally:
        hook.remove()
    return gradient.float(), expected.float()


def _finite(log_probs: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Return the sum of log-probabilities `(N, S)`, without −∞, weighted by `upstream` `(N, S)`."""
    return (upstream * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum()
