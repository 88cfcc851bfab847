"""Nothing is forgotten on the CPU: the work of server and clients on a device without mercy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = "rules or auto or test_training or apps or linear"


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("", marks=pytest.mark.slow)])
def test_it_runs_on_a_device_that_refuses_the_cpus_tensors(chosen):
    """In a process of its own, because torch cannot forget a device."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(
        [*command, "-k", chosen, "tests/support/device_checks.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
