"""The settings of a method that is not of this library, in one run-config key.

Flower refuses keys that an app does not declare, so `method-settings` carries all of them:
``trim=0.1 buffer-size=10``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from fedpsa_strategy.checks import checked_setting, shown
from server_app.setting_names import hint_for

_PAIR = re.compile(r"""\s*([\w-]+)\s*=\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^\s'"=#]+)(?=\s|$)""")
_WORD = re.compile(r"(?!(?:true|false|inf|nan)$)[^\W\d][\w.:/-]*")


class SettingsError(ValueError):
    """A setting that cannot be used; the text names it, its value and what is allowed."""


def checked(key: str, value: Any, item: Field[Any]) -> Any:
    """Return a value as the type of the setting; `SettingsError` if it is not allowed."""
    try:
        return checked_setting(key, value, item)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def method_values(strategy: str, text: str, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Return the values in a text by their fields' names, checked.

    The text is the value of `method-settings`; the method is called as a person named it, and the
    fields of its settings are by their keys.
    """
    values = {}
    for key, value in parsed(text).items():
        if key not in known:
            hint = hint_for(key, known, f"it has {', '.join(known)}")
            raise SettingsError(
                f"method-settings: strategy {strategy!r} has no setting {key!r}; {hint}"
            )
        values[known[key].name] = checked(key, value, known[key])
    return values


def as_text(values: Mapping[str, Any]) -> str:
    """Return settings of a method in the form that `parsed` reads."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def parsed(text: str) -> dict[str, Any]:
    """Return the keys and values in ``key=value key=value ...``.

    Values are as in TOML; a word needs no quotes, as with `--set`.
    """
    text = text.strip()
    lines, end = [], 0
    while match := _PAIR.match(text, end):
        key, value = match.groups()
        lines.append(f"{key} = {json.dumps(value) if _WORD.fullmatch(value) else value}")
        end = match.end()
    try:
        if end < len(text):
            raise ValueError(f"at {text[end:].strip()[:40]!r}")
        return tomllib.loads("\n".join(lines))
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"method-settings = {shown(text)}: must be key=value pairs with values as in TOML, "
            f"such as 'trim=0.1 buffer-size=10' ({error})"
        ) from None
