"""What a run ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_jobs(chosen: int | None, engine: str) -> int:
    """Return how many runs to run side by side: one on each core, and on Ray one at a time."""
    return chosen or (num_cores() if engine == "local" else 1)


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def circumstances(engine: str, side_by_side: int) -> dict[str, str | int]:
    """Return what is noted about how a cell was run: on which engine, and how many at a time."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "engine": engine,
        "side_by_side": side_by_side,
    }
