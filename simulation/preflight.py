"""Checks of a launch of this repository's app, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fedpsa_strategy.checks import shown
from fedpsa_strategy.server.checkpoint import CheckpointError
from server_app.method_settings import SettingsError
from server_app.no_effect import without_effect
from server_app.places import holds_run
from server_app.resume import load_checkpoint
from server_app.settings import Settings
from simulation.environment import ConfigValue
from simulation.errors import Refused


def check_launch(run_config: Mapping[str, ConfigValue]) -> list[str]:
    """Refuse a run config that cannot work; return warnings about what has no effect."""
    try:
        settings = Settings.from_run_config(run_config)
    except SettingsError as error:
        raise Refused(str(error)) from error
    check_folder("run-dir", Path(settings.run_dir))
    begun = holds_run(Path(settings.run_dir))
    if settings.resume == "true" and not begun:
        raise Refused(f"resume = 'true': run-dir {settings.run_dir} holds no run to go on from")
    if settings.resume not in ("", "true") and not _exists(settings.resume):
        raise Refused(f"resume = {shown(settings.resume)}: there is no such run or checkpoint")
    if begun and not settings.resume:
        raise Refused(
            f"run-dir = {settings.run_dir!r}: already holds a run: choose another folder, or"
            " resume=true to go on from its newest checkpoint"
        )
    if settings.resume:
        try:
            load_checkpoint(settings)
        except (SettingsError, CheckpointError) as error:
            raise Refused(str(error)) from error
    if settings.data_dir and not _exists(settings.data_dir):
        raise Refused(f"data-dir = {shown(settings.data_dir)}: there is no such folder")
    if settings.cache_dir:
        check_folder("cache-dir", Path(settings.cache_dir))
    return without_effect(settings)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long a name
        return False


def check_folder(what: str, path: Path) -> None:
    """Refuse a folder that does not exist and cannot be made, or cannot be written to."""
    try:
        there = next(place for place in (path, *path.parents) if place.exists())
        if not there.is_dir():
            reason = f"{there} is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            reason = f"{there} cannot be written to"
        else:
            return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise Refused(f"{what} = {shown(str(path))}: {reason}")
