"""Tables with one row per method or variant: mean ± deviation beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulation.experiments import markdown
from simulation.experiments.cells import CONTROL, Label
from simulation.experiments.derived import groups
from simulation.experiments.numbers import Estimate
from simulation.experiments.options import PAPER_DAYS
from simulation.experiments.paper import Lookup
from simulation.experiments.rows import FAILED, Row

_COLUMN_TITLES = {
    "times": "{}",
    "concurrency": "concurrency {:g}",
    "size": "{} samples",
}
_ROW_TITLES = {"method": "method", "variant": "variant", "batch": "calibration batch"}


@dataclass(frozen=True)
class Pivot:
    """How the cells of an experiment are laid out as tables."""

    block: tuple[str, ...]  # the labels that are the same in one table
    row: str  # the labels that vary in it
    column: str
    paper: Lookup  # the paper's number for some labels
    paper_dataset: str = ""  # the one that the paper has these numbers for; empty: each its own
    subject: str = "FedPSA"  # the row that is compared with the control
    number: str = "accuracy"  # what the tables show, and what it is multiplied by
    factor: float = 100.0
    decimals: int = 2
    # Whether the number grows with the length of a run, so that runs of other lengths than the
    # paper's cannot be compared with it.
    grows: bool = False

    def blocks(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the rows of each table, in the order in which they were planned."""
        return list(groups(rows, *self.block).values())

    def block_title(self, rows: Sequence[Row]) -> str:
        """Return what the tables of a block have in common."""
        labels = rows[0].labels
        parts = [markdown.data_name(labels["dataset"])]
        if "alpha" in self.block:
            parts.append(markdown.split(labels["alpha"]))
        if self.number == "loss":
            parts.append("test loss (lower is better)")
        return ", ".join(parts)

    def suited(self, rows: Sequence[Row]) -> Pivot:
        """Return the same layout of losses if this is a table of accuracies and there are none."""
        done = [row for row in rows if row.completed]
        if (
            self.number != "accuracy"
            or any(row.number("accuracy") is not None for row in done)
            or not any(row.number("loss") is not None for row in done)
        ):
            return self
        return replace(self, number="loss", factor=1.0, decimals=4, paper=lambda _: None)

    def column_title(self, value: Label) -> str:
        """Return the heading of a column."""
        if self.column == "alpha":
            return markdown.split(value)
        return _COLUMN_TITLES[self.column].format(value)

    def row_names(self, rows: Sequence[Row]) -> list[str]:
        """Return the rows of a table; the control is always the last."""
        names = list(dict.fromkeys(str(row.labels[self.row]) for row in rows))
        return sorted(names, key=lambda name: name == CONTROL)

    def columns(self, rows: Sequence[Row]) -> list[Label]:
        """Return the columns of a table."""
        return list(dict.fromkeys(row.labels[self.column] for row in rows))

    def at(self, rows: Sequence[Row], name: str, column: Label) -> list[Row]:
        """Return the cells behind one entry, one for each seed."""
        return [
            row
            for row in rows
            if str(row.labels[self.row]) == name and row.labels[self.column] == column
        ]

    def estimate(self, rows: Sequence[Row], name: str, column: Label) -> Estimate:
        """Return one entry of a table."""
        return over_seeds(self.at(rows, name, column), self.number, self.factor)

    def published(self, rows: Sequence[Row], name: str, column: Label) -> float | None:
        """Return the paper's number for an entry, if it can be compared."""
        found = self.at(rows, name, column)
        if not found or (self.grows and found[0].scale.get("days") != PAPER_DAYS):
            return None
        return self.paper(found[0].labels)


def over_seeds(rows: Sequence[Row], name: str, factor: float = 1.0) -> Estimate:
    """Return a number of several cells that differ in their seeds alone."""
    values = {int(row.labels["seed"]): row.number(name) for row in rows if row.completed}
    return Estimate({seed: factor * value for seed, value in values.items() if value is not None})


def mean_text(rows: Sequence[Row], name: str, decimals: int) -> str:
    """Return the mean of a number over seeds, as text."""
    value = over_seeds(rows, name)
    return markdown.number(value.mean if value else None, decimals)


def pivot_tables(rows: Sequence[Row], pivot: Pivot) -> str:
    """Return all tables of an experiment as Markdown."""
    parts, layout = [], pivot
    for block in layout.blocks(rows):
        pivot = layout.suited(block)
        parts += [f"## {pivot.block_title(block)}", _main_table(block, pivot)]
        if (own := _own_table(block, pivot)) is not None:
            parts.append(own)
        if CONTROL in pivot.row_names(block) and len(pivot.row_names(block)) > 1:
            parts += ["### Against the control", _control_table(block, pivot)]
            parts.append(reading(block, pivot))
        parts += ["### Behind the numbers", _details_table(block, pivot)]
    return "\n\n".join(parts)


