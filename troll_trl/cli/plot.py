"""
Draw the curves of training runs of TROLL or TRL into one picture, and print the last values.

    troll plot outputs/troll outputs/clip
    troll plot out/*/seed* --group method --output out/curves.png
    troll plot outputs/reuse outputs/default --x completions

The last line compares runs that use each completion a different number of times, or in updates of different sizes, by
the completions that they had generated. `--x minutes` compares them by the time since the training began.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troll_trl.cli.command_line import CommandParser, read_config, stop

if TYPE_CHECKING:
    import pandas as pd

# The title, training metric and evaluation metric of each panel
PANELS = (
    ("reward", "reward", "eval_reward"),
    ("policy KL before the projection (nats)", "troll/policy_kl_mean", None),
    ("learning rate", "learning_rate", None),
    ("norm of the gradient", "grad_norm", None),
    ("completion length (tokens)", "completions/mean_length", None),
    ("entropy (nats per token)", "entropy", None),
)
# What `--x` names, and the column of a log, from [`RunCost`]
COSTS = {"updates": "step", "completions": "cost/completions", "minutes": "cost/minutes"}


def read_log(run: Path) -> "pd.DataFrame":
    """Return what a run logged: a row for each update, a column for each metric. Of the `trainer_state.json` of the
    folder `run` and of its checkpoints, the one with the latest update is read. Raises a `ValueError` without any."""
    import pandas as pd

    # A stopped run has only the states of its checkpoints. A resumed run also has the state of the earlier training
    saved = [file for file in run.glob("checkpoint-*/trainer_state.json") if file.parent.name[11:].isdigit()]
    checkpoints = sorted(saved, key=lambda file: int(file.parent.name[11:]))
    files = [file for file in (run / "trainer_state.json", *checkpoints[-1:]) if file.is_file()]
    if not files:
        raise ValueError(f"{run} is not a run: it has no trainer_state.json, and no checkpoint with one.")
    logs = []
    for file in files:
        try:
            log = pd.DataFrame(json.loads(file.read_text(encoding="utf-8"))["log_history"])
            logs.append(log.groupby("step").last(numeric_only=True))  # an evaluation has a line of its own
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{file} is not the state of a trainer: {error!r}") from None
    return max(logs, key=lambda log: log.index[-1])  # on a tie, the finished run's


def against(log: "pd.DataFrame", x: str, run: Path) -> "pd.DataFrame":
    """Return the `log` of a `run` over a key of [`COSTS`]. Raises a `ValueError` if the run did not log it."""
    log, column = log.reset_index(), COSTS[x]
    if column not in log:
        raise ValueError(f"{run} logged no `{column}`: TRL's and asynchronous trainers do not. Use `--x updates`.")
    return log.dropna(subset=[column]).set_index(column)  # an earlier version may have begun a resumed run


def group_of(run: Path, key: str | None) -> str:
    """Return the name of a run's group: the value of `key` in its `config.yaml` or, without a key, the run's path."""
    if key is None:
        return str(run)
    file = next((folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").is_file()), None)
    options = read_config(file.resolve()) if file else {}
    return f"{key} {options.get(key, '(default)')}"


def last_values(logs: Mapping[Path, "pd.DataFrame"], groups: Mapping[Path, str], x: str = "updates") -> "pd.DataFrame":
    """Return a table with a row for each group and a column for `x`, the logs' index, and for each drawn metric: the
    mean of the last logged values over the group's runs."""
    import pandas as pd

    names = [name for _, *metrics in PANELS for name in metrics if name is not None]
    rows = {
        run: {"runs": groups[run], x: log.index[-1]}
        | {name: log[name].dropna().iloc[-1] for name in names if name in log and log[name].notna().any()}
        for run, log in logs.items()
    }
    return pd.DataFrame(list(rows.values())).groupby("runs", sort=False).mean()


def draw(logs: Mapping[Path, "pd.DataFrame"], groups: Mapping[Path, str], x: str, file: Path) -> None:
    """Draw a line for each run over `x`, the logs' index, in the colour of its group, and circles for its
    evaluations."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.6, 9.6), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(groups.values()))}
    held_out: Any = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"}
    for axes, (title, metric, evaluation) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
        axes.set(title=title, xlabel=x)
        axes.grid(alpha=0.3)
        for run, log in logs.items():
            for name, look in ((metric, {}), (evaluation, held_out)):
                if name in log:
                    axes.plot(log[name].dropna(), color=colours[groups[run]], linewidth=1, **look)
    lines = [Line2D([], [], color=colour, label=f" {name}") for name, colour in colours.items()]  # "_" hides it
    lines.append(Line2D([], [], color="grey", label=" held-out problems", **held_out))
    figure.legend(handles=lines, loc="outside upper center", ncols=3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def plot(runs: Sequence[Path], group: str | None, file: Path, x: str = "updates") -> None:
    """Draw runs into `file` over a key of [`COSTS`], and print their last values. Raises a `ValueError` if a folder
    holds no run."""
    logs = {run: against(read_log(run), x, run) for run in dict.fromkeys(runs)}
    groups = {run: group_of(run, group) for run in logs}
    draw(logs, groups, x, file)
    print(last_values(logs, groups, x).to_string(float_format="{:.4g}".format, na_rep="–"))
    print(f"Curves: {file}")


def main(argv: Sequence[str] | None = None, program: str = "troll plot") -> None:
    """Plot in this process. Ends with code 2 and one message if a folder holds no run."""
    parser = CommandParser(prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder or checkpoint of a run")
    parser.add_argument("--group", metavar="KEY", help="one colour per value of this key, such as method")
    parser.add_argument("--x", choices=COSTS, default="updates", help="what to draw over (default: updates)")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="the picture (default: curves.png)")
    options = parser.parse_args(argv)
    try:
        plot(options.runs, options.group, options.output, options.x)
    except (ValueError, OSError) as error:
        stop(program, error)
