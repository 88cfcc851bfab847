"""How values are read from the command line."""

from __future__ import annotations

import argparse
import tomllib

from simulation.environment import ConfigValue


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def at_least_zero(text: str) -> int:
    """Read a whole number that is not negative."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return number


def setting(text: str) -> tuple[str, str]:
    """Read KEY=VALUE; the value stays text, see `parse_value`."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key.strip(), value.strip()


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
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    if not isinstance(value, bool | int | float | str):
        return text
    if isinstance(default, str) and not isinstance(value, str):
        return text
    if isinstance(default, float) and type(value) is int:
        return float(value)
    return value
