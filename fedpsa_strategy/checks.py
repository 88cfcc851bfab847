"""Checks of arguments."""

from __future__ import annotations

import math


def check_range(
    name: str,
    value: float | None,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Refuse a value outside its range (None is always allowed)."""
    if value is None:
        return
    if not (value >= least and value > above and value <= most) or value == math.inf:
        bounds = [
            f">= {least:g}" if least > -math.inf else "",
            f"> {above:g}" if above > -math.inf else "",
            f"<= {most:g}" if most < math.inf else "",
        ]
        allowed = " and ".join(bound for bound in bounds if bound)
        raise ValueError(f"{name} is {value}, but must be a finite number {allowed}")
