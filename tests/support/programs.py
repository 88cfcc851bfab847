"""Programs in a Python of their own, which has imported nothing yet."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed_by(code: str, *arguments: str, **variables: str) -> str:
    """Return what a program prints that is run in the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
