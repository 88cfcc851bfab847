"""Timing side by side, and memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Spread:
    """A measured quantity: its median and how far single measurements lie from it."""

    median: float
    lowest: float
    highest: float
    repeats: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of some values."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1], len(found))

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def show(self, scale: float = 1.0, digits: int = 3) -> str:
        """Return the median with the range behind it."""
        middle, low, high = (
            f"{value * scale:.{digits}g}" for value in (self.median, self.lowest, self.highest)
        )
        return f"{middle} ({low}-{high})"


def cpu_seconds_of(function: Callable[[], Any]) -> float:
    """Return how much processor time a call takes.

    For work in one thread that waits for nothing: what other processes get is not counted.
    """
    started = time.process_time()
    function()
    return time.process_time() - started


def interleave(
    cases: Mapping[str, Callable[[], float]], repeats: int, *, warm_up: int = 0
) -> dict[str, list[float]]:
    """Measure several cases in turn, so that what else the machine does hits all of them alike.

    Parameters
    ----------
    cases : Mapping[str, Callable[[], float]]
        Each returns its measurement.
    repeats : int
        How often every case is measured.
    warm_up : int (default: 0)
        How many measurements of each are thrown away first.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + repeats):
        for name, measure in cases.items():
            value = measure()
            if turn >= warm_up:
                found[name].append(value)
    return found


def interleave_calls(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the processor time of calls, measured in turn."""
    timed = {name: partial(cpu_seconds_of, call) for name, call in calls.items()}
    return interleave(timed, repeats, warm_up=warm_up)


def paired_ratio(numerator: Iterable[float], denominator: Iterable[float]) -> Spread:
    """Return the spread of the ratios of measurements that were taken one after the other."""
    return Spread.of(a / b for a, b in zip(numerator, denominator, strict=True))


def peak_memory(function: Callable[[], Any]) -> int:
    """Return by how many bytes this process grows at most while a function runs.

    Only under Linux, which keeps the peak and can be told to forget it.
    """
    gc.collect()
    _return_free_memory()
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = int(psutil.Process().memory_info().rss)
    function()
    return max(own_peak() - before, 0)


def own_peak() -> int:
    """Return the most bytes of memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _return_free_memory() -> None:
    """Give back what was freed, else a function would get it without the process growing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
