"""A cell's run as a task on some machine of a cluster."""

from __future__ import annotations

import io
import shutil
import signal
import tarfile
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from simulation.experiments.cells import Cell
from simulation.experiments.store import CellStore
from simulation.machine import circumstances

_LOCK_SECONDS = 180.0
"""How long the lock of a lost machine may last on a shared folder."""


@dataclass(frozen=True)
class Outcome:
    """What comes back from a cell's run: why it did not complete, or "".

    `files` is its folder as a tar archive, from a machine that does not share the folder of cells.
    """

    error: str = ""
    files: bytes = b""


def run_cell(cell: Cell, folder: str, mark: str, workers: int, side_by_side: int) -> Outcome:
    """Run a cell in its folder, or go on with it there; in a temporary one if it is not shared.

    Ray calls this again elsewhere when the machine is lost. `mark` is the name of a file in the
    folder of all cells, by which a machine knows that it shares this folder.
    """
    # Ray cancels a task by this signal, which is ignored in what a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (Path(folder) / mark).exists():
        return Outcome(_run(CellStore(Path(folder)), cell, workers, side_by_side))
    own = Path(tempfile.mkdtemp(prefix="fedpsa-cell-"))
    try:
        store = CellStore(own)
        error = _run(store, cell, workers, side_by_side)
        store.tidy(cell)
        return Outcome(error, pack(store.path(cell)))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _run(store: CellStore, cell: Cell, workers: int, side_by_side: int) -> str:
    """Run a cell in its folder; return why it did not complete."""
    from simulation.engines.local.run import run_locally
    from simulation.errors import RunFailed

    deadline = time.monotonic() + _LOCK_SECONDS
    while store.in_use(cell) and time.monotonic() < deadline:
        time.sleep(1.0)
    # What another machine was lost with after it had finished need not be done again.
    if store.finished(cell) is not None:
        return ""
    resumed = store.prepare(cell, circumstances("local", side_by_side))
    config = cell.launch_config(resumed=resumed) | {"run-dir": str(store.path(cell))}
    try:
        run_locally(config, workers=workers, stream=False)
    except RunFailed as failure:
        return failure.reason
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def pack(folder: Path) -> bytes:
    """Return a folder as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            archive.add(path, arcname=path.name)
    return buffer.getvalue()


def unpack(files: bytes, folder: Path) -> None:
    """Put what `pack` was given into a folder, in place of what is there.

    The folder is there at any time as a whole, the old one or the new one, or not at all.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(new, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
