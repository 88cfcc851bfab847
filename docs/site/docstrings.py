"""Docstrings that classes get when they are made: those of strategies come from their methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import griffe


class RuntimeDocstrings(griffe.Extension):
    """Takes the docstring of a class from the class itself where the source has none."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Take it from strategies alone, so that nothing else has to be imported."""
        if cls.docstring is None and cls.module.path == "fedpsa_strategy.server.strategies":
            text = getattr(import_module(cls.module.path), cls.name).__doc__
            cls.docstring = griffe.Docstring(text, parent=cls, parser="numpy")
