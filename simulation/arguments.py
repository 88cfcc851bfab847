"""How values are read from the command line."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import click
from click.shell_completion import CompletionItem

from simulation.environment import ConfigValue

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_OWN, _METHOD_SETTINGS = "method.", "method-settings"


class Setting(click.ParamType):  # type: ignore[type-arg]
    """KEY=VALUE; the value stays text, see `parse_value`."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        """Return key and value."""
        if isinstance(value, tuple):
            return value
        key, separator, text = str(value).partition("=")
        if not separator or not key.strip():
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        return key.strip(), text.strip()

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Complete the keys, and the values of settings that have only a few."""
        from dataclasses import fields

        from fedpsa_strategy.checks import key_of
        from server_app.settings import Settings

        found = []
        for item in fields(Settings):
            key = f"{key_of(item.name)}="
            values = item.metadata["choices"] or ("",)
            found += [key + value for value in (values if incomplete.startswith(key) else ("",))]
        return [CompletionItem(text) for text in found if text.startswith(incomplete)]


class FiniteRange(click.FloatRange):
    """A number in a range; click itself lets NaN pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if number is not None and not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Processors(FiniteRange):
    """A part of a processor, or a whole number of them."""

    def __init__(self) -> None:
        super().__init__(0, 1024, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if number is not None and number > 1 and number != int(number):
            self.fail(f"{value!r} is neither a part of one nor a whole number", param, ctx)
        return number


def together(*options: Decorator) -> Decorator:
    """Return options as one decorator; help shows them in this order."""
    return lambda function: reduce(lambda found, add: add(found), reversed(options), function)


def ray_address_option(what: str) -> Decorator:
    """Return the option for the address of a Ray cluster."""
    return click.option(
        "--ray-address",
        metavar="ADDRESS",
        help=f"{what}: HOST:PORT, 'auto' for the one that this machine is part of, 'local' for none"
        " (default: RAY_ADDRESS, else none).",
    )


def folded(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return settings with those of a user's own method, ``method.KEY``, in one of them.

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
    """Read a value from the command line: a TOML value, or else a string that needs no quotes.

    It takes the type of the default that it replaces: ``1`` becomes a float where a float was, and
    a string where a string was.
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
