"""Runs cells side by side, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from simulation.engines.flower.processes import Child, ProcessGroup
from simulation.environment import TOKEN_VARIABLE, ConfigValue, new_token
from simulation.experiments.cells import Cell
from simulation.experiments.estimate import expected_seconds, measured_seconds
from simulation.experiments.machine import cpu_model, num_cores
from simulation.experiments.store import CellStore, Summary
from simulation.experiments.watch import Watch

_REPOSITORY = Path(__file__).resolve().parents[2]
_PAUSE = 0.25
# A run that is told to end writes a checkpoint first, which may be large.
_GRACE = 30.0


@dataclass
class Running:
    """A cell whose run is going on."""

    cell: Cell
    child: Child
    watch: Watch
    resumed: bool
    expected: float  # seconds
    reservation: contextlib.ExitStack


@dataclass
class State:
    """Where a command stands: what a display shows."""

    total: int
    done: int
    failed: dict[str, str] = field(default_factory=dict)  # reasons by cell id
    running: list[Running] = field(default_factory=list)
    waiting: list[Cell] = field(default_factory=list)
    seconds_left: float | None = None


class Display(Protocol):
    """What a person sees while cells run."""

    def started(self, running: Running) -> None:
        """Take note that a run has begun."""

    def finished(self, cell: Cell, summary: Summary, state: State) -> None:
        """Take note that a run is complete."""

    def failed(self, cell: Cell, reason: str) -> None:
        """Take note that a run did not complete."""

    def update(self, state: State) -> None:
        """Show where things stand."""


class Scheduler:
    """Runs what is not finished yet, a number of cells at a time.

    Parameters
    ----------
    cells : Sequence[Cell]
        The cells; those with the same id are one run.
    store : CellStore
        Where they live.
    jobs : int
        How many run at a time.
    engine : str
        "local" or "ray".
    display : Display
        Told about everything.
    """

    def __init__(
        self, cells: Sequence[Cell], store: CellStore, *, jobs: int, engine: str, display: Display
    ) -> None:
        self.store = store
        self.jobs = jobs
        self.engine = engine
        self.display = display
        unique = {cell.id: cell for cell in reversed(cells)}
        ordered = [unique[key] for key in dict.fromkeys(cell.id for cell in cells)]
        waiting = [cell for cell in ordered if store.finished(cell) is None]
        self.state = State(len(ordered), len(ordered) - len(waiting), waiting=waiting)
        self._rates = measured_seconds(store.rates(ordered))
        self._actual = self._expected = 0.0  # seconds of what has been run here

    def run(self) -> dict[str, str]:
        """Run all cells; return why some failed, by their ids.

        After Ctrl-C or SIGTERM the runs are ended with a checkpoint each, and the exception goes
        on.
        """
        if not self.state.waiting:
            return {}
        environment = {
            **os.environ,
            TOKEN_VARIABLE: new_token(),
            "PYTHONPATH": os.pathsep.join(
                [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        with (
            contextlib.ExitStack() as reservations,
            ProcessGroup(self.store.folder, environment=environment, grace=_GRACE) as group,
        ):
            self._reservations = reservations
            try:
                while self.state.waiting or self.state.running:
                    self._start_some(group)
                    time.sleep(_PAUSE)
                    self._collect(group)
                    self._estimate()
                    self.display.update(self.state)
            except (KeyboardInterrupt, SystemExit):
                self._end_all()
                raise
        return self.state.failed

    def _start_some(self, group: ProcessGroup) -> None:
        for cell in list(self.state.waiting):
            if len(self.state.running) >= self.jobs:
                return
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(self.store.reserved(cell)):
                    continue  # another command runs it: it may be finished at the next look
                self.state.waiting.remove(cell)
                if (summary := self.store.finished(cell)) is not None:
                    self.state.done += 1
                    self.display.finished(cell, summary, self.state)
                    continue
                running = self._start(group, cell)
                running.reservation = self._reservations.enter_context(stack.pop_all())
            self.state.running.append(running)
            self.display.started(running)

    def _start(self, group: ProcessGroup, cell: Cell) -> Running:
        circumstances = {
            "cpu": cpu_model(),
            "cores": num_cores(),
            "engine": self.engine,
            "side_by_side": self.jobs,
        }
        resumed = self.store.prepare(cell, circumstances)
        path = self.store.path(cell)
        child = group.start(
            f"{cell.id}/process", launch_command(cell, path, self.engine, self.jobs, resumed)
        )
        watch = Watch(path / "events.jsonl", cell.settings.virtual_days)
        expected = expected_seconds(cell, self._rates)
        return Running(cell, child, watch, resumed, expected, contextlib.ExitStack())

    def _collect(self, group: ProcessGroup) -> None:
        for running in list(self.state.running):
            ended = not running.child.running
            running.watch.look()
            if not ended:
                continue
            cell = running.cell
            self.state.running.remove(running)
            group.children.remove(running.child)
            summary = self.store.finished(cell)
            if summary is not None:
                if not running.resumed:
                    self._actual += running.watch.seconds
                    self._expected += running.expected
                self.store.tidy(cell)
                self.state.done += 1
                self.display.finished(cell, summary, self.state)
            else:
                reason = self._reason(running)
                self.state.failed[cell.id] = reason
                self.display.failed(cell, reason)
            running.reservation.close()

    def _reason(self, running: Running) -> str:
        summary = self.store.summary(running.cell) or {}
        if error := summary.get("error"):
            return str(error)
        last = running.child.tail(1).removeprefix("Error: ")
        return last or f"its process ended with exit code {running.child.wait()}"

    def _estimate(self) -> None:
        """Scale what was expected by how it went so far."""
        actual, expected = self._actual, self._expected
        for running in self.state.running:
            if not running.resumed and running.watch.share > 0.01:
                actual += running.watch.seconds
                expected += running.expected * running.watch.share
        factor = actual / expected if expected else 1.0
        left = [factor * expected_seconds(cell, self._rates) for cell in self.state.waiting]
        for running in self.state.running:
            own = running.watch.seconds_left
            rest = factor * running.expected * (1 - running.watch.share)
            left.append(rest if own is None else own)
        # Not shorter than the longest, however many could run beside it.
        self.state.seconds_left = max(sum(left) / self.jobs, *left) if left else 0.0

    def _end_all(self) -> None:
        """Ask all runs to end and wait for their checkpoints; the group ends what remains."""
        for running in self.state.running:
            # Ray's launcher ends its many processes in good order after Ctrl-C alone.
            number = signal.SIGTERM if self.engine == "local" else signal.SIGINT
            running.child.process.send_signal(number)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(r.child.running for r in self.state.running):
            time.sleep(0.05)


def launch_command(cell: Cell, path: Path, engine: str, jobs: int, resumed: bool) -> list[str]:
    """Return the command that runs a cell; a person may give it too."""
    config: dict[str, ConfigValue] = {"num-clients": cell.settings.num_clients, **cell.run_config}
    if resumed:
        config["resume"] = "true"
    options = ["--workers", "0"] if engine == "local" else ["--cpus", str(_share_of_cores(jobs))]
    command = [sys.executable, "-m", "simulation", "run", "--engine", engine, "--quiet"]
    return [*command, *options, "--run-dir", str(path), *set_options(config)]


def set_options(config: Mapping[str, ConfigValue]) -> list[str]:
    """Return a run config as options of the command line."""
    options = []
    for key, value in config.items():
        options += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    return options


def _share_of_cores(jobs: int) -> int:
    return max(1, num_cores() // jobs)
