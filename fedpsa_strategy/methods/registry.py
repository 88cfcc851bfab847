"""Which methods there are: ours, installed ones, and those that are named as module:Class."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedpsa_strategy.checks import key_of
from fedpsa_strategy.methods.ace import ACEMethod
from fedpsa_strategy.methods.aced import ACEDMethod
from fedpsa_strategy.methods.area import AREAMethod
from fedpsa_strategy.methods.base import Method, check_declared
from fedpsa_strategy.methods.ca2fl import CA2FLMethod
from fedpsa_strategy.methods.fadas import FADASMethod
from fedpsa_strategy.methods.fedac import FedACMethod
from fedpsa_strategy.methods.fedasync import FedAsyncMethod
from fedpsa_strategy.methods.fedavg import FedAvgMethod
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from fedpsa_strategy.methods.fedfa import FedFaMethod
from fedpsa_strategy.methods.fedpac import FedPACMethod
from fedpsa_strategy.methods.fedpsa import FedPSAMethod
from fedpsa_strategy.methods.midpoint import MidpointMethod
from fedpsa_strategy.methods.rescaled import RescaledMethod

GROUP = "fedpsa.methods"
"""The group of entry points under which packages offer methods."""

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedPSAMethod,
        FedBuffMethod,
        CA2FLMethod,
        MidpointMethod,
        FedAsyncMethod,
        FedFaMethod,
        FedAvgMethod,
        FedPACMethod,
        FADASMethod,
        ACEMethod,
        ACEDMethod,
        AREAMethod,
        FedACMethod,
        RescaledMethod,
    )
}
"""The methods of this library by name, in the order of tables."""


class MethodError(ValueError):
    """There is no such method; the text says what there is."""


@cache
def find_method(reference: str) -> type[Method]:
    """Return a method by its name, or as ``package.module:Class``; raises MethodError."""
    if reference in METHODS:
        return METHODS[reference]
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    module, _, name = reference.partition(":")
    try:
        if reference in installed:
            found = installed[reference].load()
        elif name:
            found = getattr(importlib.import_module(module), name)
        else:
            raise MethodError(_unknown(reference, [*METHODS, *installed]))
    except ImportError as error:
        raise MethodError(
            f"strategy = {reference!r}: cannot import {module!r} ({error}); install it where "
            "SuperLink and nodes run, or put its folder on PYTHONPATH there"
        ) from error
    except AttributeError:
        raise MethodError(f"strategy = {reference!r}: {module} has no {name!r}") from None
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise MethodError(
            f"strategy = {reference!r}: must be a subclass of fedpsa_strategy.Method, which "
            f"{found!r} is not"
        )
    if "rule" not in dir(found):
        raise MethodError(f"strategy = {reference!r}: {found.__name__} names no `rule`")
    try:
        check_declared(found)
    except TypeError as error:
        raise MethodError(f"strategy = {reference!r}: {error}") from None
    return found


def is_ours(reference: str) -> bool:
    """Whether a method is one of this library's, whose settings are run-config keys."""
    return reference in METHODS


def label_of(config: Mapping[str, Any]) -> str:
    """Return what tables call the method of a run config; others than this library's by name."""
    name = str(config.get("strategy") or "")
    if not is_ours(name):
        return name
    for variant in METHODS[name].variants:
        if variant.settings.items() <= config.items():
            return variant.label
    return METHODS[name].label


def shared_settings() -> dict[str, Any]:
    """Return the declarations of all settings of this library's methods, by field name.

    Methods that share a name share its meaning, default and range.
    """
    found: dict[str, Any] = {}
    for method in METHODS.values():
        for item in fields(method):
            known = found.setdefault(item.name, item)
            if (known.default, known.metadata) != (item.default, item.metadata):
                raise TypeError(
                    f"{method.__name__}.{item.name} is declared differently by another method"
                )
    return found


def readers() -> dict[str, tuple[str, ...]]:
    """Return which of this library's methods read each of their run-config keys."""
    return {
        key_of(name): tuple(
            method.name
            for method in METHODS.values()
            if name in {item.name for item in fields(method)}
        )
        for name in shared_settings()
    }


def _unknown(reference: str, known: list[str]) -> str:
    close = difflib.get_close_matches(reference, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    listed = ", ".join(repr(name) for name in known)
    return f"strategy = {reference!r}: must be one of {listed}, or module:Class{hint}"
