"""Where a run's folder goes by default, and what it is called."""

from __future__ import annotations

import json
import os
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EVENTS, SUMMARY, STOP_REQUEST = "events.jsonl", "summary.json", "stop-requested"
"""Names of files in a run's folder. The last asks the run to end cleanly: under the simulation
engine the ServerApp is a thread and sees no signal, so that a file is the only way."""

_APP = Path(__file__).resolve().parents[1]


def run_name(strategy: str, data: str, now: datetime | None = None) -> str:
    """Return the name of a run's folder, such as ``20260131T235959Z-fedpsa-digits``.

    The data is a dataset, or an own task as ``module:object``.
    """
    stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    # Names of files have a limit, names of modules have none.
    return "-".join(part[:80] for part in (stamp, strategy, data) if part).replace(":", ".")


def unused(path: Path) -> Path:
    """Return the path, with a number behind it if there is something of that name."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def runs_folder(working: Path | None = None) -> Path:
    """Return the folder of all runs: ``runs`` of this app, else one of the user's own.

    A ServerApp works in the folder in which its SuperLink was started, and that may be another
    project's. So the results go there only if it is the folder of this app.
    """
    working = working or Path.cwd()
    identity = _identity(_APP)
    if identity is not None and _identity(working) == identity:
        return working / "runs"
    # A relative path in this variable has to be ignored, says the standard behind it.
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "fedpsa" / "runs"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file that another process wrote; None if there is no whole one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def holds_run(path: Path) -> bool:
    """Tell whether a run has begun in a folder."""
    return (path / EVENTS).exists() or any(path.glob("checkpoints/*.ckpt"))


def file_in_the_way(path: Path) -> Path | None:
    """Return the file because of which a folder of this name cannot be made, if there is one."""
    nearest = next((place for place in (path, *path.parents) if place.exists()), None)
    return None if nearest is None or nearest.is_dir() else nearest


def _identity(folder: Path) -> tuple[str, str] | None:
    """Return publisher and name of the Flower app in a folder; None if there is none."""
    try:
        content = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return content["tool"]["flwr"]["app"]["publisher"], content["project"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
