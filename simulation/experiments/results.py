"""The folder of an experiment: its cells, its tables and its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedpsa_strategy.files import write_atomically
from simulation.experiments.caption import origin_text, scale_text, seeds_text, short_caption
from simulation.experiments.catalogue import Experiment
from simulation.experiments.cells import Cell
from simulation.experiments.rows import FAILED, Row, make_row, to_lines
from simulation.experiments.store import CellStore
from simulation.experiments.style import render

CELLS, TABLE, PNG, SVG = "cells.jsonl", "table.md", "figure.png", "figure.svg"


def write_results(
    experiment: Experiment,
    cells: Sequence[Cell],
    store: CellStore,
    out: Path,
    *,
    command: str,
    failures: Mapping[str, str],
    label: str = "",
    recorded: Mapping[str, Row] | None = None,
) -> Path:
    """Write all files of an experiment, whose cells are finished or not; return its folder.

    `command` is what was typed to get them, and `failures` says by ids why cells failed. The label
    tells these results from others of the same experiment. `recorded` are rows of runs that need
    not be in the store any more, by the ids of their cells.
    """
    known: dict[str, Row] = dict(recorded or {})
    rows = []
    for cell in cells:
        if cell.id not in known:
            known[cell.id] = make_row(cell, store, failures.get(cell.id, ""), experiment.series)
        row = known[cell.id]
        rows.append(Row(**{**vars(row), "labels": dict(cell.labels)}))
    folder = out / folder_name(experiment, label)
    write_atomically(folder / CELLS, to_lines(rows))
    write_atomically(folder / TABLE, document(experiment, rows, command, label))
    png, svg = render(lambda figure: experiment.draw(figure, rows), short_caption(rows))
    write_atomically(folder / PNG, png)
    write_atomically(folder / SVG, svg)
    return folder


def folder_name(experiment: Experiment, label: str) -> str:
    """Return the name of the folder of an experiment's results."""
    return f"{experiment.name}-{label}" if label else experiment.name


def titled(experiment: Experiment, label: str) -> str:
    """Return the heading of an experiment's results."""
    return f"{experiment.title} ({label})" if label else experiment.title


def document(experiment: Experiment, rows: Sequence[Row], command: str, label: str) -> str:
    """Return an experiment's tables with all that has to be said about them, as Markdown."""
    parts = [
        f"# {titled(experiment, label)}",
        f"`{experiment.name}`: {experiment.summary}.",
        f"![{experiment.summary}]({PNG})",
        experiment.body(rows),
        "## Where this comes from",
        f"**Made by.** `{command}`",
        f"**Scale.** {scale_text(rows)}",
        f"**Seeds.** {seeds_text(rows)}",
        f"**Versions and machine.** {origin_text(rows)}",
    ]
    if experiment.notes:
        parts.append(f"**Notes.** {experiment.notes}")
    failed = {row.id: row for row in rows if row.status == FAILED}
    if failed:
        parts.append("**Failed.**")
        parts.append(
            "\n".join(f"- `{key}`: {' '.join(row.reason.split())}" for key, row in failed.items())
        )
    return "\n\n".join(parts) + "\n"
