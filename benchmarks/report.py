"""The page and the file that a benchmark leaves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, in_words

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Target:
    """What was promised, beside what was measured.

    Parameters
    ----------
    what : str
        What is measured.
    measured : float
        The measurement.
    limit : float
        Where it has to stay.
    at_least : bool (default: False)
        Whether the limit is a lower one.
    """

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the promise is kept."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class Report:
    """Collects what a benchmark found, and writes it as Markdown and as JSON.

    Parameters
    ----------
    name : str
        Name of the two files.
    title : str
        Heading of the page.
    command : str
        What the reader types to get a page of the same kind.
    label : str (default: "")
        Word behind the name, for a page beside others of the same kind.
    """

    def __init__(self, name: str, title: str, command: str, label: str = "") -> None:
        if label:
            name, command = f"{name}-{label}", f"{command} --label {label}"
        self.name = name
        self._start = describe()
        self._parts = [f"# {title}"]
        self._command = command
        self._targets: list[Target] = []
        self._data: dict[str, Any] = {}

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(text)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table."""
        lines = [f"## {title}", ""] if title else []
        lines.append("| " + " | ".join(header) + " |")
        lines.append("|" + "---|" * len(header))
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        self._parts.append("\n".join(lines))

    def data(self, key: str, value: Any) -> None:
        """Add something to the JSON file alone."""
        self._data[key] = value

    def target(self, what: str, measured: float, limit: float, *, at_least: bool = False) -> None:
        """Hold a measurement against what was promised."""
        self._targets.append(Target(what, measured, limit, at_least))

    def write(self, folder: Path) -> Path:
        """Write both files and return the Markdown one."""
        end = describe()
        parts = list(self._parts)
        if self._targets:
            parts.insert(1, self._target_table())
        parts.append(f"Machine: {in_words(self._start, end)}\n\nMade by `{self._command}`.")
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"{self.name}.md"
        page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        record = {
            "command": self._command,
            "machine": {"start": self._start, "end": end},
            "targets": [asdict(target) | {"met": target.met} for target in self._targets],
            **self._data,
        }
        text = json.dumps(record, indent=1, default=_plain, ensure_ascii=False)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        return page

    def _target_table(self) -> str:
        rows = ["| target | measured | limit | |", "|---|---|---|---|"]
        for target in self._targets:
            word = "at least" if target.at_least else "at most"
            verdict = "met" if target.met else "**missed**"
            rows.append(
                f"| {target.what} | {target.measured:.3g} | {word} {target.limit:g} | {verdict} |"
            )
        return "\n".join(rows)


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a command line with the options that all benchmarks have."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="folder for the results"
    )
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each")
    return made


def with_unit(num_bytes: float) -> str:
    """Return a number of bytes as a person would say it."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
