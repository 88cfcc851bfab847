"""The figures; each function draws into a figure of matplotlib from rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from simulation.experiments import markdown
from simulation.experiments.cells import CONTROL, Label
from simulation.experiments.derived import (
    all_pairs,
    correlations,
    costs_per_upload,
    gap_bins,
    groups,
    time_weight,
)
from simulation.experiments.numbers import binned, interpolated
from simulation.experiments.rows import Row
from simulation.experiments.style import INK, OTHER_COLOURS, colour_of
from simulation.experiments.tables import Pivot, over_seeds

_GRID_POINTS = 80
_PANELS = 3  # side by side
_LEGEND_ENTRY = 1.1  # inches
_EARLY = 0.1  # part of the time whose low accuracies may lie below the axes
_LEAST_SPAN = 0.02  # of the full scale, on an axis of results: less would make noise look large


def draw_pivot(figure: Any, rows: Sequence[Row], pivot: Pivot) -> None:
    """Draw the entries of tables as points, with the paper's beside them."""
    blocks = pivot.blocks(rows)
    # Panels of one block, wrapped like words.
    width = min(_PANELS, max(len(pivot.columns(block)) for block in blocks))
    lines = [
        (block, columns[start : start + width])
        for block in blocks
        for columns in [pivot.columns(block)]
        for start in range(0, len(columns), width)
    ]
    height = sum(0.28 * len(pivot.row_names(block)) + 0.75 for block, _ in lines)
    # Wide enough for the line above the panels.
    figure.set_size_inches(max(5.0, 1.2 + 2.6 * width), height + 0.6)
    grid = figure.subplots(len(lines), width, squeeze=False, sharey="row")
    compared: list[Any] = []
    any_paper, layout = False, pivot
    for (block, columns), line in zip(lines, grid, strict=True):
        pivot = layout.suited(block)
        names = pivot.row_names(block)
        compared += line[: len(columns)].tolist() if pivot is layout else []
        for axes, column in zip(line, columns, strict=False):
            for index, name in enumerate(names):
                colour, value = colour_of(name, index), pivot.estimate(block, name, column)
                if value:
                    axes.errorbar(
                        value.mean,
                        index,
                        xerr=value.deviation,
                        fmt="o",
                        color=colour,
                        markersize=5,
                        capsize=2.5,
                        elinewidth=1.2,
                    )
                    axes.plot(
                        list(value.by_seed.values()),
                        [index] * len(value),
                        "|",
                        color=colour,
                        alpha=0.6,
                        markersize=7,
                    )
                published = pivot.published(block, name, column)
                if published is not None:
                    any_paper = True
                    axes.plot(published, index, "D", mfc="none", mec=INK, markersize=4.5)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(f"{pivot.block_title(block)}\n{pivot.column_title(column)}")
        for axes in line[len(columns) :]:
            axes.set_visible(False)
    accuracy = layout.number == "accuracy"
    whole = 100.0 if accuracy else max(row.scale["days"] for row in rows)
    _share_span(compared, _LEAST_SPAN * whole)
    what = "final accuracy (%)" if accuracy else "area under the curve (days)"
    if accuracy and not compared:
        what = "final test loss"
    several = len({row.labels["seed"] for row in rows if row.completed}) > 1
    note = (
        "●  mean ± standard deviation   |  single seeds" if several else "●  1 seed, no error bar"
    )
    note += "   ◇  paper" if any_paper else ""
    figure.suptitle(f"{what}      {note}", fontsize=8.5, x=0.01, ha="left")


def _share_span(panels: Sequence[Any], least: float) -> None:
    """Give all panels the same scale: a distance means as much in one as in another."""
    drawn = [axes for axes in panels if axes.has_data()]
    widest = max((axes.dataLim.width for axes in drawn), default=0.0)
    for axes in drawn:
        low, high = axes.dataLim.intervalx
        axes.set_xlim(_widened(low, high, max(1.2 * widest, least)))


