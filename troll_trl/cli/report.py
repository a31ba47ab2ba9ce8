"""
Make one page with figures and a table from training runs of TROLL or TRL. Reads their `trainer_state.json`.

    troll report TROLL=out/troll-0,out/troll-1 clip=out/clip-0,out/clip-1 --output out/report
    troll report out/troll-seed0 out/troll-seed1 out/clip-seed0 out/clip-seed1 --output out/report
"""

from collections.abc import Sequence
from pathlib import Path

from troll_trl.cli.settings.command import CommandParser, stop

RUN_HELP = """
    a run's output folder, a checkpoint, or LABEL=RUN[,RUN...] for runs of one configuration with different seeds.
    Without labels, runs are seeds of one configuration if their paths differ only in seed0, -seed1, _seed2 and so on
"""


def write_report(runs: Sequence[str], success: str | None, output: Path, prints_table: bool = True) -> None:
    """Write the page, its figures and its table into `output`, and print the table and the notes."""
    from math_answers.evaluation.tables import markdown
    from math_answers.printable import printable
    from math_answers.whole_files import write_text
    from troll_trl.report.figures import draw_figures
    from troll_trl.report.page import make_table, warnings_of, write_page
    from troll_trl.report.runs import load_groups

    groups = load_groups(runs)
    table = make_table(groups, success)
    output.mkdir(parents=True, exist_ok=True)
    text = markdown(["", *table], table.itertuples()) + "\n"
    write_text(output / "table.md", text)
    plots = draw_figures(groups, success, output)
    write_page(groups, plots, table, output / "report.html")

    if prints_table:
        print(text)
    for note in [*warnings_of(groups), *(note for group in groups for run in group.runs for note in run.notes)]:
        print(f"Note: {note}")
    print(printable(f"Report: {output / 'report.html'}"))


def main(argv: Sequence[str] | None = None, program: str = "report.py") -> None:
    """Report, in this process. Ends with code 2, and one line for a mistake that a user can set right."""
    description = str(__doc__).strip().splitlines()[0]
    parser = CommandParser(prog=program, description=description)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--output", type=Path, required=True, help="folder for report.html, table.md and the figures")
    parser.add_argument(
        "--success",
        metavar="FUNCTION",
        help="reward function whose mean is the success rate (default: functions with `accuracy` in their name)",
    )
    options = parser.parse_args(argv)
    from math_answers.printable import printable
    from troll_trl.report.runs import ReportError  # imports pandas

    try:
        write_report(options.runs, options.success, options.output)
    except (ReportError, OSError) as error:
        stop(program, printable(str(error)))
