"""Simulated and real runs of the app: the command line, and `from simulation import simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.api import Run, compare, load, simulate

__all__ = ["Run", "compare", "load", "simulate"]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line must not wait for torch."""
    if name in __all__:
        from simulation import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
