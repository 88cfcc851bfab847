"""Tables of the pages about the reproduction, from files in `results/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from simulation.experiments import paper
from simulation.experiments.derived import costs_per_upload
from simulation.experiments.markdown import number, table
from simulation.experiments.numbers import interpolated
from simulation.experiments.rows import STAGES, Row, from_lines

ROOT = Path(__file__).parents[1]


def rows_of(name: str) -> list[Row]:
    """Return the completed rows of an experiment's results."""
    text = (ROOT / "results" / name / "cells.jsonl").read_text(encoding="utf-8")
    return [row for row in from_lines(text) if row.completed]


def accuracy_table() -> str:
    """Return accuracies and areas on Fashion-MNIST, α = 0.1, three seeds."""
    lines = []
    for method, found in _by(rows_of("table-accuracy"), "method", alpha=0.1):
        published = paper.accuracy(found[0].labels)
        ends = _percents(found, "accuracy")
        lines.append(
            [
                method,
                _estimate(ends, 2),
                "–" if published is None else f"{published:.2f}",
                "–" if published is None else f"{fmean(ends) - published:+.2f}",
                f"{fmean(_percents(found, 'late_accuracy')):.2f}",
                f"{fmean(_numbers(found, 'area_under_curve')):.3f}",
                _estimate([100 * interpolated(row.curve, 1) for row in found], 1),
            ]
        )
    heads = ["method", "accuracy", "paper", "difference", "last tenth", "area", "after one day"]
    return table(heads, lines)


def skew_table() -> str:
    """Return the same for less skewed clients, one seed."""
    rows = rows_of("table-accuracy")
    lines = []
    for method, _ in _by(rows, "method", alpha=1.0):
        cells = []
        for alpha in (0.5, 1.0):
            ((_, found),) = _by(rows, "alpha", method=method, alpha=alpha, seed=0)
            published = paper.accuracy(found[0].labels)
            cells += [
                f"{_percents(found, 'accuracy')[0]:.2f}",
                "–" if published is None else f"{published:.2f}",
                f"{_percents(found, 'late_accuracy')[0]:.2f}",
                f"{_numbers(found, 'area_under_curve')[0]:.3f}",
            ]
        lines.append([method, *cells])
    columns = [f"{alpha}{name}" for alpha in ("α = 0.5", "α = 1") for name in _SKEW]
    return table(["method", *columns], lines)


_SKEW = ("", ": paper", ": last tenth", ": area")


def fair_table() -> str:
    """Return final accuracies with both ways in which the learning rate may decay."""
    usual = rows_of("table-accuracy")
    lines = []
    for method, (row,) in _by(rows_of("table-accuracy-fair"), "method"):
        ((_, (before,)),) = _by(usual, "method", method=method, alpha=0.1, seed=0)
        values = [f"{100 * (each.number('accuracy') or 0):.2f}" for each in (before, row)]
        late = [f"{100 * (each.number('late_accuracy') or 0):.2f}" for each in (before, row)]
        versions = f"{int(before.number('versions') or 0):,}"
        lines.append([method, versions, values[0], late[0], values[1], late[1]])
    heads = ["method", "versions", "decay per version", "last tenth"]
    return table([*heads, "decay per upload", "last tenth"], lines)


def overhead_table() -> str:
    """Return what an upload costs with the linear model, by method."""
    lines = []
    for method, rows in _by(rows_of("figure-overhead"), "method"):
        costs = costs_per_upload(rows)
        numbers = [(costs["train"], 1), (costs["sensitivity"] or None, 1), (costs["server"], 2)]
        texts = [number(value, decimals) for value, decimals in numbers]
        lines.append([method, *texts, number(costs["up"], 1)])
    heads = ["method", "training (ms)", "sensitivity and sketch (ms)", "server (ms)", "up (kB)"]
    return table(heads, lines)


def ablation_table() -> str:
    """Return FedPSA without its parts, by split and concurrency."""
    rows = rows_of("table-ablation")
    places = [(alpha, share) for alpha in (0.1, 1.0) for share in (0.1, 0.2, 0.3)]
    lines = []
    for variant, found in _by(rows, "variant"):
        by_place = {(row.labels["alpha"], row.labels["concurrency"]): row for row in found}
        cells = [f"{_percents([by_place[place]], 'accuracy')[0]:.2f}" for place in places]
        lines.append([variant, *cells])
    heads = [f"α = {alpha:g}: {share}" for alpha, share in places]
    return table(["variant", *heads], lines)


def times_table() -> str:
    """Return accuracies at the end and over the last tenth, by law of response times."""
    rows = rows_of("table-heterogeneity")
    times = list(dict.fromkeys(str(row.labels["times"]) for row in rows))
    lines = []
    for method, found in _by(rows, "method"):
        by_times = {row.labels["times"]: row for row in found}
        cells = [[by_times[name]] for name in times]
        ends = [_percents(cell, "accuracy")[0] for cell in cells]
        late = [_percents(cell, "late_accuracy")[0] for cell in cells]
        lines.append([method, *(f"{a:.2f} ({b:.2f})" for a, b in zip(ends, late, strict=True))])
    versions = {row.labels["times"]: int(row.numbers["versions"] or 0) for row in rows}
    lines.append(["versions", *(f"{versions[name]:,}" for name in times)])
    return table(["method", *times], lines)


def stages_table() -> str:
    """Return what κ, temperature and weights are in the course of FedPSA's runs, α = 0.1."""
    lines = []
    for name, folder in (
        ("linear, 10 days", "table-accuracy"),
        ("perceptron, 1 day", "table-midpoint"),
        ("MNIST's CNN, a quarter wide, 0.3 days", "table-midpoint-cnn"),
    ):
        ((_, found),) = _by(rows_of(folder), "method", method="FedPSA", alpha=0.1)
        for number_of_stage, stage in enumerate(STAGES):
            values = zip(*(row.series["stages"][number_of_stage] for row in found), strict=True)
            _, mean, deviation, _, _, heat, counted = (
                fmean(value for value in column if value is not None) for column in values
            )
            texts = [number(mean, 3), number(deviation, 3), number(heat, 2), number(counted, 3)]
            lines.append([name, stage, str(len(found)), *texts])
    heads = ["model", "stage", "seeds", "mean κ", "deviation", "temperature", "effective number"]
    return table(heads, lines)


def held_out_table() -> str:
    """Return the accuracy of one model on two choices of test images."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "held_out.json").read_text())
    lines = [[name, _estimate(values, 2)] for name, values in measured["accuracy"].items()]
    return table(["test images", "accuracy (%)"], lines)


def _by(rows: Iterable[Row], key: str, **wanted: object) -> list[tuple[str, list[Row]]]:
    """Return the rows with these labels by another one, in the order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if all(row.labels[name] == value for name, value in wanted.items()):
            found.setdefault(str(row.labels[key]), []).append(row)
    return list(found.items())


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if (value := row.numbers[name]) is not None]


def _percents(rows: Sequence[Row], name: str) -> list[float]:
    return [100 * value for value in _numbers(rows, name)]


def _estimate(values: Sequence[float], decimals: int) -> str:
    mean = f"{fmean(values):.{decimals}f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):.{decimals}f}"
