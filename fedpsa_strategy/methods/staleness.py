"""Staleness factors s(τ): how much an update from τ versions ago still counts."""

from __future__ import annotations

from fedpsa_strategy.checks import check_range

KINDS = ("polynomial", "constant", "hinge")


def check_staleness(kind: str, exponent: float, slope: float, threshold: float) -> None:
    """Refuse impossible parameters, by name."""
    if kind not in KINDS:
        raise ValueError(f"staleness is {kind!r}, must be one of {KINDS}")
    check_range("staleness_exponent", exponent, least=0)
    check_range("hinge_slope", slope, least=0)
    check_range("hinge_threshold", threshold, least=0)


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
