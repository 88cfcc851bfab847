"""Runs side by side."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedpsa_strategy.watch.runs import Picture, Row, Run, draw, table

MEASURED = ("accuracy", "best_accuracy", "loss", "area_under_curve", "versions", "uploads")
"""What a comparison shows of every run, beside `seconds`."""

# Settings that say where and how a run was run, or are told in columns of their own.
_ELSEWHERE = {
    *("run-dir", "data-dir", "cache-dir", "runs-dir", "resume", "tags", "status-interval"),
    *("checkpoint-versions", "checkpoint-seconds", "checkpoint-keep", "events-part-mb", "threads"),
    *("tensorboard", "mlflow", "wandb", "prometheus"),
    *("device", "reply-timeout", "node-timeout", "strategy", "dataset", "task", "seed"),
}


class Comparison:
    """Several runs side by side.

    Parameters
    ----------
    runs : Sequence[Run]
        The runs.

    Attributes
    ----------
    rows : list[dict]
        A row for each run: its name, what tells it from the others, and what it measured.
    groups : list[dict]
        A row for all runs that differ in their seed alone: means and standard deviations.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        columns = self._differing()
        self.rows = [
            {
                "run": run.name,
                **{key: _setting(run, key) for key in columns},
                "seed": run.settings.get("seed"),
                "status": run.status,
                **{key: run.summary.get(key) for key in (*MEASURED, "seconds")},
            }
            for run in self.runs
        ]
        self.groups = [self._group(columns, members) for members in self._grouped(columns)]

    @property
    def table(self) -> Any:
        """The rows, as a DataFrame or a list."""
        return table(self.rows)

    def plot(self) -> Picture:
        """Draw all curves into one picture."""
        return draw(self.runs)

    def __repr__(self) -> str:
        return self.text()

    def text(self, *, each: bool = False) -> str:
        """Return a table of text: a line for all seeds of a setting, or for each run."""
        return as_text(self._shown(each=each or len(self.groups) == len(self.rows)))

    def _repr_html_(self) -> str:
        head, *lines = self._shown(each=len(self.groups) == len(self.rows))
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in lines
        )
        return f"<table><tr>{cells}</tr>{body}</table>"

    def _differing(self) -> list[str]:
        """Return the keys that tell these runs from one another."""
        keys = list(dict.fromkeys(key for run in self.runs for key in run.settings))
        found = [key for key in keys if key not in _ELSEWHERE and self._differs(key)]
        tasks = [bool(run.settings.get("task")) for run in self.runs]
        named = [
            "strategy",
            *(["task"] if any(tasks) else []),
            *([] if all(tasks) else ["dataset"]),
        ]
        return [*(key for key in named if any(key in run.settings for run in self.runs)), *found]

    def _differs(self, key: str) -> bool:
        """Whether runs have several values; one from before this setting existed has none."""
        values = [run.settings[key] for run in self.runs if key in run.settings]
        return len({repr(value) for value in values}) > 1

    def _grouped(self, columns: Sequence[str]) -> list[list[Row]]:
        groups: dict[str, dict[object, Row]] = {}
        for run, row in zip(self.runs, self.rows, strict=True):
            members = groups.setdefault(repr([row[key] for key in columns]), {})
            # The same seed and the same model are one measurement, however often it was made.
            model = run.summary.get("model_sha256") or run.folder.resolve()
            members[row["seed"], model] = row
        return [list(members.values()) for members in groups.values()]

    def _group(self, columns: Sequence[str], members: Sequence[Row]) -> Row:
        group: Row = {key: members[0][key] for key in columns}
        finished = [row for row in members if row["status"] == "completed"]
        group |= {"seeds": [row["seed"] for row in members], "finished": len(finished)}
        for key in MEASURED:
            values = [row[key] for row in finished if isinstance(row[key], int | float)]
            group[key] = fmean(values) if values else None
            group[f"{key}_deviation"] = stdev(values) if len(values) > 1 else None
        return group

    def _shown(self, *, each: bool) -> list[list[str]]:
        source = self.rows if each else self.groups
        hidden = {"seconds", *(f"{key}_deviation" for key in MEASURED)}
        keys = [
            key
            for key in (source[0] if source else {})
            if key not in hidden and any(row[key] is not None for row in source)
        ]
        lines = [[_cell(row, key) for key in keys] for row in source]
        return [[key.replace("_", " ") for key in keys], *lines]


def compare(runs: Iterable[Run | Path | str]) -> Comparison:
    """Return several runs side by side.

    Parameters
    ----------
    runs : Iterable[Run | Path | str]
        Runs, or their folders.

    Raises
    ------
    NotARunError
        If a folder holds no run.
    ValueError
        If there are none.
    """
    found = [run if isinstance(run, Run) else Run(run) for run in runs]
    if not found:
        raise ValueError("there is nothing to compare: name at least one run")
    return Comparison(found)


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as aligned text."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _setting(run: Run, key: str) -> Any:
    """Return a setting as a column shows it: an own task brings its own data."""
    return None if key == "dataset" and run.settings.get("task") else run.settings.get(key)


def _cell(row: Mapping[str, Any], key: str) -> str:
    value, deviation = row[key], row.get(f"{key}_deviation")
    if value is None:
        return "–"
    if key in ("accuracy", "best_accuracy"):
        spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
        return f"{100 * value:.2f}{spread} %"
    if key == "seeds":
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}" + (f" ± {deviation:.2g}" if deviation else "")
    return str(value)
