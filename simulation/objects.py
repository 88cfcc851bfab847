"""Tasks and methods that are objects of a session, such as classes of a notebook.

Everything else names a task or a method as ``module:object``, which other processes import. What no
other process could import gets such a name here, in a module that exists in memory alone, and
travels to the worker processes by value.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

MODULE = "fedpsa_session"
"""The module that exists in memory alone."""

_pickled: dict[str, bytes] = {}


def reference_to(thing: Any) -> str:
    """Return the name by which server and workers find a module, a class or another object.

    `TypeError` says that it cannot be sent to another process.
    """
    if isinstance(thing, ModuleType) and thing.__name__ != "__main__":
        return thing.__name__
    if found := _importable(thing):
        return found
    try:
        pickled = cloudpickle.dumps(thing)
    except Exception as error:  # pickling calls methods of anybody
        raise TypeError(
            f"{thing!r} cannot be sent to worker processes ({error}): write it into a module"
        ) from error
    kind = thing if isinstance(thing, type) else type(thing)
    name = f"{kind.__name__}_{hashlib.sha256(pickled).hexdigest()[:12]}"
    _pickled[name] = pickled
    # A copy, as in the workers: what is done to the object later is not part of this run.
    setattr(_module(), name, cloudpickle.loads(pickled))
    return f"{MODULE}:{name}"


def given(references: Iterable[object]) -> dict[str, bytes]:
    """Return the objects of this session that are named among others, for `adopt` elsewhere."""
    names = [str(each).partition(":")[2] for each in references if is_of_session(each)]
    return {name: _pickled[name] for name in names if name in _pickled}


def adopt(pickled: Mapping[str, bytes]) -> None:
    """Give objects of another process their names in this one."""
    for name, content in pickled.items():
        setattr(_module(), name, cloudpickle.loads(content))


def is_of_session(reference: object) -> bool:
    """Tell whether a name is known in one session alone."""
    return str(reference).partition(":")[0] == MODULE


def _module() -> ModuleType:
    if MODULE not in sys.modules:
        sys.modules[MODULE] = module_from_spec(ModuleSpec(MODULE, None))
    return sys.modules[MODULE]


def _importable(thing: Any) -> str | None:
    """Return ``module:name`` of a class that another process can import."""
    if not isinstance(thing, type) or thing.__module__ in ("__main__", MODULE):
        return None
    try:
        module = importlib.import_module(thing.__module__)
    except ImportError:
        return None
    same = getattr(module, thing.__qualname__, None) is thing
    return f"{thing.__module__}:{thing.__qualname__}" if same else None
