"""Runs cells side by side, wherever there is room for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simulation.experiments.cells import Cell
from simulation.experiments.estimate import expected_seconds, measured_seconds
from simulation.experiments.store import CellStore, Summary
from simulation.experiments.watch import Watch

_PAUSE = 0.25


class Work(Protocol):
    """A cell's run, on whatever machine."""

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""

    def collect(self) -> str:
        """Put what it left where it belongs; return its last word, in case that it failed."""


class Place(Protocol):
    """Where cells are run."""

    @property
    def room(self) -> int:
        """How many fit at a time."""

    def start(self, cell: Cell) -> Work:
        """Start a cell's run."""

    def end(self, works: Sequence[Work]) -> None:
        """Ask all runs to end, and wait for their checkpoints, but not for ever."""


@dataclass
class Running:
    """A cell whose run is going on."""

    cell: Cell
    work: Work
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
    """Runs what is not finished yet, as many cells at a time as there is room for.

    Cells with the same id are one run.
    """

    def __init__(self, cells: Sequence[Cell], store: CellStore) -> None:
        self.store = store
        unique = {cell.id: cell for cell in reversed(cells)}
        ordered = [unique[key] for key in dict.fromkeys(cell.id for cell in cells)]
        waiting = [cell for cell in ordered if store.finished(cell) is None]
        self.state = State(len(ordered), len(ordered) - len(waiting), waiting=waiting)
        self._rates = measured_seconds(store.rates(ordered))
        self._actual = self._expected = 0.0  # seconds of what has been run here

    def run(self, place: Place, display: Display) -> dict[str, str]:
        """Run all cells; return why some failed, by their ids.

        After Ctrl-C or SIGTERM the runs are ended with a checkpoint each, and the exception goes
        on.
        """
        with contextlib.ExitStack() as reservations:
            try:
                while self.state.waiting or self.state.running:
                    self._start_some(place, display, reservations)
                    time.sleep(_PAUSE)
                    self._collect(display)
                    self._estimate(place.room)
                    display.update(self.state)
            except (KeyboardInterrupt, SystemExit):
                place.end([running.work for running in self.state.running])
                raise
        return self.state.failed

    def _start_some(
        self, place: Place, display: Display, reservations: contextlib.ExitStack
    ) -> None:
        for cell in list(self.state.waiting):
            if len(self.state.running) >= place.room:
                return
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(self.store.reserved(cell)):
                    continue  # another command runs it: it may be finished at the next look
                self.state.waiting.remove(cell)
                if (summary := self.store.finished(cell)) is not None:
                    self.state.done += 1
                    display.finished(cell, summary, self.state)
                    continue
                running = self._start(place, cell)
                running.reservation = reservations.enter_context(stack.pop_all())
            self.state.running.append(running)
            display.started(running)

    def _start(self, place: Place, cell: Cell) -> Running:
        resumed = self.store.goes_on(cell)
        work = place.start(cell)
        watch = Watch(self.store.path(cell) / "events.jsonl", cell.settings.virtual_days)
        expected = expected_seconds(cell, self._rates)
        return Running(cell, work, watch, resumed, expected, contextlib.ExitStack())

    def _collect(self, display: Display) -> None:
        for running in list(self.state.running):
            ended = not running.work.running
            running.watch.look()
            if not ended:
                continue
            cell = running.cell
            self.state.running.remove(running)
            last_word = running.work.collect()
            summary = self.store.finished(cell)
            if summary is not None:
                if not running.resumed:
                    self._actual += running.watch.seconds
                    self._expected += running.expected
                self.store.tidy(cell)
                self.state.done += 1
                display.finished(cell, summary, self.state)
            else:
                reason = str((self.store.summary(cell) or {}).get("error") or last_word)
                self.state.failed[cell.id] = reason
                display.failed(cell, reason)
            running.reservation.close()

    def _estimate(self, room: int) -> None:
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
        self.state.seconds_left = max(sum(left) / room, *left) if left else 0.0
