"""The loss of GRPO and RLOO with a trust region, in float64, from full logits, token by token. Nothing of `troll_trl`
and of TRL's loss is used: the trainer gives its options and its weights."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.references import reference_divergence, reference_project


class Bounded(NamedTuple):
    """What a trust region makes of a token."""

    log_pi: torch.Tensor  # replaces log p(a) in the surrogate
    regression: torch.Tensor | float = 0.0
    weight: float = 1.0  # of the advantage


# Of log-probabilities `(S,)` of policy and old policy, the sampled token's first, and of the advantage
Region = Callable[[torch.Tensor, torch.Tensor, float], Bounded]


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -math.inf, 0.0)).sum()


def two_outcomes(log_p: torch.Tensor) -> torch.Tensor:
    log_p = log_p.clamp(max=-(2.0**-23))
    return torch.stack([log_p, (-torch.expm1(log_p)).log()])


def projected(p: torch.Tensor, q: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the projection `(S,)`, differentiable in `p`, or `p` itself inside of the bound."""
    t = reference_project(p.detach().numpy(), q.numpy(), bound).t
    if t == 1:
        return p
    family = lambda t, p: ((1 - t) * q + t * p).log_softmax(-1)
    solution = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kl(family(solution, p.detach()), q), solution)
    # A step of Newton's method at the solution changes no value, and its derivative is that of the implicit function
    return family(solution.detach() - (kl(family(solution.detach(), p), q) - bound) / slope, p)


def projection(bound: float) -> Region:
    def region(p, q, _advantage):
        pi = projected(p, q, bound)
        return Bounded(pi[0], kl(p, pi.detach()) if pi is not p else 0.0)

    return region


def penalty(bound: float) -> Region:
    def region(p, q, _advantage):
        log_p = p[0]
        if len(p) == 1:
            p, q = two_outcomes(p[0]), two_outcomes(q[0])
        outside = kl(p, q) > bound
        pi = reference_project(p.detach().numpy(), q.numpy(), bound).log_probs if outside and bound else q
        return Bounded(log_p, kl(p, torch.as_tensor(pi)) if outside else 0.0)

    return region


def mask(divergence_type: str, bound: float, cap: float = math.inf) -> Region:
    def region(p, q, advantage):
        outcomes = [two_outcomes(x[0].detach()).numpy() for x in (p, q)]
        log_ratio = (p[0] - q[0]).item()
        left = reference_divergence(divergence_type, *outcomes) > bound and log_ratio * advantage > 0
        return Bounded(p[0], 0.0, 0.0 if left else math.exp(min(0.0, math.log(cap) - log_ratio)))

    return region


class Reference(NamedTuple):
    """Result of [`reference_loss`]."""

    loss: float
    gradients: dict[str, torch.Tensor]  # float64, by the parameter's name
    regression: torch.Tensor  # (B, C)
    log_ratio: torch.Tensor  # (B, C) or (B, 1), of GRPO; (B,) of RLOO
    kl: float  # mean of the reference KL over tokens


def reference_loss(trainer, inputs, region: Region, make_model: Callable[[], torch.nn.Module]) -> Reference:
    """Compute the loss of a micro-batch and its gradient. `make_model` makes a model like the trainer's."""
    args, model = trainer.args, make_model().double()
    model.load_state_dict(trainer.model.state_dict())
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1] / args.temperature
    full = logits.log_softmax(-1)  # (B, C, V)
    log_p = full.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)  # (B, C)
    live = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).double()  # (B, C)
    advantages = inputs["advantages"].double().reshape(len(live), -1).expand_as(live)

    log_pi, regression, weight = (torch.zeros_like(log_p), torch.zeros_like(log_p), torch.ones_like(log_p))
    old = torch.zeros_like(log_p)
    for b, t in live.nonzero().tolist():
        if "old_sparse_logps" in inputs:
            support, q = inputs["old_token_ids"][b, t], inputs["old_sparse_logps"][b, t].double()
            kept = support[support >= 0].long()
            others = [v for v in range(full.shape[-1]) if v not in kept.tolist()]
            p = torch.cat([full[b, t, kept], full[b, t, others].logsumexp(0, keepdim=True)])
            q = torch.cat([q[: len(kept)], q[-1:]])
        else:
            p, q = log_p[b, t].unsqueeze(0), inputs["old_per_token_logps"][b, t].double().unsqueeze(0)
        old[b, t] = q[0]
        log_pi[b, t], regression[b, t], weight[b, t] = region(p, q, advantages[b, t].item())

    alpha, tokens = args.regression_coef, live.sum(1)
    log_ratio = (log_pi - old) * live
    per_token_kl = torch.zeros_like(log_p)
    if hasattr(args, "loss_type"):
        if args.importance_sampling_level == "sequence":
            log_ratio = (log_ratio.sum(1) / tokens.clamp(min=1)).unsqueeze(1)
        per_token = -log_ratio.exp() * advantages * weight + alpha * regression
        if args.off_policy_mask_threshold is not None:
            sampler = inputs.get("sampling_per_token_logps", old).double()
            drift = ((sampler - log_p.detach()) * live).sum(1, keepdim=True) / tokens.unsqueeze(1)
            per_token = per_token * ((advantages >= 0) | (drift <= args.off_policy_mask_threshold))
        entropy = -(full.exp() * full).sum(-1)  # (B, C)
        acts = live
        if args.top_entropy_quantile < 1:
            threshold = torch.quantile(entropy[live.bool()].detach(), 1 - args.top_entropy_quantile)
            acts = live * (entropy >= threshold)
            per_token = per_token * acts
        if "importance_sampling_ratio" in inputs:
            per_token = per_token * inputs["importance_sampling_ratio"]
        if args.beta:
            difference = inputs["ref_per_token_logps"].double() - log_p
            per_token_kl = (difference.exp() - difference - 1) * live
            if args.use_bias_correction_kl:
                policy_ratio = (log_p - old) * live
                if args.importance_sampling_level == "sequence":
                    policy_ratio = (policy_ratio.sum(1) / tokens).unsqueeze(1)
                per_token_kl = per_token_kl * policy_ratio.exp()
            per_token = per_token + args.beta * per_token_kl
        total = (per_token * live).sum()
        loss = {
            "dapo": total / (inputs["num_items_in_batch"] / args.steps_per_generation),
            "grpo": ((per_token * live).sum(1) / tokens).mean(),
            "bnpo": total / live.sum(),
            "dr_grpo": total / (len(live) * args.max_completion_length),
            "luspo": (per_token * live).sum(1).mean(),
        }[args.loss_type]
        if args.entropy_coef:
            loss = loss - args.entropy_coef * (entropy * acts).sum() / acts.sum()
    else:
        log_ratio = (log_pi * live).sum(1) - inputs["old_logps"].double()
        loss = (-log_ratio.exp() * advantages[:, 0] + alpha * (regression * live).sum(1)).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    detached = regression.detach() * live, log_ratio.detach()
    return Reference(loss.item(), gradients, *detached, (per_token_kl.sum() / live.sum()).item())
