"""How fast uploads come, in the unit in which a person can read it."""

from __future__ import annotations


def readable_rate(per_second: float | None) -> tuple[float, str]:
    """Return a rate (None is 0: nothing yet) and the unit of time it is for: "s", "min" or "h"."""
    rate = per_second or 0.0
    if rate == 0 or rate >= 0.1:
        return rate, "s"
    if rate * 60 >= 1:
        return rate * 60, "min"
    return rate * 3600, "h"


def rate_text(per_second: float | None) -> str:
    """Return a rate of uploads as text, such as "2.5 uploads/min"."""
    rate, unit = readable_rate(per_second)
    return f"{rate:.1f} uploads/{unit}"
