"""Flower's command line, connected to the SuperLink: ``python -m jobs.control supernode list``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CONNECTION = """\
[superlink]
default = "deployment"

[superlink.deployment]
address = "superlink-control:8000"
root-certificates = "/trust/ca.pem"
"""


def connect() -> None:
    """Make the SuperLink the default connection of Flower's commands."""
    folder = Path(os.environ["FLWR_HOME"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(_CONNECTION, encoding="utf-8")


def main() -> None:
    """Become the ``flwr`` command with the given arguments."""
    connect()
    os.execvp("flwr", ["flwr", *sys.argv[1:]])


if __name__ == "__main__":
    main()
