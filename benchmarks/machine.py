"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from simulation.experiments.machine import cpu_model, num_cores

_PACKAGES = ("torch", "numpy", "flwr", "ray")
_STAT = Path("/proc/stat")
_STOLEN = 7  # which of the first line's numbers counts what a host took; later ones count twice


class ProcessorTime(NamedTuple):
    """The time of all processors since the machine started, in ticks of the system's clock.

    Attributes
    ----------
    stolen : int
        What they were ready to work in, but the host of a virtual machine gave to others.
    total : int
        All of it.
    """

    stolen: int
    total: int

    @classmethod
    def now(cls) -> ProcessorTime:
        """Return what the system says; nothing where it does not say."""
        if not _STAT.exists():
            return cls(0, 0)
        counts = [int(word) for word in _STAT.read_text().split("\n")[0].split()[1:]]
        return cls(counts[_STOLEN], sum(counts[: _STOLEN + 1]))

    def stolen_since(self, before: ProcessorTime) -> float:
        """Return the share that the host took between two moments."""
        return (self.stolen - before.stolen) / max(self.total - before.total, 1)


def describe() -> dict[str, Any]:
    """Return the machine, its load right now and the versions of what matters."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "processor_time": ProcessorTime.now(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def in_words(start: dict[str, Any], end: dict[str, Any]) -> str:
    """Return the machine line of a report."""
    stolen = end["processor_time"].stolen_since(start["processor_time"])
    packages = ", ".join(f"{name} {found}" for name, found in start["packages"].items() if found)
    return (
        f"{start['cpu']}, {start['cores']} cores, {start['memory_bytes'] / 2**30:.0f} GiB; "
        f"Python {start['python']}, {packages}; {start['time']} to {end['time']}; load average "
        f"(1 min) {start['load_average'][0]:g} before, {end['load_average'][0]:g} after; the host "
        f"gave {stolen:.1%} of the processors' time to others."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
