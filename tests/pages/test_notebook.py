"""
The notebook of examples/ runs.

To record it again: `jupyter execute --inplace examples/quickstart.ipynb`. Then delete what went to stderr.
"""

import re

import nbclient
import nbformat
import pytest

from tests.support.repository import ROOT
from troll_trl.cli import quickstart


@pytest.mark.slow
def test_it_runs(tmp_path):
    """With a tenth of the updates, from an easier start: it shows that every cell works, not which method is better."""
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    [settings] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    settings.source, replaced = re.subn(r"(?m)^(UPDATES|START_SUCCESS) = .*", "", settings.source)
    settings.source += "\nUPDATES, START_SUCCESS = 16, 0.05"
    assert replaced == 2
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    assert {path.name for path in (tmp_path / "outputs" / "notebook").iterdir()} >= {"start", *quickstart.RUNS}
