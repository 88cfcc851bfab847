"""The tables that go with the figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from simulation.experiments import markdown, paper
from simulation.experiments.derived import (
    GAP_BINS,
    all_pairs,
    correlations,
    costs_per_upload,
    gap_bins,
    groups,
    time_weight,
)
from simulation.experiments.numbers import Estimate, binned, interpolated
from simulation.experiments.rows import STAGES, Row
from simulation.experiments.tables import mean_text, over_seeds

_STAGES_TEXT = (
    "FedPSA's κ by stages of the run: mean, deviation and the interval that holds nine in ten"
    " uploads, means over seeds. The weights are softmax(κ / temperature): the effective number"
    " says what remains of the differences."
)
_SHARES = (0.1, 0.25, 0.5, 1.0)


def curves(rows: Sequence[Row]) -> str:
    """Return accuracy after parts of the time."""
    parts = []
    for (dataset, alpha), found in groups(rows, "dataset", "alpha").items():
        days = found[0].scale["days"]
        lines = []
        for (method,), own in groups(found, "method").items():
            values = [
                Estimate(
                    {
                        int(row.labels["seed"]): 100 * interpolated(row.curve, share * days)
                        for row in own
                        if row.completed and row.curve
                    }
                )
                for share in _SHARES
            ]
            lines.append([str(method), *map(markdown.estimate, values)])
        header = ["method", *(f"day {share * days:g}" for share in _SHARES)]
        parts += [f"## {markdown.place(dataset, alpha)}", markdown.table(header, lines)]
    return "\n\n".join(parts)


def hyper(rows: Sequence[Row]) -> str:
    """Return the two grids as tables."""
    parts = []
    for (dataset, alpha), found in groups(rows, "dataset", "alpha").items():
        by_grid = groups(found, "grid")
        parts.append(f"## {markdown.place(dataset, alpha)}")
        control = over_seeds(by_grid[("control",)], "accuracy", 100.0)
        parts.append(f"The control, {found[-1].labels['method']}: {markdown.estimate(control)} %.")
        for grid in ("γ, δ", "L_s, L_q"):
            x_name, y_name = grid.split(", ")
            own = by_grid[(grid,)]
            columns = [y for (y,) in groups(own, "y")]
            lines = [
                [
                    f"{x_name} = {x:g}",
                    *(
                        markdown.estimate(over_seeds(in_column, "accuracy", 100.0))
                        for in_column in groups(in_row, "y").values()
                    ),
                ]
                for (x,), in_row in groups(own, "x").items()
            ]
            header = ["accuracy (%)", *(f"{y_name} = {y:g}" for y in columns)]
            parts.append(markdown.table(header, lines))
    return "\n\n".join(parts)


def overhead(rows: Sequence[Row]) -> str:
    """Return what an upload costs at the client, at the server and in transit."""
    parts = []
    header = ["method", "training (ms)", "sensitivity (ms)", "server (ms)", "up (kB)", "down (kB)"]
    header += ["uploads", "moved in all (MB)", "effective number", "mean κ"]
    for (dataset, alpha), found in groups(rows, "dataset", "alpha").items():
        lines = []
        for (method,), own in groups(found, "method").items():
            costs = costs_per_upload(own)
            moved = [
                (row.number("bytes_up") or 0) + (row.number("bytes_down") or 0)
                for row in own
                if row.completed
            ]
            lines.append(
                [
                    str(method),
                    markdown.number(costs["train"], 2),
                    markdown.number(costs["sensitivity"] or None, 2),
                    markdown.number(costs["server"], 2),
                    markdown.number(costs["up"], 1),
                    markdown.number(costs["down"], 1),
                    mean_text(own, "uploads", 0),
                    markdown.number(fmean(moved) / 1e6 if moved else None, 1),
                    mean_text(own, "mean_effective_number", 2),
                    mean_text(own, "mean_kappa", 3),
                ]
            )
        parts += [f"## {markdown.place(dataset, alpha)}, per upload", markdown.table(header, lines)]
    return "\n\n".join(parts)


def kappa(rows: Sequence[Row]) -> str:
    """Return correlations of κ and alignment beside the paper's."""
    parts = []
    for (dataset, alpha), found in groups(rows, "dataset", "alpha").items():
        parts.append(f"## {markdown.place(dataset, alpha)}")
        lines = []
        for kind in ("raw", "binned"):
            for name in ("pearson", "spearman"):
                values = {
                    int(row.labels["seed"]): value
                    for row in found
                    if row.completed and (value := correlations(row)[kind, name]) is not None
                }
                own = Estimate(values)
                theirs = paper.correlation(kind, name)
                gap = None if not own or theirs is None else own.mean - theirs
                title = f"{name.capitalize()}, {'single uploads' if kind == 'raw' else 'bins'}"
                lines.append(
                    [
                        title,
                        markdown.estimate(own, 3),
                        markdown.number(theirs, 3),
                        markdown.signed(gap, 3),
                    ]
                )
        parts.append(markdown.table(["correlation", "here", "paper", "difference"], lines))
        pairs = all_pairs(found)
        lines = [
            [_interval(centre), str(count), markdown.number(mean, 3)]
            for centre, mean, count in binned(pairs)
        ]
        if lines:
            parts += [
                f"{len(pairs)} pairs of all seeds by bins of κ:",
                markdown.table(["κ", "uploads", "mean alignment"], lines),
            ]
    return "\n\n".join(filter(None, [*parts, stages(rows)]))


