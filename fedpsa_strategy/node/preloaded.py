"""Libraries that the warm process has imported, and that a child takes over when it asks for them.

A fresh process would import an app's own module before an installed one of the same name. So
nothing that the warm process imported beyond Flower is visible in a child until it is imported
there, and then only if a fresh import would find the same file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Preloaded(MetaPathFinder, Loader):
    """The preloaded libraries, and the finder that gives them out."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._together: dict[str, set[str]] = {}
        self._specs: dict[str, ModuleSpec | None] = {}

    def load(self, name: str) -> None:
        """Import a library now; what it brings along is given out with it."""
        before = set(sys.modules)
        import_module(name)
        new = {module.partition(".")[0] for module in set(sys.modules) - before}
        self._together.setdefault(name.partition(".")[0], set()).update(new)

    def hide(self, known: Iterable[str]) -> None:
        """Take away all but modules of known top-level names; libraries are given out again."""
        stay = set(known) | {"__main__", "__mp_main__"}
        libraries = set().union(*self._together.values())
        for name in list(sys.modules):
            first = name.partition(".")[0]
            if first not in stay:
                module = sys.modules.pop(name)
                if first in libraries:
                    self._modules[name] = module
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Give out a preloaded module, if a fresh import would find the same file."""
        # Parts of a package are given out with it.
        if "." in fullname or not self._is_the_same(fullname):
            return None
        for name in self._together.get(fullname, {fullname}):
            if self._is_the_same(name):
                self._give_out(name, without=fullname)
        spec = self._modules[fullname].__spec__
        # The module itself follows in `create_module`: the import system takes one that appears
        # before for a module that is still to be executed.
        found = ModuleSpec(fullname, self, origin=spec.origin if spec else None)
        found.submodule_search_locations = spec.submodule_search_locations if spec else None
        return found

    def _is_the_same(self, name: str) -> bool:
        """Return whether a preloaded module is what a fresh import would give; drop any other."""
        module = self._modules.get(name)
        if module is None:
            return False
        if _place(module.__spec__) == _place(self._fresh_spec(name)):
            return True
        for part in self._parts(name):
            del self._modules[part]
        return False

    def _give_out(self, name: str, without: str) -> None:
        for part in self._parts(name):
            if part != without:
                sys.modules.setdefault(part, self._modules.pop(part))

    def _parts(self, name: str) -> list[str]:
        return [part for part in self._modules if part.partition(".")[0] == name]

    def _fresh_spec(self, name: str) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, None)) is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the preloaded module."""
        module = self._modules[spec.name]
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was when it was executed."""
        name = module.__name__
        module.__spec__ = self._specs.pop(name)
        del self._modules[name]


def _place(spec: ModuleSpec | None) -> object:
    if spec is None:
        return None
    return spec.origin, list(spec.submodule_search_locations or [])
