"""How values are read from the command line."""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Callable, Sequence

from simulation.environment import ConfigValue

_OWN, _METHOD_SETTINGS = "method.", "method-settings"


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a function that reads a whole number in this range."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError("must be a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be at least {least} and at most {most:,}")
        return number

    return read


def share_of_gpus(text: str) -> float:
    """Read a number of GPUs, which may be a fraction."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number") from None
    if not 0 <= number <= 1024:
        raise argparse.ArgumentTypeError("must be at least 0 and at most 1024")
    return number


def setting(text: str) -> tuple[str, str]:
    """Read KEY=VALUE; the value stays text, see `parse_value`."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key.strip(), value.strip()


def folded(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return settings with those of somebody's own method, ``method.KEY``, in one of them.

    Flower takes only keys that an app declares; `method-settings` is declared for the others.
    """
    own = [f"{key.removeprefix(_OWN)}={value}" for key, value in pairs if key.startswith(_OWN)]
    rest = [(key, value) for key, value in pairs if not key.startswith(_OWN)]
    if not own:
        return rest
    given = [value for key, value in rest if key == _METHOD_SETTINGS]
    rest = [(key, value) for key, value in rest if key != _METHOD_SETTINGS]
    return [*rest, (_METHOD_SETTINGS, " ".join([*given, *own]))]


def parse_value(text: str, default: ConfigValue | None = None) -> ConfigValue:
    """Read a value from the command line.

    Parameters
    ----------
    text : str
        A TOML value, or else a string that needs no quotes.
    default : bool | int | float | str | None (default: None)
        The value it replaces: ``1`` becomes a float where a float was, and a string where a
        string was.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):  # not TOML, or thousands of digits or brackets
        return text
    if not isinstance(value, bool | int | float | str):
        return text
    if isinstance(default, str) and not isinstance(value, str):
        return text
    if isinstance(default, float) and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value