def _widened(low: float, high: float, least: float) -> tuple[float, float]:
    """Return limits at least so far apart, around the same middle."""
    more = max(0.0, least - (high - low)) / 2
    return low - more, high + more


def draw_curves(figure: Any, rows: Sequence[Row]) -> None:
    """Draw accuracy against virtual time, mean and range over seeds."""
    datasets = [dataset for (dataset,) in groups(rows, "dataset")]
    alphas = [alpha for (alpha,) in groups(rows, "alpha")]
    width = 3.4 if len(alphas) > 1 else 6.0
    figure.set_size_inches(width * len(alphas) + 0.6, 2.8 * len(datasets) + 0.9)
    grid = figure.subplots(len(datasets), len(alphas), squeeze=False, sharey="row")
    by_place = groups(rows, "dataset", "alpha")
    for dataset, line in zip(datasets, grid, strict=True):
        for alpha, axes in zip(alphas, line, strict=True):
            axes.set_visible((dataset, alpha) in by_place)
            for (method,), own in groups(by_place.get((dataset, alpha), []), "method").items():
                _draw_mean_curve(axes, str(method), own)
            axes.set_title(markdown.place(dataset, alpha))
            axes.set_xlabel("virtual days")
            axes.set_xlim(0, max(row.scale["days"] for row in rows))
        line[0].set_ylabel("test accuracy (%)")
        line[0].set_ylim(bottom=_lowest(row for row in rows if row.labels["dataset"] == dataset))
    _share_legend(figure, grid)


def _lowest(rows: Iterable[Row]) -> float:
    """Return where accuracies begin, in tens of percent, once the first steps are made."""
    later = [
        100 * accuracy
        for row in rows
        for time, accuracy in row.curve
        if time >= _EARLY * row.scale["days"]
    ]
    return 10 * (min(later) // 10) if later else 0.0


def _draw_mean_curve(axes: Any, method: str, rows: Sequence[Row]) -> None:
    curves = [row.curve for row in rows if row.completed and row.curve]
    if not curves:
        return
    end = min(curve[-1][0] for curve in curves)
    times = [end * i / (_GRID_POINTS - 1) for i in range(_GRID_POINTS)]
    values = [[100 * interpolated(curve, time) for curve in curves] for time in times]
    control = method == CONTROL
    axes.plot(
        times,
        [fmean(found) for found in values],
        color=colour_of(method, 0),
        linewidth=2.0 if method == "FedPSA" else 1.3,
        linestyle="--" if control else "-",
        # The control on top: where nothing but its dashes differs, FedPSA does what it does.
        zorder={CONTROL: 4, "FedPSA": 3}.get(method, 2),
        label=method,
    )
    if len(curves) > 1:
        axes.fill_between(
            times,
            [min(found) for found in values],
            [max(found) for found in values],
            color=colour_of(method, 0),
            alpha=0.13,
            linewidth=0,
        )


def draw_hyper(figure: Any, rows: Sequence[Row]) -> None:
    """Draw the two grids as heat maps."""
    places = groups(rows, "dataset", "alpha")
    figure.set_size_inches(9.2, 3.6 * len(places) + 0.5)
    grid = figure.subplots(len(places), 2, squeeze=False)
    for ((dataset, alpha), found), line in zip(places.items(), grid, strict=True):
        by_grid = groups(found, "grid")
        control = over_seeds(by_grid[("control",)], "accuracy", 100.0)
        beside = f"   ({CONTROL}: {markdown.number(control.mean, 1)} %)" if control else ""
        known = [value for own in groups(found, "grid", "x", "y").values() if (value := _mean(own))]
        limits = _widened(min(known, default=0), max(known, default=0), 100 * _LEAST_SPAN)
        for name, axes in zip(("γ, δ", "L_s, L_q"), line, strict=True):
            _draw_heat_map(axes, by_grid[(name,)], name, limits)
            axes.set_title(f"{markdown.place(dataset, alpha)}{beside}")


def _draw_heat_map(axes: Any, rows: Sequence[Row], names: str, limits: tuple[float, float]) -> None:
    x_name, y_name = (
        part.replace("L_s", "$L_s$").replace("L_q", "$L_q$") for part in names.split(", ")
    )
    xs, ys = [x for (x,) in groups(rows, "x")], [y for (y,) in groups(rows, "y")]
    entries = groups(rows, "x", "y")
    values = [[_mean(entries.get((x, y), [])) for x in xs] for y in ys]
    low, high = limits
    shown = [[float("nan") if value is None else value for value in line] for line in values]
    axes.imshow(shown, cmap="viridis", aspect="auto", origin="lower", vmin=low, vmax=high)
    axes.grid(visible=False)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value is not None:
                dark = value < (low + high) / 2
                axes.text(
                    column,
                    row,
                    markdown.number(value, 1),
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                    fontsize=8.5,
                )
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)


