"""Where runs of experiments live: a folder of folders, one for each cell."""

from __future__ import annotations

import contextlib
import json
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpsa_strategy.files import make_private_folder, try_lock, write_atomically
from fedpsa_strategy.server.checkpoint import CheckpointError, CheckpointStore
from server_app.places import SUMMARY, read_json
from server_app.run_dir import LOCK
from server_app.settings import Settings
from simulation.environment import ConfigValue
from simulation.experiments.cells import Cell, decisive_keys, first_defaults

Summary = dict[str, Any]


class CellStore:
    """The runs of all experiments, by the ids of their cells; usually in ``runs/cells``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def path(self, cell: Cell) -> Path:
        """Return the folder of a cell's run."""
        return self.folder / cell.id

    def summary(self, cell: Cell) -> Summary | None:
        """Return the summary of a cell's run, however it ended."""
        return read_json(self.path(cell) / SUMMARY)

    def finished(self, cell: Cell) -> Summary | None:
        """Return the summary of a cell that need not be run again."""
        summary = self.summary(cell)
        if summary is None or summary.get("status") != "completed":
            return None
        return summary if _is_of(cell, summary.get("settings", {})) else None

    def circumstances(self, cell: Cell) -> dict[str, Any]:
        """Return what was noted about how a cell was run."""
        return read_json(self.path(cell) / "cell.json") or {}

    def goes_on(self, cell: Cell) -> bool:
        """Tell whether the next launch of a cell goes on with what is in its folder."""
        path = self.path(cell)
        return (
            (path / "events.jsonl").is_file()
            and not _changed(cell, path / "config.toml")
            and _has_checkpoint(path)
        )

    def prepare(self, cell: Cell, circumstances: Mapping[str, Any]) -> bool:
        """Make a cell's folder ready for a launch; return whether its run goes on.

        What cannot go on is removed: the folder of a run that never came to a checkpoint, whose
        checkpoints are damaged, or that was set up by another version of this program.
        """
        path = self.path(cell)
        goes_on = self.goes_on(cell)
        if not goes_on:
            shutil.rmtree(path, ignore_errors=True)
        make_private_folder(path)
        # Else a process that dies at once would seem to have ended like the one before it.
        (path / SUMMARY).unlink(missing_ok=True)
        note = {"labels": dict(cell.labels), **circumstances}
        write_atomically(path / "cell.json", json.dumps(note, indent=2, ensure_ascii=False) + "\n")
        return goes_on

    def tidy(self, cell: Cell) -> None:
        """Remove what only an unfinished run needs."""
        shutil.rmtree(self.path(cell) / "checkpoints", ignore_errors=True)

    @contextlib.contextmanager
    def reserved(self, cell: Cell) -> Iterator[bool]:
        """Reserve a cell, so that two commands do not run it at a time; False: it is taken."""
        locks = self.folder / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = try_lock(locks / cell.id)
            if lock is not None:
                stack.enter_context(lock)
            # A run may outlive the command that started it, by the time that it takes to save.
            yield lock is not None and not self.in_use(cell)

    def in_use(self, cell: Cell) -> bool:
        """Tell whether a process works in a cell's folder."""
        path = self.path(cell) / LOCK
        if not path.exists():
            return False
        lock = try_lock(path)
        if lock is not None:
            lock.close()
        return lock is None

    def rates(self, cells: Sequence[Cell]) -> dict[str, list[float]]:
        """Return the uploads per second of the finished ones of these cells, by dataset."""
        found: dict[str, list[float]] = defaultdict(list)
        for cell in {cell.id: cell for cell in cells}.values():
            rate = (self.finished(cell) or {}).get("uploads_per_second")
            if rate:
                found[cell.settings.data_name].append(rate)
        return dict(found)


def _is_of(cell: Cell, recorded: Mapping[str, ConfigValue]) -> bool:
    """Whether a run with these settings is the cell's; an id does not notice changed defaults."""
    different = cell.settings.differences({**first_defaults(), **recorded})
    return decisive_keys(cell.settings).isdisjoint(different)


def _changed(cell: Cell, path: Path) -> bool:
    """Whether the run in a folder would refuse to go on with the cell's settings."""
    try:
        before = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return True
    now = Settings.from_run_config(cell.run_config)
    return bool(now.resolved(before).changed_since(before))


def _has_checkpoint(path: Path) -> bool:
    try:
        CheckpointStore(path / "checkpoints").load_newest()
    except CheckpointError:
        return False
    return True
