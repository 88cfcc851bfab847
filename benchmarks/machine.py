"""What a benchmark ran on."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import psutil

from simulation.machine import cpu_model, num_cores

_PACKAGES = ("torch", "numpy", "flwr", "ray")


class ProcessorTime(NamedTuple):
    """The time of all processors since the machine started, in seconds.

    Attributes
    ----------
    stolen : float
        What they were ready to work in, but the host of a virtual machine gave to others.
    total : float
        All of it.
    """

    stolen: float
    total: float

    @classmethod
    def now(cls) -> ProcessorTime:
        """Return what the system says; only Linux knows what was stolen."""
        times = psutil.cpu_times()._asdict()
        guests = times.get("guest", 0.0) + times.get("guest_nice", 0.0)  # counted as users too
        return cls(times.get("steal", 0.0), sum(times.values()) - guests)

    def stolen_since(self, before: ProcessorTime) -> float:
        """Return the share that the host took between two moments."""
        passed = self.total - before.total
        return (self.stolen - before.stolen) / passed if passed > 0 else 0.0


def describe() -> dict[str, Any]:
    """Return the machine, its load right now and the versions of what matters."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": [round(value, 2) for value in psutil.getloadavg()],
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
