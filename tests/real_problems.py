"""Where the real problems lie (GSM8K, MATH-500, DAPO and others), which are not in the repository."""

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real problems are not at {DATA}")
