"""What a run resumes from, and when it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpsa_strategy.server.checkpoint import CheckpointStore, load
from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.watch.status_line import Limits
from server_app.method_settings import SettingsError
from server_app.places import SUMMARY, read_json
from server_app.settings import Settings
from server_app.task_defaults import resolve


def checkpoint_store(settings: Settings, folder: Path) -> CheckpointStore:
    """Return where the checkpoints of the run in a folder are."""
    return CheckpointStore(folder / "checkpoints", settings.checkpoint_keep)


def load_checkpoint(settings: Settings) -> dict[str, Any]:
    """Return the checkpoint to resume from, if the settings still fit it; nothing is written.

    `SettingsError` says that a setting that matters was changed, or that the run has passed a
    limit; `CheckpointError` that there is no checkpoint that can be used.
    """
    path = Path(settings.run_dir if settings.resume == "true" else settings.resume)
    saved = checkpoint_store(settings, path).load_newest() if path.is_dir() else load(path)
    before = saved["extra"]["settings"]
    if changed := resolve(settings, before).changed_since(before):
        listed = ", ".join(
            f"{key} was {then!r}, now {now!r}" for key, (then, now) in changed.items()
        )
        raise SettingsError(f"a resumed run must keep its settings: {listed}")
    _check_limits(limits_of(settings), saved, read_json(Path(settings.run_dir) / SUMMARY) or {})
    return saved


def limits_of(settings: Settings) -> Limits:
    """Return what ends the run."""
    return Limits(
        versions=settings.num_server_rounds or None,
        time=settings.virtual_days * DAY or None if settings.clock == "virtual" else None,
        seconds=settings.time_limit or None,
    )


def _check_limits(limits: Limits, saved: dict[str, Any], summary: dict[str, Any]) -> None:
    """Refuse a resume that would end before the run's own end, and take away what it has."""
    completed = summary.get("status") == "completed"
    for key, limit, unit, then, end in (
        ("num-server-rounds", limits.versions, 1, saved["version"], summary.get("versions")),
        ("virtual-days", limits.time, DAY, saved["time"], summary.get("time")),
    ):
        done = end if completed and isinstance(end, int | float) else then
        # A run that was killed may have its last version and still have to write its results.
        if limit is not None and (limit < done or (completed and limit == done)):
            raise SettingsError(
                f"{key} = {limit / unit:g}: the run is at {done / unit:g} already; set {key} above "
                "that to resume, or leave the run as it is"
            )
