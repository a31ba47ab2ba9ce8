"""CountedEvaluation: the metrics of an evaluation are over its completions, and not over the means of its batches."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import IterableDatasetShard
from transformers.trainer_utils import has_length

from troll_trl.trainers.trl_compat import EVALUATION

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

# TRL's losses that are sums over the tokens of all ranks, divided by their number
_OF_ALL_TOKENS = ("dapo", "cispo", "vespo")


class CountedEvaluation(_Trainer):
    """
    Mixin for a trainer of TRL whose evaluations count each completion once.

    TRL averages the means of the batches, and the last batch may be smaller. On several ranks, accelerate fills the
    last batches with prompts from the beginning, and TRL counts these twice. Here rewards and lengths are statistics
    over all completions of the evaluation set, without the repeated ones. Entropy, KL and `sampling/…` are weighted by
    tokens, and so is a loss that is a mean over tokens (dapo, bnpo); all other losses and metrics by completions. With
    several evaluation sets, the metrics of each also have its name, as in `eval_math_reward`.
    """

    _evaluation: "EvaluationTotals | None" = None  # `None` unless an evaluation runs
    switched_off: frozenset[str] = frozenset()

    def evaluation_loop(self, dataloader, *args, **kwargs):
        if EVALUATION in self.switched_off:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._metrics["eval"].clear()  # a prediction, or an evaluation that failed, leaves its numbers there
        self._evaluation = totals = EvaluationTotals(self, dataloader)
        completions = _listening(self, "_generate", totals.add_completions)
        rewards = _listening(self, "_calculate_rewards", totals.add_rewards)
        try:
            with completions, rewards:
                output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._evaluation = None
        prefix = kwargs.get("metric_key_prefix", "eval")
        for name, value in totals.metrics().items():
            self._metrics["eval"][name] = [value]
            if prefix.startswith("eval_"):  # one of several sets; TRL gives them all the same names
                self._metrics["eval"][f"{prefix.removeprefix('eval_')}_{name}"] = [value]
        if (loss := totals.loss()) is not None and f"{prefix}_loss" in output.metrics:
            output.metrics[f"{prefix}_loss"] = loss
        return output

    def _generate_and_score_completions(self, inputs, *args, **kwargs):
        if self._evaluation is None:
            return super()._generate_and_score_completions(inputs, *args, **kwargs)
        self._evaluation.begin_batch(len(inputs))
        output = super()._generate_and_score_completions(inputs, *args, **kwargs)
        self._evaluation.leave_repeated_out(output)
        return output

    def prediction_step(self, *args, **kwargs):
        result = super().prediction_step(*args, **kwargs)
        if self._evaluation is not None:
            self._evaluation.end_batch(result[0], self._metrics["eval"])
        return result


class EvaluationTotals:
    """What one evaluation of TRL's `trainer` has counted so far. Every rank calls all methods, with batches of one
    size. The `dataloader` gives the number of the set's completions; all rows after them are repeated ones."""

    def __init__(self, trainer: Any, dataloader: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self._rows_of_set = _rows_of_set(dataloader)
        self._seen = 0  # rows of all ranks, in the order of the set
        self._counted = torch.ones(0, dtype=torch.bool)  # (ranks · B,): which rows of the batch are no repeated ones
        self._tokens = 0  # of the batch's loss, over all ranks
        self._batch: dict[str, Any] = {}
        self._lengths: list[torch.Tensor | None] = []  # per batch, (completions, 2): tokens, and 1 if cut off
        self._rewards: list[torch.Tensor | None] = []  # per batch, (completions, functions)
        self._weighted: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # TRL's metrics of the batches
        self._others: dict[str, float] = {}  # smallest and largest values, and the last count of tokens
        self._loss = torch.zeros(2, device=self.accelerator.device)  # sum and weight of this rank's losses

    # -- A batch, in the order of the calls -------------------------------------------------------------------------

    def begin_batch(self, rows: int) -> None:
        """A batch of `rows` completions on each rank follows. Rank after rank, the rows are in the set's order."""
        end = self._seen + rows * self.accelerator.num_processes
        self._counted = torch.arange(self._seen, end) < self._rows_of_set()
        self._seen, self._batch = end, {}

    def add_completions(self, generated: tuple[Any, ...]) -> None:
        """What TRL's `_generate` returned."""
        ids, tool_masks = generated[1], generated[2] if len(generated) > 3 else None  # RLOO has no tools
        processor = self.trainer.processing_class
        ends = {*self.trainer.eos_token_ids, getattr(processor, "tokenizer", processor).pad_token_id}
        tokens = map(len, ids) if tool_masks is None else map(sum, tool_masks)
        values = [[length, row[-1] not in ends] for length, row in zip(tokens, ids, strict=True)]
        gathered = self.accelerator.gather(torch.tensor(values, device=self.accelerator.device, dtype=torch.float32))
        self._batch["lengths"] = gathered

    def add_rewards(self, rewards: torch.Tensor) -> None:
        """What TRL's `_calculate_rewards` returned, `(ranks · B, functions)`; NaN if a function gave none."""
        self._batch["rewards"] = rewards

    def leave_repeated_out(self, batch: dict[str, Any]) -> None:
        """Mask the repeated completions of this rank's `batch`. They leave its loss, entropy, KL and `troll/…`."""
        rows, rank = len(batch["completion_mask"]), self.accelerator.process_index
        counted = self._counted[rank * rows : (rank + 1) * rows].to(batch["completion_mask"].device)
        batch["completion_mask"] = batch["completion_mask"] * counted.unsqueeze(1)
        if "num_items_in_batch" in batch:
            tokens = self.accelerator.reduce(_loss_tokens(batch), reduction="sum")
            batch["num_items_in_batch"] = tokens.to(batch["num_items_in_batch"])
        self._batch |= {"counted": counted, "rollout": batch}

    def end_batch(self, loss: torch.Tensor | None, metrics: dict[str, list[float]]) -> None:
        """Take TRL's `metrics` of the batch, and the mean `loss` of this rank."""
        if "rollout" in self._batch:  # counted now, because tokens that the engine did not score have left its masks
            self._batch["loss_tokens"] = loss_tokens = _loss_tokens(self._batch.pop("rollout"))
            self._tokens = int(self.accelerator.reduce(loss_tokens, reduction="sum"))
        completions = int(self._counted.sum())
        calls = sum(metrics.get("tools/call_frequency", ())) * completions
        for name, values in metrics.items():
            for value in values:
                if name == "num_tokens":
                    self._others[name] = value
                elif name.startswith("sampling/") and name.endswith(("/min", "/max")):
                    choose = min if name.endswith("/min") else max
                    self._others[name] = choose(self._others.get(name, value), value)
                else:
                    of_tokens = name in ("entropy", "kl") or name.startswith("sampling/")
                    weight = self._tokens if of_tokens else calls if name == "tools/failure_frequency" else completions
                    self._weighted[name].append((weight, value))
        metrics.clear()
        self._lengths.append(self._without_repeated("lengths"))
        self._rewards.append(self._without_repeated("rewards"))
        self._add_loss(loss)

    def _without_repeated(self, name: str) -> torch.Tensor | None:
        values = self._batch.get(name)  # a subclass may rate or generate in another way
        return None if values is None or len(values) != len(self._counted) else values.cpu().double()[self._counted]

    def _add_loss(self, loss: torch.Tensor | None) -> None:
        # The Trainer's own mean leaves out such a loss, too. A subclass's step may generate no batch
        if loss is None or not loss.isfinite() or not self._batch:
            return
        counted, kind = self._batch["counted"], getattr(self.trainer.args, "loss_type", None)
        if kind in _OF_ALL_TOKENS:  # the batch's loss is the mean over ranks
            share = self._tokens / self.accelerator.num_processes
            parts = [loss * share, self._loss.new_tensor(share)]
        elif kind == "bnpo":  # a mean over the tokens of this rank
            parts = [loss * self._batch["loss_tokens"], self._batch["loss_tokens"]]
        else:  # a mean over the completions of this rank, in which a masked one is 0
            parts = [loss * len(counted), counted.sum()]
        self._loss += torch.stack([x.to(self._loss) for x in parts])

    # -- The evaluation ---------------------------------------------------------------------------------------------

    def loss(self) -> float | None:
        """The mean loss over all ranks, or `None` if no batch had a finite one."""
        total, weight = self.accelerator.reduce(self._loss, reduction="sum").tolist()
        return total / weight if weight else None

    def metrics(self) -> dict[str, float]:
        """TRL's metrics, without a prefix, the same on all ranks; NaN for one without a value."""
        means = {name: _mean(values) for name, values in self._weighted.items()} | self._others
        exact = {**self._length_metrics(), **self._reward_metrics()}
        return means | {name: value for name, value in exact.items() if name in means}

    def _length_metrics(self) -> Mapping[str, float]:
        if (lengths := _joined(self._lengths)) is None:
            return {}
        tokens, cut_off = lengths.unbind(1)
        metrics = {"completions/clipped_ratio": cut_off.mean().item()}
        ended = tokens[cut_off == 0] if (cut_off == 0).any() else tokens.new_zeros(1)  # 0 as in TRL
        for infix, values in {"": tokens, "terminated_": ended}.items():
            for name, value in {"mean": values.mean(), "min": values.min(), "max": values.max()}.items():
                metrics[f"completions/{name}_{infix}length"] = value.item()
        return metrics

    def _reward_metrics(self) -> Mapping[str, float]:
        if (rewards := _joined(self._rewards)) is None:
            return {}
        trainer = self.trainer
        weighted = (rewards * trainer.reward_weights.cpu().double()).nansum(1)
        total = weighted.masked_fill(rewards.isnan().all(1), torch.nan)
        metrics = {"reward": total.nanmean().item(), "reward_std": _std(total)}
        for name, values in zip(trainer.reward_func_names, rewards.unbind(1), strict=True):
            metrics |= {f"rewards/{name}/mean": values.nanmean().item(), f"rewards/{name}/std": _std(values)}
        size = trainer.num_generations_eval
        if size > 1 and len(total) % size == 0 and _compares_rewards_alone(trainer):
            groups = total.view(-1, size)
            equal = [math.isclose(_std(group), 0.0, abs_tol=1e-8) for group in groups]  # NaN is not
            metrics["frac_reward_zero_std"] = sum(equal) / len(equal)
        return metrics


def _compares_rewards_alone(trainer: Any) -> bool:
    """Whether TRL looks for equal rewards in groups, and not in whole batches, nor after a reference KL or a clip."""
    args = trainer.args
    if hasattr(args, "scale_rewards"):  # GRPO
        return args.scale_rewards in ("group", "none") and args.multi_objective_aggregation == "sum_then_normalize"
    return args.beta == 0.0 and not args.reward_clip_range


def _loss_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """The number of this rank's tokens that the loss of a rollout batch is over, `()`."""
    return (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()


def _joined(batches: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The completions of all batches; `None` unless every batch has some."""
    known = [batch for batch in batches if batch is not None]
    return torch.cat(known) if known and len(known) == len(batches) else None


def _mean(values: list[tuple[float, float]]) -> float:
    """The weighted mean of pairs of a weight and a value. A NaN is left out, as in TRL's own mean."""
    valid = [(weight, value) for weight, value in values if not math.isnan(value)]
    weights = sum(weight for weight, _ in valid)
    if not valid:
        return math.nan
    return sum(weight * value for weight, value in valid) / weights if weights else 0.0


def _std(values: torch.Tensor) -> float:
    """The standard deviation of the values that are not NaN, with Bessel's correction, as TRL's."""
    values = values[~values.isnan()]
    return values.std().item() if len(values) > 1 else math.nan


def _rows_of_set(dataloader: Any) -> Callable[[], float]:
    """How many rows an evaluation has before they are repeated. A stream tells it only at its end, which precedes the
    batch that is filled up."""
    if isinstance(shard := getattr(dataloader, "dataset", None), IterableDatasetShard):
        shard.dataset = stream = _Counting(shard.dataset)
        return lambda: stream.rows
    batches = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)  # in a shard on several ranks
    rows = len(sampler) if sampler is not None and has_length(sampler) else math.inf
    return lambda: rows


class _Counting:
    """A stream that counts the rows which it has given."""

    def __init__(self, stream: Any):
        self._stream, self.rows = stream, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self._stream:
            self.rows += 1
            yield row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _listening(trainer: Any, name: str, hear: Callable[[Any], None]) -> Iterator[None]:
    """Give `hear` what a method of the trainer returns, also if a subclass overrides it."""
    own, method = vars(trainer).get(name), getattr(trainer, name, None)
    if method is None:  # a newer TRL lacks it; the means of the batches are then weighted
        yield
        return

    def heard(*args, **kwargs):
        result = method(*args, **kwargs)
        hear(result)
        return result

    setattr(trainer, name, heard)
    try:
        yield
    finally:
        delattr(trainer, name) if own is None else setattr(trainer, name, own)
