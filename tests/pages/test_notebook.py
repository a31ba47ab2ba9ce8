"""
The notebook of examples/: it is valid, shows what it printed, ends as the README begins, and (slow) runs.

To record it again: `jupyter execute --inplace examples/quickstart.ipynb`. Then delete what went to stderr:
progress bars, and warnings with paths of your machine.
"""

import json
import re
from itertools import pairwise

import nbclient
import nbformat
import pytest
from repository import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
TRACES = re.compile(r"(?:/(?:home|root|tmp|Users|work)/|site-packages)[\w./-]*")  # of the machine that ran it


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    return "".join(output.text for output in outputs if output.output_type == "stream")


def success(notebook) -> dict[str, list[float]]:
    """Percent before and after the training, by method."""
    line = r"^ *(\w+): (\S+)% of the held-out sums before the training, (\S+)% after"
    lines = re.findall(line, printed(notebook), re.MULTILINE)
    return {method: [float(before), float(after)] for method, before, after in lines}


def test_it_is_valid_and_was_run_from_top_to_bottom(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    before, after = success(notebook)["TROLL"]
    assert after > before > success(notebook)["clip"][1]
    pictures = [data for cell in code for output in cell.outputs for data in output.get("data", {}) if "png" in data]
    assert pictures


def test_its_output_names_nothing_of_the_machine_that_ran_it(notebook):
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert TRACES.findall(re.sub(r'"image/png": "[^"]*"', "", outputs)) == []


def test_each_cell_of_code_follows_a_cell_that_explains_it(notebook):
    kinds = [cell.cell_type for cell in notebook.cells]
    assert all(before == "markdown" for before, kind in pairwise(kinds) if kind == "code")


def test_it_ends_with_the_lines_that_the_readme_changes(notebook):
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    changed = re.findall(r"^[-+]from .*", notebook.cells[-1].source, re.MULTILINE)
    assert changed and all(line in readme for line in changed)
    assert "steps_per_generation=32" in notebook.cells[-1].source and "steps_per_generation=32" in readme


@pytest.mark.slow
def test_it_runs(notebook, tmp_path):
    """With a tenth of the updates, from an easier start: it shows that every cell works, not which method is better."""
    [settings] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    settings.source, replaced = re.subn(r"(?m)^(UPDATES|START_SUCCESS) = .*", "", settings.source)
    settings.source += "\nUPDATES, START_SUCCESS = 16, 0.05"
    assert replaced == 2
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    rates = success(notebook)
    assert rates.keys() == {"TROLL", "clip"} and rates["TROLL"][0] == rates["clip"][0]  # one start
    # Not whole lines: an answer of so young a model may hold a new line, and a warning may precede the first question
    assert re.search(r"What is \d+ \+ \d+\?", printed(notebook))
    assert re.search(r" \(right: \d+\)$", printed(notebook), re.MULTILINE), printed(notebook)
    assert {path.name for path in (tmp_path / "outputs" / "notebook").iterdir()} >= {"start", "run", "clip"}
