"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from simulation.experiments.machine import cpu_model, num_cores

_PACKAGES = ("torch", "numpy", "flwr", "ray")


def describe() -> dict[str, Any]:
    """Return the machine, its load right now and the versions of what matters."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def in_words(start: dict[str, Any], end: dict[str, Any]) -> str:
    """Return the machine line of a report."""
    packages = ", ".join(f"{name} {found}" for name, found in start["packages"].items() if found)
    return (
        f"{start['cpu']}, {start['cores']} cores, {start['memory_bytes'] / 2**30:.0f} GiB; "
        f"Python {start['python']}, {packages}; {start['time']} to {end['time']}; load average "
        f"(1 min) {start['load_average'][0]:g} before, {end['load_average'][0]:g} after."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
