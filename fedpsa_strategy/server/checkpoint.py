"""Checkpoints: all of a run's state in one file, whole or not at all.

A file is a line of text, `fedpsa-checkpoint <format> <sha256 of the rest>`, followed by a NumPy
archive with the arrays and, as JSON, everything else. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import FedPSAError
from fedpsa_strategy.files import (
    PRIVATE,
    make_private_folder,
    remove_leftovers,
    write_atomically,
)
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Task
from fedpsa_strategy.server.snapshot import restore_snapshot, take_snapshot

log = logging.getLogger("flwr")

FORMAT = 3
_MAGIC = b"fedpsa-checkpoint"
_ARRAY = "__array__"
_TREE = "tree"


class CheckpointError(FedPSAError):
    """A checkpoint that cannot be used; the text says which and why."""


class CheckpointStore:
    """The checkpoints of a run: `checkpoint-<number>.ckpt` in a folder.

    Parameters
    ----------
    folder : Path
        Where they are; made when the first one is written.
    keep : int (default: 2)
        How many of the newest are kept.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        check_range("keep", keep, least=1)
        self.folder = Path(folder)
        self.keep = keep

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        return sorted(self.folder.glob("checkpoint-*.ckpt"))

    def save(self, number: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint and remove the oldest ones.

        Parameters
        ----------
        number : int
            Orders the checkpoints; grows during a run.
        state : Mapping[str, Any]
            Numbers, texts, None, arrays, and lists and dicts of them.
        """
        make_private_folder(self.folder)
        remove_leftovers(self.folder, "checkpoint-*.ckpt")  # of a process that was killed
        path = self.folder / f"checkpoint-{number:012d}.ckpt"
        data = pack(state)
        head = f"{_MAGIC.decode()} {FORMAT} {hashlib.sha256(data).hexdigest()}\n".encode()
        write_atomically(path, head, data, mode=PRIVATE)
        # Higher numbers are of a future that did not happen: the run went on from before it.
        for future in [other for other in self.paths() if other > path]:
            future.unlink(missing_ok=True)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def load_newest(self) -> dict[str, Any]:
        """Return the newest checkpoint that is whole; a damaged one falls back to the one before.

        Raises
        ------
        CheckpointError
            When there is none, or none that can be read.
        """
        problems = []
        for path in reversed(self.paths()):
            try:
                return load(path)
            except CheckpointError as error:
                log.warning("%s; trying the one before", error)
                problems.append(str(error))
        found = "; ".join(problems) or "there is none"
        raise CheckpointError(f"no usable checkpoint in {self.folder}: {found}")


class Checkpointer(Callback):
    """Saves a run when that is due, and when it ends before its time.

    Parameters
    ----------
    store : CheckpointStore (default: None)
        Where to; None saves nothing.
    every_versions : int (default: 0)
        Versions between two checkpoints; 0: not by versions.
    every_seconds : float (default: 0.0)
        Real seconds between two checkpoints; 0: not by time.
    extra : Callable[[], Mapping[str, Any]] (default: None)
        More to put into each checkpoint, under the key `extra`.
    resume_from : dict[str, Any] (default: None)
        A saved state to go on from; the run has to be set up as the saved one was.
    monotonic : Callable[[], float] (default: time.monotonic)
        Real time.
    """

    def __init__(
        self,
        store: CheckpointStore | None = None,
        every_versions: int = 0,
        every_seconds: float = 0.0,
        extra: Callable[[], Mapping[str, Any]] | None = None,
        resume_from: dict[str, Any] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        check_range("every_versions", every_versions, least=0)
        check_range("every_seconds", every_seconds, least=0)
        self.store = store
        self.every_versions = every_versions
        self.every_seconds = every_seconds
        self.extra = extra
        self.resume_from = resume_from
        self._monotonic = monotonic
        self._callbacks: Sequence[Callback] = ()
        self._last_version = 0
        self._last_time = 0.0

    def restore(self, callbacks: Sequence[Callback]) -> list[Task]:
        """Put the run and its callbacks where the saved ones were, if there are any.

        Parameters
        ----------
        callbacks : Sequence[Callback]
            All of the run's, whose state is saved from now on.

        Returns
        -------
        list[Task]
            The tasks that were in flight.
        """
        self._callbacks = callbacks
        if self.resume_from is None:
            return []
        return restore_snapshot(self.run, callbacks, self.resume_from)

    def started(self) -> None:
        """Count from here."""
        self._last_version = self.run.version
        self._last_time = self._monotonic()

    def stepped(self) -> None:
        """Save if it is time."""
        versions = self.run.version - self._last_version
        by_version = self.every_versions and versions >= self.every_versions
        by_time = self.every_seconds and self._monotonic() - self._last_time >= self.every_seconds
        if by_version or by_time:
            self._save()

    def interrupted(self) -> None:
        """Save where the run stands."""
        # In the middle of a step the state is neither before nor after it: the last one counts.
        if self.run.whole:
            self._save()

    def _save(self) -> None:
        """Save; a full disk or the like is logged and does not stop the run."""
        if self.store is None:
            return
        self.started()
        run = self.run
        state = take_snapshot(run, self._callbacks)
        try:
            self.store.save(run.sequence, {**state, "extra": self.extra() if self.extra else {}})
        except OSError as error:
            log.warning("the checkpoint of version %d could not be written: %s", run.version, error)


def load(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file; raises CheckpointError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None
    head, separator, data = content.partition(b"\n")
    words = head.split(b" ")
    if not separator or len(words) != 3 or words[0] != _MAGIC:
        raise CheckpointError(f"{path} is not a checkpoint of this project")
    if words[1] != str(FORMAT).encode():
        raise CheckpointError(
            f"checkpoint {path} has format {words[1].decode(errors='replace')}, this version "
            f"reads format {FORMAT}: resume with the version that wrote it, or start a new run"
        )
    if hashlib.sha256(data).hexdigest().encode() != words[2]:
        raise CheckpointError(f"checkpoint {path} is damaged: its checksum does not match")
    try:
        return unpack(data)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"checkpoint {path} cannot be decoded: {error}") from None


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a tree of plain values and arrays as bytes."""
    arrays: dict[str, Any] = {}
    places: dict[int, str] = {}  # each once: a model may stand in several places

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            place = places.setdefault(id(value), str(len(arrays)))
            arrays[place] = value
            return {_ARRAY: place}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    tree = json.dumps(plain(state)).encode()
    arrays[_TREE] = np.frombuffer(tree, np.uint8)
    output = io.BytesIO()
    np.savez(output, **arrays)
    return output.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Return what `pack` was given (tuples as lists)."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        read = cache(archive.__getitem__)

        def rich(value: Any) -> Any:
            if isinstance(value, dict):
                if value.keys() == {_ARRAY}:
                    return read(value[_ARRAY])
                return {key: rich(item) for key, item in value.items()}
            return [rich(item) for item in value] if isinstance(value, list) else value

        tree: dict[str, Any] = rich(json.loads(archive[_TREE].tobytes()))
    return tree
