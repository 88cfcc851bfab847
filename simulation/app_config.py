"""What the app's pyproject.toml says about its run config."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simulation.environment import ConfigValue
from simulation.errors import LaunchFailed


def default_run_config(app_dir: Path) -> dict[str, ConfigValue]:
    """Return the app's default run config, with dotted keys for nested tables.

    Raises
    ------
    LaunchFailed
        If there is no Flower app in this folder.
    """
    path = app_dir / "pyproject.toml"
    try:
        app = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise LaunchFailed(
            f"{app_dir} is not the folder of a Flower app: its pyproject.toml must have a"
            f" [tool.flwr.app] table ({type(error).__name__}: {error})."
        ) from error
    return dict(_flatten(app.get("config", {})))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, ConfigValue]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_keys(run_config: Iterable[str], defaults: Mapping[str, ConfigValue]) -> None:
    """Refuse run-config keys that the app does not have, before anything is started.

    Raises
    ------
    LaunchFailed
        Names the unknown key and the known one it looks most like.
    """
    for key in run_config:
        if key in defaults:
            continue
        similar = difflib.get_close_matches(key, defaults, n=1)
        hint = f"did you mean '{similar[0]}'?" if similar else "see [tool.flwr.app.config]."
        raise LaunchFailed(f"The app has no run-config key '{key}': {hint}")
