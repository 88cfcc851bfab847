"""The example that needs no torch, on Flower's own engine.

Without torch it is run by tests/test_distributions.py.
"""

import re
import sys
from pathlib import Path

import pytest

from simulation import cli

APP = Path(__file__).parents[2] / "docs" / "examples" / "scikit_learn"


@pytest.fixture(autouse=True)
def _modules():
    yield
    for name in ("data", "client", "server"):
        sys.modules.pop(name, None)


def accuracy(output):
    return float(re.findall(r"^accuracy: (.*)$", output, re.MULTILINE)[-1])


@pytest.mark.engine
@pytest.mark.slow
def test_it_runs_on_ray(capfd):
    assert cli.main(["run", "--clients", "10", "--app", str(APP)]) == 0
    assert accuracy(capfd.readouterr().out) > 0.6
