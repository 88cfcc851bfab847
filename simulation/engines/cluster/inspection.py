"""What a machine of a cluster says about itself, before anything is given to it.

This module imports nothing but the standard library: it has to run where the rest cannot.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flwr", "torch", "numpy")
"""What decides over the bits of a result, and must be the same everywhere."""


def versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` in this process; empty where one is missing."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def exists(path: str) -> bool:
    """Return whether this machine sees a file."""
    return Path(path).exists()


def inspect(expected: dict[str, str], imports: Sequence[str], works: str, argument: bytes) -> str:
    """Return what is missing on this machine; empty if nothing is.

    Packages must have the expected versions and modules be importable; `works` is a function,
    ``module:name``, that is called with the argument and raises what is missing. Empty: none. The
    argument is pickled: it may need packages that this machine has not.
    """
    found = versions()
    for name, wanted in expected.items():
        if not found[name]:
            return f"the package {name} is not installed, {wanted} is needed"
        if found[name] != wanted:
            return f"{name} {found[name]} is installed, but {wanted} is used here"
    for name in imports:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    if not works:
        return ""
    module, _, attribute = works.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)(pickle.loads(argument))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