def _mean(rows: Sequence[Row]) -> float | None:
    found = over_seeds(rows, "accuracy", 100.0)
    return found.mean if found else None


def draw_overhead(figure: Any, rows: Sequence[Row]) -> None:
    """Draw what an upload costs as bars."""
    places = groups(rows, "dataset", "alpha")
    count = max(len(groups(found, "method")) for found in places.values())
    figure.set_size_inches(10.0, (0.3 * count + 1.0) * len(places) + 0.5)
    grid = figure.subplots(len(places), 3, squeeze=False, sharey="row")
    for ((dataset, _), found), line in zip(places.items(), grid, strict=True):
        by_method = groups(found, "method")
        names = [str(method) for (method,) in by_method]
        costs = [costs_per_upload(own) for own in by_method.values()]
        train = [cost["train"] or 0.0 for cost in costs]
        colours = [colour_of(name, 0) for name in names]
        line[0].barh(names, train, color=colours)
        extra = [cost["sensitivity"] or 0.0 for cost in costs]
        line[0].barh(names, extra, left=train, color=INK, alpha=0.55)
        line[1].barh(names, [cost["server"] or 0.0 for cost in costs], color=colours)
        up = [cost["up"] or 0.0 for cost in costs]
        line[2].barh(names, up, color=colours)
        line[2].barh(names, [c["down"] or 0.0 for c in costs], left=up, color=colours, alpha=0.45)
        titles = ("client: training + sensitivity (ms)", "server (ms)", "bytes: up + down (kB)")
        for axes, title in zip(line, titles, strict=True):
            axes.set_title(f"{markdown.data_name(dataset)}, per upload\n{title}")
            axes.grid(axis="y", visible=False)
        line[0].invert_yaxis()


def draw_kappa(figure: Any, rows: Sequence[Row]) -> None:
    """Draw alignment against κ: single uploads, means of bins, and how many there are."""
    places = groups(rows, "dataset", "alpha")
    figure.set_size_inches(4.6 * len(places) + 0.8, 4.6)
    grid = figure.subplots(
        2, len(places), squeeze=False, sharex="col", gridspec_kw={"height_ratios": [3, 1]}
    )
    for number, ((dataset, alpha), found) in enumerate(places.items()):
        above, below = grid[0][number], grid[1][number]
        pairs = all_pairs(found)
        above.plot(
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            ".",
            color=OTHER_COLOURS[1],
            markersize=2.5,
            alpha=0.25,
            rasterized=len(pairs) > 1000,
        )
        bins = binned(pairs)
        centres = [centre for centre, _, _ in bins]
        above.plot(centres, [mean for _, mean, _ in bins], "o-", color=OTHER_COLOURS[0])
        above.set_title(markdown.place(dataset, alpha))
        above.set_ylabel("alignment of gradients")
        below.bar(centres, [count for _, _, count in bins], width=0.09, color=OTHER_COLOURS[0])
        below.set_ylabel("uploads")
        below.set_yscale("log")
        below.set_xlabel("κ")
        above.annotate(
            _correlation_note(found),
            (0.02, 0.98),
            xycoords="axes fraction",
            va="top",
            fontsize=7.5,
        )


