"""Flower's command line, connected to the SuperLink: ``python -m jobs.control supernode list``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_CONNECTION = """\
[superlink]
default = "deployment"

[superlink.deployment]
address = "superlink-control:8000"
root-certificates = "/trust/ca.pem"
"""


class CommandFailed(RuntimeError):  # noqa: N818 - says what happened, like a status
    """A command of Flower's failed; the text is its own."""


def connect() -> None:
    """Make the SuperLink the default connection of Flower's commands."""
    folder = Path(os.environ["FLWR_HOME"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(_CONNECTION, encoding="utf-8")


def flwr(*arguments: str) -> dict[str, Any]:
    """Run a ``flwr`` command and return its JSON answer.

    Raises
    ------
    CommandFailed
        If it fails.
    """
    done = subprocess.run(
        ["flwr", *arguments, "--format", "json"], capture_output=True, text=True, check=False
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        answer = {}
    if answer.get("success"):
        return answer
    text = answer.get("error-message") or done.stderr or done.stdout
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("Using SuperLink")]
    raise CommandFailed(f"`flwr {arguments[0]}` failed: {' '.join(said)}")


def main() -> None:
    """Become the ``flwr`` command with the given arguments."""
    connect()
    os.execvp("flwr", ["flwr", *sys.argv[1:]])


if __name__ == "__main__":
    main()
