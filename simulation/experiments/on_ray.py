"""Cells as Ray tasks, on all machines of a cluster."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from simulation.engines.cluster.code import code_for_machines
from simulation.engines.cluster.joining import joined
from simulation.engines.cluster.machines import (
    Machine,
    Resources,
    check_machines,
    lacking,
    num_slots,
    room_text,
    useful_machines,
    warn_of_differences,
)
from simulation.engines.cluster.run import ASK_FIRST_NODE, user_modules
from simulation.engines.local.grid import CLIENT_APP
from simulation.engines.local.worker import Setup
from simulation.environment import APP
from simulation.experiments.cell_task import Outcome, run_cell, unpack
from simulation.experiments.cells import Cell
from simulation.experiments.scheduler import Work
from simulation.experiments.store import CellStore

_RETRIES = 5  # of a cell whose process or machine is lost
_GRACE = 30.0  # for the checkpoints of runs that are told to end
_LOOK_SECONDS = 2.0  # between two looks at the size of the cluster


@dataclass
class RayWork:
    """A cell's run as a Ray task."""

    task: Any
    folder: Path

    @property
    def running(self) -> bool:
        """Whether it has not ended yet, wherever it is."""
        return not ray.wait([self.task], timeout=0, fetch_local=False)[0]

    def collect(self) -> str:
        """Take the files from a machine that does not share the folder; return the error."""
        try:
            outcome: Outcome = ray.get(self.task)
        except ray.exceptions.RayError as error:
            return next(iter(str(error).strip().splitlines()), type(error).__name__)
        if outcome.files:
            unpack(outcome.files, self.folder)
        return outcome.error or "it left no result"


class RayCluster:
    """The machines of a cluster; use `ray_cluster` to get them.

    Each cell takes `each`; `jobs` of them, or as many as there is room for, are given to Ray at a
    time.
    """

    def __init__(self, store: CellStore, each: Resources, jobs: int | None, mark: str) -> None:
        self._store, self._each, self._jobs, self._mark = store, each, jobs, mark
        self._slots, self._looked = 0, 0.0
        # A process of its own for each cell, as on one machine.
        remote: Any = ray.remote
        self._run = remote(**each.options, max_retries=_RETRIES, max_calls=1)(run_cell)

    @property
    def room(self) -> int:
        """How many fit at a time; machines come and go."""
        if self._jobs is not None:
            return self._jobs
        if not self._slots or time.monotonic() - self._looked > _LOOK_SECONDS:
            # One waits for a machine if there is none.
            self._slots, self._looked = max(1, num_slots(self._each)), time.monotonic()
        return self._slots

    def start(self, cell: Cell) -> RayWork:
        """Give a cell to Ray."""
        workers = int(self._each.cpus) if self._each.cpus >= 2 else 0
        folder = str(self._store.folder)
        task = self._run.remote(with_places(cell), folder, self._mark, workers, self.room)
        return RayWork(task, self._store.path(cell))

    def end(self, works: Sequence[Work]) -> None:
        """Ask all runs to end, and wait for their checkpoints."""
        for work in works:
            if isinstance(work, RayWork):
                ray.cancel(work.task)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(work.running for work in works):
            time.sleep(0.1)


@contextmanager
def ray_cluster(
    store: CellStore,
    cells: Sequence[Cell],
    *,
    address: str | None,
    each: Resources,
    jobs: int | None,
) -> Iterator[RayCluster]:
    """Join a cluster, or start Ray here, and look whether its machines have what cells need.

    `LaunchFailed` says that the cluster cannot be joined, or what a machine lacks.
    """
    configs = [with_places(cell).settings.to_run_config() for cell in cells]
    by_data = {cell.settings.data_name: config for cell, config in zip(cells, configs, strict=True)}
    modules = dict.fromkeys(name for config in configs for name in user_modules(config))
    with (
        code_for_machines(APP, list(modules)) as code,
        joined(address, code, show_output=False) as joined_address,
        _mark(store.folder) as mark,
    ):
        found = useful_machines(each)
        how = f"Joined the Ray cluster at {joined_address}"
        if address is None:
            how = "No Ray cluster was named (--ray-address): started Ray on this machine alone"
        print(f"{how}: {room_text(found, each, 'cell')}.", flush=True)
        works = [(ASK_FIRST_NODE, Setup(CLIENT_APP, {}, config)) for config in by_data.values()]
        check_machines(found, ["simulation.experiments.cell_task"], works)
        warn_of_differences(found)
        _warn_of_own_folders(found, store.folder / mark)
        yield RayCluster(store, each, jobs, mark)


@contextmanager
def _mark(folder: Path) -> Iterator[str]:
    """Leave a file in the folder of cells, by which other machines know that they share it."""
    path = folder / f".shared-{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield path.name
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _warn_of_own_folders(found: Sequence[Machine], mark: Path) -> None:
    """Say what does not work where the folder of cells is not shared."""
    if names := lacking(found, str(mark)):
        print(
            f"Warning: {mark.parent} is not shared with {', '.join(names)}: what runs there shows"
            " no progress until it ends, and begins anew when it is interrupted.",
            file=sys.stderr,
            flush=True,
        )


def with_places(cell: Cell) -> Cell:
    """Return a cell with absolute paths: other machines work in other folders."""
    settings = cell.settings
    data_dir, cache_dir = (
        str(Path(place).absolute()) if place else ""
        for place in (settings.data_dir, settings.cache_dir)
    )
    return replace(cell, settings=replace(settings, data_dir=data_dir, cache_dir=cache_dir))
