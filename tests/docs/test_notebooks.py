"""The example notebooks, run from their first cell to their last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedpsa_strategy.watch.runs import find_runs

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))
RUNNER = ROOT / "tests" / "support" / "notebook.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, RUNNER, path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert done.stdout.count("[cell]") == len(code)
    runs = find_runs(tmp_path / "runs")
    assert len(runs) == 5
    assert all(run.status == "completed" for run in runs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_is_kept_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