def stages(rows: Sequence[Row]) -> str:
    """Return how far κ, and with it the weights, are spread in the course of FedPSA's runs."""
    parts = ["## κ in the course of time", _STAGES_TEXT]
    header = ["stage", "uploads", "mean κ", "deviation", "5 %", "95 %", "temperature"]
    header.append("effective number")
    with_stages = [row for row in rows if any(line[0] for line in row.series.get("stages", ()))]
    for (dataset, alpha), found in groups(with_stages, "dataset", "alpha").items():
        lines = []
        for number, stage in enumerate(STAGES):
            values = [row.series["stages"][number] for row in found]
            counts = [value[0] for value in values if value[0]]
            if not counts:
                continue
            columns = [
                [value[column] for value in values if value[column] is not None]
                for column in range(1, 7)
            ]
            means = [fmean(column) if column else None for column in columns]
            texts = [markdown.number(mean, 3) for mean in means]
            lines.append([stage, markdown.number(fmean(counts), 0), *texts])
        parts += [f"### {markdown.place(dataset, alpha)}", markdown.table(header, lines)]
    return "\n\n".join(parts) if with_stages else ""


def motivation(rows: Sequence[Row]) -> str:
    """Return κ by version gap, and what it led to."""
    parts = []
    for (dataset, alpha), found in groups(rows, "dataset", "alpha").items():
        parts.append(f"## {markdown.place(dataset, alpha)}")
        lines = [
            [
                str(method),
                markdown.estimate(over_seeds(own, "accuracy", 100.0)),
                mean_text(own, "mean_staleness", 2),
                mean_text(own, "mean_effective_number", 2),
                mean_text(own, "mean_kappa", 3),
            ]
            for (method,), own in groups(found, "method").items()
        ]
        header = ["method", "accuracy (%)", "staleness", "effective number", "mean κ"]
        parts.append(markdown.table(header, lines))
        early, late = gap_bins(found, "early"), gap_bins(found, "late")
        lines = []
        for low, high in GAP_BINS:
            values = [next((b for b in bins if b[0] == low), None) for bins in (early, late)]
            if any(values):
                line = [str(low) if low == high else f"{low} to {high}"]
                for value in values:
                    line += ["0", markdown.NOTHING] if value is None else [str(value[2])]
                    line += [] if value is None else [markdown.number(value[3], 3)]
                lines.append([*line, markdown.number(time_weight((low + high) / 2), 3)])
        if lines:
            header = ["version gap τ", "uploads early", "κ early", "uploads late", "κ late"]
            parts.append(markdown.table([*header, "1/√(1+τ)"], lines))
    return "\n\n".join(parts)


def _interval(centre: float) -> str:
    return f"{markdown.number(centre - 0.05, 1)} to {markdown.number(centre + 0.05, 1)}"
