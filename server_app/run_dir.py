"""The folder of a run, and the only place that writes files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import ArrayRecord
from safetensors.numpy import save

from fedpsa_strategy.errors import FedPSAError
from fedpsa_strategy.files import (
    make_private_folder,
    remove_leftovers,
    try_lock,
    write_atomically,
)
from fedpsa_strategy.watch.event_log import plain
from server_app.places import EVENTS, SUMMARY, file_in_the_way, holds_run

LOCK = ".lock"
"""The file in a run's folder that is locked while a process works there."""

CONFIG, MODEL, CURVE = "config.toml", "model.safetensors", "curve.png"


class RunDirError(FedPSAError):
    """A folder that a run cannot use; the text says why."""


class RunDir:
    """A run's folder, which one process at a time works in.

    Every file in it is written whole or not at all. The lock ends with `close`, with the `with`
    block, or with the process, however that ends. A folder that does not exist is made, for its
    owner alone.

    Raises
    ------
    FileNotFoundError
        If there is no run to resume.
    FileExistsError
        If there is a run already, and it is not to be resumed.
    RunDirError
        If another process works in it, or it cannot be made.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        if (file := file_in_the_way(path)) is not None:
            raise RunDirError(f"run-dir {path} cannot be made: {file} is not a folder")
        if resume and not holds_run(path):
            raise FileNotFoundError(f"run-dir {path} holds no run that could be resumed")
        try:
            make_private_folder(path)
            self._lock = try_lock(path / LOCK)
        except OSError as error:
            raise RunDirError(f"run-dir {path} cannot be used: {error}") from error
        if self._lock is None:
            owner = (path / LOCK).read_text(errors="replace").strip() or "unknown"
            raise RunDirError(
                f"run-dir {path} is in use by another process (pid {owner}): wait for its end, or "
                "choose another folder"
            )
        if not resume and holds_run(path):
            self.close()
            raise FileExistsError(
                f"run-dir {path} already holds a run: choose another folder, or resume=true to go "
                "on from its newest checkpoint"
            )
        for name in (SUMMARY, CONFIG, MODEL, CURVE):
            remove_leftovers(path, name)

    @property
    def events_path(self) -> Path:
        """Where the events are."""
        return self.path / EVENTS

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        write_atomically(self.path / name, data)

    def write_config(self, run_config: Mapping[str, Any]) -> None:
        """Write all effective settings, in the form `flwr run --run-config` takes."""
        self.write(CONFIG, tomli_w.dumps(dict(run_config)).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as JSON."""
        self.write(SUMMARY, (json.dumps(plain(summary), indent=2) + "\n").encode())

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write the final model."""
        self.write(MODEL, save({k: array.numpy() for k, array in arrays.items()}))

    def close(self) -> None:
        """Let other processes work here."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def model_sha256(arrays: ArrayRecord) -> str:
    """Return the hash of a model: names, dtypes, shapes and bytes, in order of the names."""
    digest = hashlib.sha256()
    for key in sorted(arrays):
        values = arrays[key].numpy()
        digest.update(f"{key} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