def _correlation_note(rows: Sequence[Row]) -> str:
    lines = []
    for kind, title in (("raw", "uploads"), ("binned", "bins")):
        parts = []
        for name, letter in (("pearson", "r"), ("spearman", "ρ")):
            values = [correlations(row)[kind, name] for row in rows if row.completed]
            known = [value for value in values if value is not None]
            if known:
                parts.append(f"{letter} = {markdown.number(fmean(known), 2)}")
        lines.append(f"{title}: {', '.join(parts) or '–'}")
    return "\n".join(lines)


def draw_motivation(figure: Any, rows: Sequence[Row]) -> None:
    """Draw κ and the time-based weight against the version gap, and the accuracies beside."""
    places = groups(rows, "dataset", "alpha")
    figure.set_size_inches(3.6 * (len(places) + 1), 3.9)
    *panels, last = figure.subplots(1, len(places) + 1, squeeze=False)[0]
    for axes in panels[1:]:
        axes.sharey(panels[0])
    largest = 1
    for axes, ((dataset, alpha), found) in zip(panels, places.items(), strict=True):
        for stage, colour in zip(("early", "late"), OTHER_COLOURS, strict=False):
            bins = gap_bins(found, stage)
            if not bins:
                continue
            largest = max(largest, bins[-1][1])
            gaps = [1 + (low + high) / 2 for low, high, *_ in bins]
            means = [mean for *_, mean, _ in bins]
            axes.plot(gaps, means, "o-", color=colour, markersize=4, label=f"κ, {stage} third")
            axes.fill_between(
                gaps,
                [mean - deviation for *_, mean, deviation in bins],
                [mean + deviation for *_, mean, deviation in bins],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.set_title(markdown.place(dataset, alpha))
    for axes in panels:
        gaps = [1 + largest * i / 100 for i in range(101)]
        weights = [time_weight(gap - 1) for gap in gaps]
        axes.plot(gaps, weights, "--", color=INK, alpha=0.7, label="1/√(1+τ)")
        axes.set_xscale("log")
        axes.set_xlabel("1 + version gap τ")
    panels[0].set_ylabel("weight of an upload before any normalisation")
    panels[0].legend(fontsize=7.5, loc="lower left")
    _draw_accuracies(last, places)


def _draw_accuracies(axes: Any, places: dict[tuple[Label, ...], list[Row]]) -> None:
    methods = list(
        dict.fromkeys(str(row.labels["method"]) for found in places.values() for row in found)
    )
    step = 0.5 / len(methods)
    for number, method in enumerate(methods):
        values = [
            over_seeds([row for row in found if row.labels["method"] == method], "accuracy", 100.0)
            for found in places.values()
        ]
        shown = [
            (place + (number + 0.5) * step - 0.25, value)
            for place, value in enumerate(values)
            if value
        ]
        axes.errorbar(
            [x for x, _ in shown],
            [value.mean for _, value in shown],
            yerr=[value.deviation or float("nan") for _, value in shown],
            fmt="o",
            capsize=3,
            color=colour_of(method, 0),
            label=method,
        )
    names = [markdown.place(*key).replace(", ", "\n") for key in places]
    axes.set_xticks(range(len(places)), names)
    axes.set_xlim(-0.6, len(places) - 0.4)
    low, high = axes.get_ylim()
    axes.set_ylim(_widened(low, high, 100 * _LEAST_SPAN))
    axes.set_title("final accuracy (%)")
    axes.grid(axis="x", visible=False)
    axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(methods))


def _share_legend(figure: Any, grid: Any) -> None:
    """Give one legend to all panels."""
    found: dict[str, Any] = {}
    for axes in grid.flat:
        handles, names = axes.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    if found:
        columns = min(len(found), int(figure.get_figwidth() / _LEGEND_ENTRY))
        figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=columns)
