"""What a warm node knows about Flower, in one place (the same from 1.39 to 1.42).

The SuperNode starts an executor, and the executor starts a ClientApp's process for every message:
both by their bare names, with the environment of the SuperNode.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

SUPERNODE = "flower-supernode"
CLIENTAPP = "flwr-clientapp"

CLIENTAPP_MODULE = "flwr.supernode.cli"
"""What ``flwr-clientapp`` imports before anything else: its own share of the modules."""

POLL_VARIABLE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""How many seconds pass between two looks of the executor for work; Flower's default is 1."""

POLL_SECONDS = "0.25"
"""A shorter interval saves little time, and an idle node would take more than 2 % of a core."""

INSTALLS_DEPENDENCIES = "--allow-runtime-dependency-installation"


def why_ordinary(arguments: Sequence[str]) -> str | None:
    """Return why a SuperNode with these arguments gets nothing from a warm process, if so."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--isolation")
    parser.add_argument(INSTALLS_DEPENDENCIES, action="store_true", dest="installs")
    try:
        known, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:  # Flower says it better
        return str(error)
    if known.isolation == "process":
        return "with --isolation process, the SuperNode does not start ClientApps itself"
    if known.installs:
        return f"{INSTALLS_DEPENDENCIES} gives every app an environment of its own"
    return None


def interpreter_of(script: Path) -> list[str] | None:
    """Return the Python command line of an installed console script; None if it is none."""
    try:
        with script.open(encoding="utf-8") as file:
            first, second = file.readline(), file.readline()
    except (OSError, UnicodeDecodeError):
        return None
    if not first.startswith("#!"):
        return None
    command = first[2:].strip()
    # Where the path is long or has spaces: "#!/bin/sh", then "'''exec' "/a b/python" "$0" "$@"".
    if command == "/bin/sh" and second.startswith("'''exec' "):
        words = [word for word in shlex.split(second[len("'''exec' ") :]) if word[0] != "$"]
    else:
        path, _, flag = command.partition(" ")
        words = [path, *flag.split()]
    if not words or "python" not in Path(words[0]).name:
        return None
    return words
