"""The best checkpoint is the one with the highest reward, unless the user names another metric."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

logger = get_logger(__name__)

_REWARD = "eval_reward"
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules that follow the metric


def best_by_reward(options: Mapping[str, Any]) -> dict[str, Any]:
    """
    The options to add to a run's, before transformers adds its defaults: `eval_reward` as the metric if one is needed
    and none is set, and a schedule that expects it to rise. transformers would take the loss, which says nothing of the
    rewards: a group's advantages add up to 0. A `ValueError` refuses a false `greater_is_better` without a metric.
    """
    schedule = _text(options.get("lr_scheduler_type")) in _BY_METRIC
    metric, greater = options.get("metric_for_best_model"), options.get("greater_is_better")
    added: dict[str, Any] = {}
    if metric is None and (schedule or _chooses(options)):
        if greater is False:
            raise ValueError(
                f"`greater_is_better` is False without a `metric_for_best_model`, which is {_REWARD} by default: the "
                "worst model would count as the best. Remove `greater_is_better`, or set `metric_for_best_model`."
            )
        added["metric_for_best_model"] = metric = _REWARD
    rises = greater if greater is not None else metric is not None and not metric.endswith("loss")
    settings = options.get("lr_scheduler_kwargs") or {}
    settings = json.loads(settings) if isinstance(settings, str) else settings
    if schedule and rises and "mode" not in settings:  # else it lowers the learning rate while the reward rises
        added["lr_scheduler_kwargs"] = {**settings, "mode": "max"}
    return added


def warning_of_the_loss(config: Any) -> str | None:
    """The warning for a plain config of TRL's whose metric is the loss, which may be transformers' default."""
    metric, chooses = config.metric_for_best_model, _chooses(vars(config))
    if metric not in ("loss", "eval_loss") or not (chooses or _text(config.lr_scheduler_type) in _BY_METRIC):
        return None
    return (
        f"`metric_for_best_model` is {metric!r}: an evaluation's loss, in which advantages add up to 0, chooses the "
        f"{'best checkpoint' if chooses else 'learning rate'}. transformers writes this default into a "
        f"{type(config).__name__}. For the highest reward, set `metric_for_best_model='{_REWARD}'`."
    )


def warn_of_several_sets(config: Any, eval_dataset: Any) -> None:
    """Warn if the best checkpoint is chosen by a reward that several evaluation sets share, by name."""
    metric = f"eval_{(config.metric_for_best_model or '').removeprefix('eval_')}"
    if not isinstance(eval_dataset, dict) or len(eval_dataset) < 2 or metric != _REWARD or not _chooses(vars(config)):
        return
    *_, last = eval_dataset
    logger.warning(
        f"There are {len(eval_dataset)} evaluation sets, and `metric_for_best_model` is {_REWARD}: the reward of the "
        f"last set, {last}, chooses the best checkpoint. Name a set, as in "
        f"`metric_for_best_model='eval_{last}_reward'`."
    )


class FindBestCheckpoint(TrainerCallback):
    """
    At the start of a resumed run: the best checkpoint is the one next to the checkpoint that the run resumes from.

    A checkpoint holds the path of the best one. After the folder has moved, the Trainer would ignore the best one: it
    would delete that checkpoint as an old one, and end with none. For a copied folder, it would read the original.
    """

    resumes_from: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.resumes_from is None or not (file := Path(self.resumes_from, TRAINER_STATE_NAME)).is_file():
            return
        recorded = TrainerState.load_from_json(str(file)).best_model_checkpoint
        if recorded is None:
            return
        folders = (Path(self.resumes_from).parent, Path(args.output_dir))
        places = [folder / Path(recorded).name for folder in folders] + [Path(recorded)]
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            logger.warning(
                f"The best checkpoint so far, {recorded} ({args.metric_for_best_model}: {state.best_metric}), is gone, "
                f"and {folders[0]} holds none of its name. The best one will be chosen among those to come."
            )
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        elif not Path(recorded).is_dir() or not found.samefile(recorded):
            logger.warning(f"The best checkpoint so far is {found}, since the run has moved from {recorded}.")
            state.best_model_checkpoint = str(found)


def _chooses(options: Mapping[str, Any]) -> bool:
    return bool(options.get("load_best_model_at_end")) or _text(options.get("save_strategy")) == "best"


def _text(option: Any) -> str:
    return str(getattr(option, "value", option))
