"""The state of a rule as plain values, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

_MAPPING, _DEQUE, _SCALAR = "__mapping__", "__deque__", "__scalar__"


def plain(value: Any) -> Any:
    """Return a value as a checkpoint can hold it."""
    if isinstance(value, deque):
        return {_DEQUE: [plain(item) for item in value], "maxlen": value.maxlen}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):  # its precision decides that of what is computed with it
        return {_SCALAR: np.asarray(value)}
    if isinstance(value, Mapping):  # JSON has no numbers as keys
        return {_MAPPING: [[key, plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    return np.asarray(value) if isinstance(value, np.ndarray) else value


def _rich(value: Any) -> Any:
    """Return what `plain` was given, dataclasses as dicts and all sequences as lists."""
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_MAPPING}:
            return {key: _rich(item) for key, item in value[_MAPPING]}
        if value.keys() == {_DEQUE, "maxlen"}:
            return deque(map(_rich, value[_DEQUE]), maxlen=value["maxlen"])
        if value.keys() == {_SCALAR}:
            return value[_SCALAR][()]
        return {key: _rich(item) for key, item in value.items()}
    return value


def restored(initial: Any, saved: Any) -> Any:
    """Return a saved value in the form that `start` gave it."""
    value = _rich(saved)
    if isinstance(initial, deque):
        return deque(value, maxlen=initial.maxlen)
    if isinstance(initial, MutableMapping):  # which may be one on disk
        initial.clear()
        initial.update(value)
        return initial
    if is_dataclass(initial) and not isinstance(initial, type):
        value = copy(initial)
        for item in fields(initial):
            old = getattr(initial, item.name)
            object.__setattr__(value, item.name, restored(old, saved[item.name]))  # also if frozen
        return value
    # The rule may go on writing into an array; that of a checkpoint may be read-only.
    return value.copy() if isinstance(value, np.ndarray) else value
