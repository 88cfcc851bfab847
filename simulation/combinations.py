"""Lists of values on the command line: ``--set lr=0.01,0.1``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import Field, fields
from functools import cache
from typing import Any

from simulation.arguments import parse_value
from simulation.errors import Refused

Pair = tuple[str, str]
_MOST = 10_000


def is_sweep(pairs: Sequence[Pair]) -> bool:
    """Whether a command line asks for more than one run."""
    return any("," in value for _, value in pairs) and len(combinations(pairs)) > 1


def combinations(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs of every run, one after the other."""
    # What is said twice counts as it was said last.
    last = dict(pairs)
    strategy = last.get("strategy", "")
    lists = [values(key, text, strategy) for key, text in last.items()]
    count = 1
    for found in lists:
        count *= len(found)
    if count > _MOST:
        raise Refused(f"these lists make {count:,} runs; at most {_MOST:,} are possible.")
    return [list(zip(last, each, strict=True)) for each in itertools.product(*lists)]


def values(key: str, text: str, strategy: str = "") -> list[str]:
    """Return the values behind a key, or behind ``method.KEY`` of the user's own method `strategy`.

    A text that is allowed as it stands is one value, with its commas: a path, the settings of a
    method, tags. Else commas part the values.
    """
    if "," not in text or _is_allowed(key, text, strategy):
        return [text]
    found = [part.strip() for part in text.split(",")]
    if "" in found:
        raise Refused(f"{key} = {text!r}: there is an empty place in this list")
    return list(dict.fromkeys(found))


def _is_allowed(key: str, text: str, strategy: str) -> bool:
    from fedpsa_strategy.checks import checked_setting

    item = _own_field(key, strategy) if key.startswith("method.") else _our_fields().get(key)
    if item is None:
        return False
    try:
        default: Any = item.default
        checked_setting(key, parse_value(text, default), item)
    except ValueError:
        return False
    return True


@cache
def _our_fields() -> dict[str, Field[Any]]:
    from fedpsa_strategy.checks import key_of
    from server_app.settings import Settings

    return {key_of(item.name): item for item in fields(Settings)}


def _own_field(key: str, strategy: str) -> Field[Any] | None:
    from fedpsa_strategy.checks import key_of
    from fedpsa_strategy.methods.registry import MethodError, find_method

    try:
        method = find_method(strategy)
    except MethodError:  # which is said elsewhere
        return None
    return next((f for f in fields(method) if f"method.{key_of(f.name)}" == key), None)
