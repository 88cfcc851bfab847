"""Text that others wrote, made safe to show: of bounded length, on one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_REASON = 1000
"""Longest text of a reason, in characters."""

_MAX_NAME = 100
_MAX_NAMES = 5


def shown(value: Any, limit: int = _MAX_NAME) -> str:
    """Return a value as text of at most `limit` characters that no terminal acts upon.

    Line breaks, escape codes and everything else that does not print appear as in Python's own
    notation, so that a stranger's text can neither forge a line of a log nor colour it.
    """
    text = str(value)
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    # Escapes are longer than what they stand for.
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown_names(names: Iterable[str]) -> str:
    """Return the first few of some names, in order, and how many more there are."""
    ordered = sorted(names)
    listed = [f"'{shown(name)}'" for name in ordered[:_MAX_NAMES]]
    if len(ordered) > _MAX_NAMES:
        listed.append(f"and {len(ordered) - _MAX_NAMES} more")
    return f"[{', '.join(listed)}]"
