"""How tables and pages show a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """A method with some settings that has a name of its own in tables."""

    label: str
    colour: str
    settings: Mapping[str, Any]


class Row(NamedTuple):
    """What docs/METHODS.md says of a method."""

    aggregated: str = ""
    when: str = ""
    weight: str = ""
    client: str = "–"
    memory: str = "–"
    bytes: str = "d / d"
