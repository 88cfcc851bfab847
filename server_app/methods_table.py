"""The table in docs/METHODS.md, generated: `python -m server_app.methods_table`."""

from __future__ import annotations

from pathlib import Path

from fedpsa_strategy.methods.base import Method, Row
from fedpsa_strategy.methods.registry import METHODS

PAGE = Path("docs", "METHODS.md")
_BEGIN, _END = "<!-- methods: python -m server_app.methods_table -->\n", "<!-- end -->"
_HEADINGS = Row(
    "what is aggregated",
    "when",
    "with what weight",
    "at the client",
    "server memory beside x",
    "up / down per update",
)


def methods_table() -> str:
    """Return what the methods declare about themselves, and the keys of their settings."""
    lines = [_line("method", *_HEADINGS, "settings"), "|" + "---|" * (len(_HEADINGS) + 2)]
    lines += [
        _line(f"**{method.label}** (`{method.name}`)", *method.table, _settings(method))
        for method in METHODS.values()
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table as it is declared."""
    before, rest = page.split(_BEGIN)
    return before + _BEGIN + methods_table() + _END + rest.split(_END, 1)[1]


def _settings(method: type[Method]) -> str:
    return ", ".join(f"`{key}`" for key in method.setting_keys()) or "–"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