def _main_table(rows: Sequence[Row], pivot: Pivot) -> str:
    columns, names = pivot.columns(rows), pivot.row_names(rows)
    published = {
        (name, column): pivot.published(rows, name, column) for name in names for column in columns
    }
    beside = {column for (_, column), value in published.items() if value is not None}
    header = [_ROW_TITLES[pivot.row]]
    for column in columns:
        header.append(pivot.column_title(column))
        header += ["paper", "difference"] if column in beside else []
    best = {column: _best(rows, pivot, column) for column in columns}
    lines = []
    for name in names:
        line = [name]
        for column in columns:
            value = pivot.estimate(rows, name, column)
            text = _entry(pivot.at(rows, name, column), value, pivot.decimals)
            line.append(f"**{text}**" if value and value.mean == best[column] else text)
            if column in beside:
                theirs = published[name, column]
                ours = value.mean if value else None
                gap = None if ours is None or theirs is None else ours - theirs
                line += [
                    markdown.number(theirs, pivot.decimals),
                    markdown.signed(gap, pivot.decimals),
                ]
        lines.append(line)
    return markdown.table(header, lines)


def _own_table(rows: Sequence[Row], pivot: Pivot) -> str | None:
    """Return the paper's table of another dataset: the pattern can be compared, not the numbers."""
    if not pivot.paper_dataset or rows[0].labels["dataset"] == pivot.paper_dataset:
        return None
    columns, lines = pivot.columns(rows), []
    for name in pivot.row_names(rows):
        values = [
            pivot.paper({**found[0].labels, "dataset": pivot.paper_dataset})
            for column in columns
            if (found := pivot.at(rows, name, column))
        ]
        if any(value is not None for value in values):
            lines.append([name, *(markdown.number(value, pivot.decimals) for value in values)])
    if not lines:
        return None
    header = [_ROW_TITLES[pivot.row], *map(pivot.column_title, columns)]
    title = f"### The paper's numbers, on {markdown.DATASETS[pivot.paper_dataset]}"
    return f"{title}\n\n{markdown.table(header, lines)}"


def _control_table(rows: Sequence[Row], pivot: Pivot) -> str:
    """Differences seed by seed: partition, initial model and response times cancel out."""
    columns = pivot.columns(rows)
    lines = []
    for name in pivot.row_names(rows):
        if name != CONTROL:
            gaps = [_gap(rows, pivot, name, column) for column in columns]
            lines.append([name, *(markdown.estimate(g, pivot.decimals, sign=True) for g in gaps)])
    return markdown.table([f"minus {CONTROL}", *map(pivot.column_title, columns)], lines)


def reading(rows: Sequence[Row], pivot: Pivot) -> str:
    """Return in words how the subject compares with the control."""
    gaps = [_gap(rows, pivot, pivot.subject, column) for column in pivot.columns(rows)]
    gaps = [gap for gap in gaps if gap]
    if not gaps:
        return f"There is no pair of {pivot.subject} and {CONTROL} to compare yet."
    # What the table shows as no difference is none.
    above = sum(round(gap.mean, pivot.decimals) > 0 for gap in gaps)
    text = f"{pivot.subject} is above {CONTROL} in {above} of {len(gaps)} columns"
    errors = [(gap.mean, gap.standard_error) for gap in gaps if gap.standard_error is not None]
    if not errors:
        return f"{text}; one seed is not enough to separate the effect from noise."
    clear = [mean for mean, error in errors if abs(mean) > 2 * error]
    up, down = sum(mean > 0 for mean in clear), sum(mean < 0 for mean in clear)
    return (
        f"{text}. Beyond two standard errors of the paired differences it is above in {up} and"
        f" below in {down}."
    )


def _details_table(rows: Sequence[Row], pivot: Pivot) -> str:
    header = [f"{_ROW_TITLES[pivot.row]}, {pivot.column}", "seeds", "last tenth (%)"]
    header += ["effective number", "mean κ", "staleness", "versions", "uploads", "rejected"]
    lines = []
    for name in pivot.row_names(rows):
        for column in pivot.columns(rows):
            found = pivot.at(rows, name, column)

            lines.append(
                [
                    f"{name}, {pivot.column_title(column)}",
                    str(sum(row.completed for row in found)),
                    markdown.estimate(over_seeds(found, "late_accuracy", 100.0)),
                    mean_text(found, "mean_effective_number", 2),
                    mean_text(found, "mean_kappa", 3),
                    mean_text(found, "mean_staleness", 2),
                    mean_text(found, "versions", 0),
                    mean_text(found, "uploads", 0),
                    mean_text(found, "rejected", 0),
                ]
            )
    return markdown.table(header, lines)


def _gap(rows: Sequence[Row], pivot: Pivot, name: str, column: Label) -> Estimate:
    return pivot.estimate(rows, name, column).minus(pivot.estimate(rows, CONTROL, column))


def _best(rows: Sequence[Row], pivot: Pivot, column: Label) -> float | None:
    values = [pivot.estimate(rows, name, column) for name in pivot.row_names(rows)]
    means = [value.mean for value in values if value]
    best = min if pivot.number == "loss" else max
    return best(means) if len(means) > 1 else None


def _entry(rows: Sequence[Row], value: Estimate, decimals: int) -> str:
    if not value:
        return "failed" if any(row.status == FAILED for row in rows) else markdown.NOTHING
    text = markdown.estimate(value, decimals)
    return text if len(value) == len(rows) else f"{text} ({len(value)} of {len(rows)})"
