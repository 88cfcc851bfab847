"""Checks of arguments, and the words in which all of them are refused."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any

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


# --- Settings that are declared as fields of a dataclass ---------------------------------------

# Numbers beyond these are slips; they would end in an overflow somewhere.
_LARGEST = {int: 2**31 - 1, float: 1e9}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def setting(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    form: tuple[str, str] | None = None,
    zero: str = "",
    former: Any = None,
) -> Any:
    """Declare a setting as a field of a dataclass; its type is that of the default.

    Parameters
    ----------
    default : bool | int | float | str
        Its default.
    meaning : str
        One line of help.
    choices : tuple[str, ...] (default: None)
        All that a text may be.
    least, above, most : float (default: None)
        Bounds of a number.
    form : tuple[str, str] (default: None)
        A regular expression for a text, and what it says in words.
    zero : str (default: "")
        What 0 stands for, where it is outside the range.
    former : bool | int | float | str (default: None)
        What a run did that is older than the setting, where that is not its default.
    """
    limits = {"choices": choices, "least": least, "above": above, "most": most}
    metadata = {"meaning": meaning, "form": form, "zero": zero, "former": former, **limits}
    return field(default=default, metadata=metadata)


def key_of(name: str) -> str:
    """Return the run-config key of a field."""
    return name.replace("_", "-")


def describe_range(metadata: Mapping[str, Any]) -> str:
    """Return what a setting allows, in words."""
    if metadata["choices"]:
        return "one of " + ", ".join(repr(choice) for choice in metadata["choices"])
    if metadata["form"]:
        return str(metadata["form"][1])
    allowed = range_text(**_bounds(metadata)) or "any"
    return f"{allowed}, or 0 for {metadata['zero']}" if metadata["zero"] else allowed


def checked_setting(key: str, value: Any, item: Field[Any]) -> Any:
    """Return a value as the type of the setting.

    One that is not allowed raises a ValueError with `key`, the value and what would be right.
    """
    kind: Any = type(item.default)
    metadata = item.metadata
    allowed = describe_range(metadata)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    if type(value) is not kind:
        word = _KINDS[kind] if allowed == "any" else f"{_KINDS[kind]}, {allowed}"
        raise ValueError(f"{key} = {shown(value)}: must be {word}")
    if metadata["choices"] is not None and value not in metadata["choices"]:
        close = difflib.get_close_matches(value, metadata["choices"], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{key} = {shown(value)}: must be {allowed}{hint}")
    if kind is str:
        form = metadata["form"]
        if form is not None and not re.fullmatch(form[0], value):
            raise ValueError(f"{key} = {shown(value)}: must be {allowed}")
        if not value.isprintable():
            raise ValueError(f"{key} = {shown(value)}: must be printable text")
    if kind in _LARGEST and not (metadata["zero"] and value == 0):
        if not in_range(value, **_bounds(metadata)):
            raise ValueError(out_of_range(key, value, "" if allowed == "any" else allowed))
        if metadata["most"] is None and value > _LARGEST[kind]:
            raise ValueError(out_of_range(key, value, f"at most {number_text(_LARGEST[kind])}"))
    return value


def check_settings(settings: Any) -> None:
    """Check all fields of a dataclass that were declared with `setting`; raises ValueError."""
    for item in fields(settings):
        if "meaning" in item.metadata:
            value = checked_setting(item.name, getattr(settings, item.name), item)
            object.__setattr__(settings, item.name, value)


def _bounds(metadata: Mapping[str, Any]) -> dict[str, float]:
    limits = {name: metadata[name] for name in ("least", "above", "most")}
    return {name: value for name, value in limits.items() if value is not None}
