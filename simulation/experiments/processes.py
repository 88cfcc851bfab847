"""Cells in processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simulation.engines.flower.processes import Child, ProcessGroup
from simulation.environment import TOKEN_VARIABLE, ConfigValue, new_token, python_path
from simulation.experiments.cells import Cell
from simulation.experiments.scheduler import Work
from simulation.experiments.store import CellStore
from simulation.machine import circumstances, num_cores

# A run that is told to end writes a checkpoint first, which may be large.
_GRACE = 30.0


@dataclass
class ProcessWork:
    """A cell's run in a process of its own."""

    group: ProcessGroup
    child: Child

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.child.running

    def collect(self) -> str:
        """Return the last line that the process printed."""
        self.group.children.remove(self.child)
        last = self.child.tail(1).removeprefix("Error: ")
        return last or f"its process ended with exit code {self.child.wait()}"


class Processes:
    """Cells on this machine, `jobs` at a time; use `processes` to get it."""

    def __init__(self, store: CellStore, jobs: int, engine: str, group: ProcessGroup) -> None:
        self._store, self._engine, self._group = store, engine, group
        self.room = jobs

    def start(self, cell: Cell) -> ProcessWork:
        """Start the process of a cell's run."""
        resumed = self._store.prepare(cell, circumstances(self._engine, self.room))
        command = launch_command(cell, self._store.path(cell), self._engine, self.room, resumed)
        return ProcessWork(self._group, self._group.start(f"{cell.id}/process", command))

    def end(self, works: Sequence[Work]) -> None:
        """Ask all runs to end and wait for their checkpoints; the group ends what remains."""
        # Ray's launcher ends its many processes cleanly after Ctrl-C alone.
        number = signal.SIGTERM if self._engine == "local" else signal.SIGINT
        for child in self._group.children:
            child.process.send_signal(number)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(work.running for work in works):
            time.sleep(0.05)


@contextmanager
def processes(store: CellStore, *, jobs: int, engine: str) -> Iterator[Processes]:
    """Give this machine to run cells on, and end all their processes afterwards."""
    environment = {**os.environ, TOKEN_VARIABLE: new_token(), "PYTHONPATH": python_path()}
    with ProcessGroup(store.folder, environment=environment, grace=_GRACE) as group:
        yield Processes(store, jobs, engine, group)


def launch_command(cell: Cell, path: Path, engine: str, jobs: int, resumed: bool) -> list[str]:
    """Return the command that runs a cell; a person may give it too."""
    options = ["--workers", "0"]
    if engine == "ray":
        options = ["--ray-address", "local", "--cpus", str(_share_of_cores(jobs))]
    command = [sys.executable, "-m", "simulation", "run", "--engine", engine, "--quiet"]
    return [
        *command,
        *options,
        "--run-dir",
        str(path),
        *set_options(cell.launch_config(resumed=resumed)),
    ]


def set_options(config: Mapping[str, ConfigValue]) -> list[str]:
    """Return a run config as options of the command line."""
    options = []
    for key, value in config.items():
        options += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    return options


def _share_of_cores(jobs: int) -> int:
    return max(1, num_cores() // jobs)
