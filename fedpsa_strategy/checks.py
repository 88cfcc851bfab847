"""Checks of arguments, and the words in which all of them are refused."""

from __future__ import annotations

import math

_LONGEST_VALUE = 200


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
    if not in_range(value, least=least, above=above, most=most):
        raise ValueError(out_of_range(name, value, range_text(least=least, above=above, most=most)))


def in_range(
    value: float, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> bool:
    """Whether a value is finite and within its bounds."""
    # An int may be too large for a float; comparing it with one works all the same.
    return least <= value <= most and value > above and -math.inf < value < math.inf


def range_text(
    *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> str:
    """Return a range in words, such as "above 0 and at most 1"; empty if all numbers are in it."""
    bounds = [
        f"at least {number_text(least)}" if least > -math.inf else "",
        f"above {number_text(above)}" if above > -math.inf else "",
        f"at most {number_text(most)}" if most < math.inf else "",
    ]
    return " and ".join(bound for bound in bounds if bound)


def number_text(number: float) -> str:
    """Return a bound as a person would write it: 0.5, 1,000,000, 9.22337e+18."""
    return f"{number:,.0f}" if abs(number) < 1e12 and number == int(number) else f"{number:g}"


def out_of_range(name: str, value: float, allowed: str) -> str:
    """Return the sentence about a number that is not what is `allowed`."""
    if isinstance(value, float) and not math.isfinite(value):
        allowed = f"a finite number {allowed}".rstrip()
    return f"{name} = {shown(value)}: must be {allowed}"


def shown(value: object) -> str:
    """Return a value as a person wrote it, shortened if it is long, in printable characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers of thousands of digits
        return "a number of thousands of digits"
    if len(text) > _LONGEST_VALUE:
        return f"{text[:40]}... ({len(text)} characters)"
    return text
