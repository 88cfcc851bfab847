"""A table of one method against all others: areas, late accuracies, differences seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulation.experiments import markdown
from simulation.experiments.derived import groups
from simulation.experiments.numbers import Estimate
from simulation.experiments.rows import Row
from simulation.experiments.style import INK, colour_of
from simulation.experiments.tables import over_seeds

_NUMBERS = (("area_under_curve", 1.0, "area"), ("late_accuracy", 100.0, "last tenth, points"))
_MOST_PANELS = 8


@dataclass(frozen=True)
class Paired:
    """How one method is compared with others; in one table the labels of `block` are the same."""

    subject: str
    block: tuple[str, ...] = ("dataset", "model", "alpha")

    def title(self, rows: Sequence[Row]) -> str:
        """Return what the runs of a table have in common."""
        labels = rows[0].labels
        parts = [markdown.place(labels["dataset"], labels["alpha"])]
        parts += [str(labels[key]) for key in self.block if key not in ("dataset", "alpha")]
        return ", ".join(parts)

    def gaps(self, rows: Sequence[Row], name: str, factor: float) -> list[tuple[str, Estimate]]:
        """Return the subject minus each other method, seed by seed."""
        by_method = {str(key[0]): found for key, found in groups(rows, "method").items()}
        own = over_seeds(by_method.get(self.subject, []), name, factor)
        return [
            (method, own.minus(over_seeds(found, name, factor)))
            for method, found in by_method.items()
            if method != self.subject
        ]


def with_error(gap: Estimate, decimals: int) -> str:
    """Return mean ± standard error of differences."""
    if not gap:
        return markdown.NOTHING
    error = gap.standard_error
    mean = markdown.signed(gap.mean, decimals)
    return mean if error is None else f"{mean} ± {markdown.number(error, decimals)}"


def paired_body(rows: Sequence[Row], layout: Paired) -> str:
    """Return all tables, and for each in words what it says."""
    parts = []
    for found in groups(rows, *layout.block).values():
        parts += [f"## {layout.title(found)}", paired_table(found, layout)]
        parts.append(reading(found, layout))
    return "\n\n".join(parts)


def lines_body(rows: Sequence[Row], layout: Paired, line: str) -> str:
    """Return a table with a line for each value of a label, which the layout's block has too.

    The subject is compared with the best of the others of each line: the one that somebody would
    have chosen who tunes for these circumstances.
    """
    parts = []
    table = replace(layout, block=tuple(key for key in layout.block if key != line))
    for found in groups(rows, *table.block).values():
        methods = [str(method) for (method,) in groups(found, "method")]
        header = [line, *(f"{method}: area" for method in methods), "best of the others"]
        header += [f"{layout.subject} minus it: area", "last tenth (points)"]
        lines = []
        for (value,), own in groups(found, line).items():
            by_method = {str(key[0]): part for key, part in groups(own, "method").items()}
            areas = {name: over_seeds(by_method[name], "area_under_curve") for name in methods}
            others = [name for name in methods if name != layout.subject and areas[name]]
            best = max(others, key=lambda name: areas[name].mean, default=markdown.NOTHING)
            gaps = (dict(layout.gaps(own, name, factor)) for name, factor, _ in _NUMBERS)
            area, late = (gap.get(best, Estimate({})) for gap in gaps)
            texts = [markdown.estimate(areas[name], 4) for name in methods]
            lines.append([str(value), *texts, best, with_error(area, 4), with_error(late, 2)])
        parts += [f"## {table.title(found)}", markdown.table(header, lines)]
    return "\n\n".join(parts)


def paired_table(rows: Sequence[Row], layout: Paired) -> str:
    """Return the table of runs that have all but method and seed in common."""
    header = ["method", "seeds", "area", "last tenth (%)", "final (%)"]
    header += [f"{layout.subject} minus it: area", "seeds in both", "last tenth (points)"]
    differences = [dict(layout.gaps(rows, name, factor)) for name, factor, _ in _NUMBERS]
    lines = []
    for (method,), own in groups(rows, "method").items():
        area, late = (found.get(str(method)) for found in differences)
        lines.append(
            [
                str(method),
                str(sum(row.completed for row in own)),
                markdown.estimate(over_seeds(own, "area_under_curve"), 4),
                markdown.estimate(over_seeds(own, "late_accuracy", 100.0)),
                markdown.estimate(over_seeds(own, "accuracy", 100.0)),
                markdown.NOTHING if area is None else with_error(area, 4),
                markdown.NOTHING if area is None else str(len(area)),
                markdown.NOTHING if late is None else with_error(late, 2),
            ]
        )
    return markdown.table(header, lines)


def reading(rows: Sequence[Row], layout: Paired) -> str:
    """Return in words against whom the subject is clearly ahead or behind."""
    sentences = []
    for name, factor, title in _NUMBERS:
        what = title.partition(",")[0]
        gaps = {method: gap for method, gap in layout.gaps(rows, name, factor) if len(gap) > 1}
        if not gaps:
            sentences.append(f"{what}: fewer than two seeds, so nothing can be said")
            continue
        clear = {
            method: gap.mean
            for method, gap in gaps.items()
            if abs(gap.mean) > 2 * (gap.standard_error or 0.0)
        }
        ahead = [method for method, mean in clear.items() if mean > 0]
        behind = [method for method, mean in clear.items() if mean < 0]
        even = [method for method in gaps if method not in clear]
        words = [
            f"{word} {', '.join(found)}"
            for word, found in (("ahead of", ahead), ("behind", behind), ("level with", even))
            if found
        ]
        sentences.append(f"{what}: {'; '.join(words)}")
    return (
        f"{layout.subject}, by more than two standard errors of the paired differences: "
        + ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
        + "."
    )


def draw_paired(figure: Any, rows: Sequence[Row], layout: Paired) -> None:
    """Draw the differences with two standard errors; tables beyond a few as lines of one panel."""
    blocks = list(groups(rows, *layout.block).values())
    if len(blocks) > _MOST_PANELS:
        _draw_lines(figure, blocks, layout)
    else:
        _draw_panels(figure, blocks, layout)
    figure.suptitle(
        f"{layout.subject} minus the method, by seeds      ●  mean ± two standard errors",
        fontsize=8.5,
        x=0.01,
        ha="left",
    )


def _draw_panels(figure: Any, blocks: Sequence[Sequence[Row]], layout: Paired) -> None:
    methods = max(len(groups(found, "method")) for found in blocks)
    figure.set_size_inches(9.0, (0.26 * methods + 0.7) * len(blocks) + 0.6)
    grid = figure.subplots(len(blocks), len(_NUMBERS), squeeze=False, sharey="row")
    for found, line in zip(blocks, grid, strict=True):
        for axes, (name, factor, what) in zip(line, _NUMBERS, strict=True):
            gaps = layout.gaps(found, name, factor)
            for index, (method, gap) in enumerate(gaps):
                _point(axes, gap, index, colour_of(method, index))
            axes.axvline(0, linewidth=0.8, alpha=0.5, color=INK)
            axes.set_yticks(range(len(gaps)), [method for method, _ in gaps])
            axes.set_ylim(len(gaps) - 0.5, -0.5)
            axes.set_title(f"{layout.title(found)}\n{what}", fontsize=8.5)


def _draw_lines(figure: Any, blocks: Sequence[Sequence[Row]], layout: Paired) -> None:
    figure.set_size_inches(9.0, 0.2 * len(blocks) + 1.2)
    panels = figure.subplots(1, len(_NUMBERS), sharey=True)
    for axes, (name, factor, what) in zip(panels, _NUMBERS, strict=True):
        labelled: set[str] = set()
        for line, found in enumerate(blocks):
            gaps = layout.gaps(found, name, factor)
            for index, (method, gap) in enumerate(gaps):
                label = "" if method in labelled else method
                labelled.add(method)
                height = line + 0.2 * (index - (len(gaps) - 1) / 2)
                _point(axes, gap, height, colour_of(method, index), label)
        axes.axvline(0, linewidth=0.8, alpha=0.5, color=INK)
        axes.set_yticks(range(len(blocks)), [layout.title(found) for found in blocks], fontsize=5)
        axes.set_ylim(len(blocks) - 0.5, -0.5)
        axes.set_title(what)
    if panels[0].get_legend_handles_labels()[1]:
        panels[0].legend(fontsize=6)


def _point(axes: Any, gap: Estimate, height: float, colour: str, label: str = "") -> None:
    if gap:
        error = None if gap.standard_error is None else 2 * gap.standard_error
        axes.errorbar(
            gap.mean, height, xerr=error, fmt="o", color=colour, capsize=2.5, label=label or None
        )
