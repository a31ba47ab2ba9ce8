"""
Write the tables and figures of a study into the pages evidence/*.md, from evidence/results, and a page for each of its
parts with scripts/report.py, from the runs themselves where they are at hand.

    python -m evidence.report evidence/cpu.yaml
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from evidence import age, lora, rarity, smollm2, tables
from evidence.results import read_records, run_of
from evidence.tables import Record, tasks_of

HERE = Path(__file__).resolve().parent
TABLES: dict[str, dict[str, Callable[[Sequence[Record]], str]]] = {
    "cpu": tables.TABLES,
    "gpu": tables.TABLES,
    "repaired": tables.REPAIRED_TABLES,
    "rarity": rarity.TABLES,
    "rarity-moves": rarity.MOVES_TABLES,  # by evidence.moves
    "smollm2": smollm2.TABLES,
    "lora": lora.TABLES,
    "age": age.TABLES,
}


def fill_in(text: str, grid: str, records: Sequence[Record]) -> str:
    """`text` with the tables between its marks `<!-- GRID NAME -->` and `<!-- end -->` made anew."""

    def table(mark: re.Match) -> str:
        return f"<!-- {grid} {mark[1]} -->\n{TABLES[grid][mark[1]](records)}\n<!-- end -->"

    return re.sub(rf"<!-- {grid} ([\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def fill_pages(grid: str, records: Sequence[Record]) -> None:
    """[`fill_in`] of every page beside this file."""
    for page in HERE.glob("*.md"):
        page.write_text(fill_in(page.read_text(), grid, records))


def write_pages(records: Sequence[Record], folder: Path) -> None:
    """One page for every study and task, over all of its runs that finished."""
    parts: dict[str, list[str]] = {}
    for record in records:
        run = folder / "runs" / run_of(record).folder
        if "error" not in record and run.is_dir():
            for study in record["studies"]:
                parts.setdefault(f"{study}-{record['task']}", []).append(str(run))
    for name, runs in parts.items():
        output = folder / "report" / name
        command = [sys.executable, str(HERE.parent / "scripts" / "report.py"), *runs, "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(output / "report.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file of the study")
    options = parser.parse_args()
    from evidence.figures import FIGURES  # imports matplotlib, which the tables do without

    records = read_records(HERE / "results" / f"{options.grid.stem}.jsonl")
    fill_pages(options.grid.stem, records)
    (HERE / "figures").mkdir(exist_ok=True)
    for name, (draw, study) in FIGURES.get(options.grid.stem, {}).items():
        if tasks_of(records, study):
            draw(records, study, HERE / "figures" / f"{options.grid.stem}-{name}.png")
    write_pages(records, HERE.parent / "outputs" / "evidence" / options.grid.stem)


if __name__ == "__main__":
    main()
