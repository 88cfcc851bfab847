"""Staleness factors s(τ): how much an update from τ versions ago still counts."""

from __future__ import annotations

import math

KINDS = ("polynomial", "constant", "hinge")


def check_staleness(kind: str, exponent: float, slope: float, threshold: float) -> None:
    """Refuse impossible parameters, by name."""
    if kind not in KINDS:
        raise ValueError(f"staleness is {kind!r}, must be one of {KINDS}")
    for name, value in (
        ("staleness_exponent", exponent),
        ("hinge_slope", slope),
        ("hinge_threshold", threshold),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, not {value}")


def staleness_factor(
    staleness: int, kind: str, exponent: float, slope: float, threshold: float
) -> float:
    """Return s(τ).

    polynomial: (1 + τ)^-exponent; constant: 1; hinge: 1 up to the threshold b, then
    1 / (slope · (τ - b) + 1).
    """
    if kind == "constant":
        return 1.0
    if kind == "polynomial":
        return float((1 + staleness) ** -exponent)
    return 1.0 if staleness <= threshold else 1 / (slope * (staleness - threshold) + 1)
