"""What a person sees while cells run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from fedpsa_strategy.watch.rate import rate_text, readable_rate
from simulation.experiments.cells import Cell
from simulation.experiments.estimate import in_words
from simulation.experiments.scheduler import Running, State
from simulation.experiments.store import Summary

_STATUS_SECONDS = 30.0


def percent(value: float | None) -> str:
    """Return an accuracy as text."""
    return "–" if value is None else f"{100 * value:.2f} %"


def duration(seconds: float | None) -> str:
    """Return a time that is left, if it is known."""
    return "?" if seconds is None else in_words(seconds)


class PlainDisplay:
    """Lines that can be kept: one for each start and end, and one now and then."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write or (lambda text: print(text, flush=True))
        self._monotonic = monotonic
        self._last = monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, running: Running) -> None:
        """Say that a run has begun."""
        how = "continued" if running.resumed else "started"
        self._write(f"{how}   {running.cell.name} [{running.cell.id}]")

    def finished(self, cell: Cell, summary: Summary, state: State) -> None:
        """Say that a run is complete."""
        accuracy = percent(summary.get("accuracy"))
        self._write(f"finished  {cell.name}: {accuracy} ({state.done} of {state.total})")

    def failed(self, cell: Cell, reason: str) -> None:
        """Say that a run failed, and why."""
        self._write(f"failed    {cell.name} [{cell.id}]: {reason}")

    def update(self, state: State) -> None:
        """Say now and then where things stand."""
        if self._monotonic() - self._last < _STATUS_SECONDS:
            return
        self._last = self._monotonic()
        failed = f", {len(state.failed)} failed" if state.failed else ""
        left = duration(state.seconds_left)
        self._write(f"{state.done} of {state.total} done{failed}, about {left} left")
        for running in state.running:
            watch = running.watch
            self._write(
                f"    {running.cell.name}: day {watch.day:.3f} of {watch.days:g},"
                f" {percent(watch.run.accuracy)}, {rate_text(watch.uploads_per_second)},"
                f" {duration(watch.seconds_left)} left"
            )


class LiveDisplay:
    """A table on the terminal that is drawn again twice a second; what ends scrolls by above it."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._started = time.monotonic()
        self._last = 0.0

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, running: Running) -> None:
        """Show it in the table from now on."""

    def finished(self, cell: Cell, summary: Summary, state: State) -> None:
        """Say that a run is complete."""
        accuracy = percent(summary.get("accuracy"))
        self._console.print(
            f"[green]✔[/] {cell.name}: [bold]{accuracy}[/] ({state.done} of {state.total})",
            highlight=False,
        )

    def failed(self, cell: Cell, reason: str) -> None:
        """Say that a run failed, and why."""
        from rich.markup import escape

        self._console.print(f"[red]✘[/] {cell.name} \\[{cell.id}]: {escape(reason)}")

    def update(self, state: State) -> None:
        """Draw the table."""
        if time.monotonic() - self._last < 0.5:
            return
        self._last = time.monotonic()
        self._live.update(self.render(state), refresh=True)

    def render(self, state: State) -> Any:
        """Return the table."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        for name in ("method", "dataset", "α", "seed", "", "day", "accuracy", "uploads", "left"):
            table.add_column(name, justify="left" if name in ("method", "dataset", "") else "right")
        for running in state.running:
            labels, watch = running.cell.labels, running.watch
            alpha = labels["alpha"]
            usual = ("method", "dataset", "alpha", "seed")
            table.add_row(
                str(labels["method"]),
                str(labels["dataset"]),
                alpha if isinstance(alpha, str) else f"{alpha:g}",
                str(labels["seed"]),
                " ".join(str(value) for key, value in labels.items() if key not in usual),
                f"{watch.day:.3f} / {watch.days:g}",
                percent(watch.run.accuracy),
                "{:.1f}/{}".format(*readable_rate(watch.uploads_per_second)),
                duration(watch.seconds_left),
            )
        parts = sum(running.watch.share for running in state.running)
        head = Table.grid(padding=(0, 2))
        failed = f", {len(state.failed)} failed" if state.failed else ""
        head.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=state.total, completed=state.done + parts, width=30),
            f"{state.done} of {state.total} cells{failed}",
            f"{in_words(time.monotonic() - self._started)} so far,"
            f" about {duration(state.seconds_left)} left",
        )
        return Group(head, table)


def make_display(title: str) -> PlainDisplay | LiveDisplay:
    """Return the display that fits where the output goes."""
    return LiveDisplay(title) if sys.stdout.isatty() else PlainDisplay()
