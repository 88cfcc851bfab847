"""What the results say, on one screen: which methods are ahead of the control, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.experiments import markdown
from simulation.experiments.cells import CONTROL
from simulation.experiments.derived import groups
from simulation.experiments.numbers import Estimate
from simulation.experiments.rows import Row
from simulation.experiments.tables import over_seeds

_FEWEST = 3  # seeds with which a difference is judged
_SURE = 0.95


def answer(rows: Sequence[Row]) -> dict[str, str]:
    """Return a table in Markdown for every place where methods were compared over enough seeds."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        if row.completed:
            places.setdefault(_place(row), []).append(row)
    tables = {place: _part(found) for place, found in places.items()}
    return {place: table for place, table in tables.items() if table}


def _place(row: Row) -> str:
    """Return what the runs of one table have in common."""
    place = markdown.place(row.labels["dataset"], row.labels["alpha"])
    return f"{place}, {row.labels['model']}" if "model" in row.labels else place


def _part(rows: Sequence[Row]) -> str:
    accuracies, areas = (
        {
            str(method): over_seeds(found, name, 100.0)
            for (method,), found in groups(rows, "method").items()
        }
        for name in ("accuracy", "area_under_curve")
    )
    if CONTROL not in accuracies or len(accuracies[CONTROL]) < _FEWEST:
        return ""
    ranked = sorted(accuracies.items(), key=lambda item: -item[1].mean)
    lines = []
    for method, accuracy in ranked:
        told = ["control", "control"]
        if method != CONTROL:
            pairs = ((accuracy, accuracies[CONTROL]), (areas[method], areas[CONTROL]))
            told = [verdict(own.minus(control)) for own, control in pairs]
        lines.append([method, markdown.estimate(accuracy), *told])
    return markdown.table(["method", "accuracy (%)", "at the end", "on the way (area)"], lines)


def verdict(difference: Estimate) -> str:
    """Return whether paired differences are more than chance, by Student's t at 95 %."""
    if len(difference) < _FEWEST or difference.standard_error is None:
        return "too few seeds"
    from scipy import stats  # takes a second

    least = float(stats.t.ppf((1 + _SURE) / 2, len(difference) - 1)) * difference.standard_error
    if abs(difference.mean) <= least:
        return "unclear"
    return "ahead" if difference.mean > 0 else "behind"
