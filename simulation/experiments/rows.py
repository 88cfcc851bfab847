"""What is kept of a run: a small record, from which all tables and figures are made."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.watch.event_log import read_events
from fedpsa_strategy.watch.run_state import RunState, area_under_curve
from simulation.experiments.cells import Cell, Label
from simulation.experiments.store import CellStore, Summary

COMPLETED, FAILED, MISSING = "completed", "failed", "missing"

STAGES = {
    "first tenth": 0.1,
    "rest of the first third": 1 / 3,
    "second third": 2 / 3,
    "last third": 1.0,
}
"""Stages of a run, and at which share of the time they end."""

_STAGED = {"kappas", "effective_number"}  # what a version's report has for `kappa_stages`
_CURVE_POINTS = 80
_LATE = 0.1  # the share of the time over which late accuracy is averaged
_NUMBERS = (
    "accuracy",
    "best_accuracy",
    "loss",
    "area_under_curve",
    "versions",
    "uploads",
    "rejected",
    "mean_kappa",
    "mean_staleness",
    "mean_effective_number",
    "bytes_up",
    "bytes_down",
    "server_seconds",
    "mean_train_seconds",
    "mean_sensitivity_seconds",
    "uploads_per_second",
)


@dataclass(frozen=True)
class Row:
    """One cell of an experiment, as a line of ``cells.jsonl``."""

    labels: Mapping[str, Label]  # its place in the experiment
    id: str  # of its run
    status: str  # "completed", "failed" or "missing"
    reason: str = ""  # why it failed
    scale: Mapping[str, Any] = field(default_factory=dict)  # days, clients, partition, ...
    numbers: Mapping[str, float | None] = field(default_factory=dict)  # what came out
    curve: Sequence[Sequence[float]] = ()  # days and accuracies, thinned
    # What else a figure needs of its uploads: `pairs` or `gaps`; for FedPSA also `stages`.
    series: Mapping[str, Any] = field(default_factory=dict)
    model_sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python and packages
    machine: Mapping[str, Any] = field(default_factory=dict)  # what it ran on

    @property
    def completed(self) -> bool:
        """Whether there is anything to show."""
        return self.status == COMPLETED

    def number(self, name: str) -> float | None:
        """Return one of the numbers, None if it is not known."""
        return self.numbers.get(name)


def make_row(cell: Cell, store: CellStore, reason: str = "", series: str = "") -> Row:
    """Return the record of a cell, which failed if there is a reason why.

    `series` is what is wanted of its uploads: "pairs" of κ and alignment, or "gaps" of versions.
    """
    labels, scale = dict(cell.labels), _scale(cell)
    summary = store.finished(cell)
    if summary is None:
        status = FAILED if reason else MISSING
        return Row(labels, cell.id, status, reason=reason, scale=scale)
    sketched, duration = cell.settings.method.needs_sketch, cell.settings.virtual_days * DAY
    run = RunState()
    uploads: list[dict[str, Any]] = []
    versions: list[dict[str, Any]] = []
    kinds = ["evaluate", *(["upload"] if series else []), *(["aggregate"] if sketched else [])]
    for event in read_events(store.path(cell) / "events.jsonl", kinds=kinds):
        run(event)
        if event.kind != "evaluate":
            (uploads if event.kind == "upload" else versions).append(event.to_dict())
    curve = [(time / DAY, accuracy) for time, accuracy in run.curve]
    found: dict[str, Any] = {}
    if series == "pairs":
        found["pairs"] = kappa_pairs(uploads)
    elif series == "gaps":
        found["gaps"] = version_gaps(uploads, duration)
    # A sketched method of others may report something else.
    if told := [event for event in versions if event["report"].keys() >= _STAGED]:
        found["stages"] = kappa_stages(told, duration)
    circumstances = store.circumstances(cell)
    circumstances.pop("labels", None)
    return Row(
        labels,
        cell.id,
        COMPLETED,
        scale=scale,
        numbers=_numbers(summary, curve),
        curve=[[round(day, 4), round(accuracy, 5)] for day, accuracy in thinned(curve)],
        series=found,
        model_sha256=str(summary.get("model_sha256", "")),
        versions={"python": summary.get("python", "?"), **summary.get("packages", {})},
        machine=circumstances,
    )


def to_lines(rows: Iterable[Row]) -> str:
    """Return rows as lines of JSON."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def from_lines(text: str) -> list[Row]:
    """Return the rows that `to_lines` was given."""
    return [Row(**json.loads(line)) for line in text.splitlines()]


def recorded_rows(results: Path, series: str = "") -> dict[str, Row]:
    """Return the completed rows in a folder of results, by the ids of their runs.

    Every ``cells.jsonl`` in it, however deep, is of an experiment; `series` is what has to be there
    of single uploads.
    """
    found = {}
    for path in sorted(results.glob("**/cells.jsonl")):
        for row in from_lines(path.read_text(encoding="utf-8")):
            if row.completed and (not series or series in row.series):
                found[row.id] = row
    return found


def thinned(curve: Sequence[tuple[float, float]], points: int = _CURVE_POINTS) -> list[Any]:
    """Return about as many points of a curve, the first and the last among them."""
    if len(curve) <= points:
        return list(curve)
    step = (len(curve) - 1) / (points - 1)
    return [curve[round(i * step)] for i in range(points)]


def late_mean(curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean accuracy over the last tenth of the time: one evaluation may be a fluke."""
    if not curve:
        return None
    end = curve[-1][0]
    late = [(time, value) for time, value in curve if time >= (1 - _LATE) * end]
    area = area_under_curve(late)  # None: of a single point
    if area is None or late[-1][0] == late[0][0]:
        return late[-1][1]
    return area / (late[-1][0] - late[0][0])


def kappa_pairs(uploads: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """Return (κ, align) of the uploads that were measured."""
    pairs = []
    for upload in uploads:
        kappa, align = upload["report"].get("kappa"), upload["metrics"].get("align")
        if kappa is not None and align is not None:
            pairs.append([round(kappa, 4), round(align, 4)])
    return pairs


def version_gaps(
    uploads: Iterable[Mapping[str, Any]], duration: float
) -> dict[str, list[list[float]]]:
    """Return for the first and the last third of a run how κ depends on the version gap.

    For "early" and "late": gap τ, number of uploads, mean and deviation of κ.
    """
    kappas: dict[str, dict[int, list[float]]] = {
        "early": defaultdict(list),
        "late": defaultdict(list),
    }
    for upload in uploads:
        stage = "early" if upload["time"] <= duration / 3 else "late"
        middle = duration / 3 < upload["time"] < 2 * duration / 3
        kappa = upload["report"].get("kappa")
        if kappa is not None and not middle:
            kappas[stage][upload["staleness"]].append(kappa)
    return {
        stage: [
            [gap, len(values), round(fmean(values), 4), round(pstdev(values), 4)]
            for gap, values in sorted(by_gap.items())
        ]
        for stage, by_gap in kappas.items()
    }


def kappa_stages(
    aggregates: Iterable[Mapping[str, Any]], duration: float
) -> list[list[float | None]]:
    """Return how κ, the temperature and the weights develop in the course of a FedPSA run.

    For each stage of `STAGES`: uploads, mean and deviation of κ, its 5 % and 95 % quantiles, the
    mean temperature (None while warming up) and the mean effective number.
    """
    kappas: list[list[float]] = [[] for _ in STAGES]
    temperatures: list[list[float]] = [[] for _ in STAGES]
    effective: list[list[float]] = [[] for _ in STAGES]
    ends = [end * duration for end in STAGES.values()]
    for event in aggregates:
        stage = min(bisect_left(ends, event["time"]), len(ends) - 1)
        report = event["report"]
        kappas[stage] += report["kappas"]
        effective[stage].append(report["effective_number"])
        if (temperature := report.get("temperature")) is not None:
            temperatures[stage].append(temperature)
    return [
        [
            len(values),
            round(fmean(values), 4),
            round(pstdev(values), 4),
            *(round(float(q), 4) for q in np.quantile(values, (0.05, 0.95), method="nearest")),
            round(fmean(heat), 4) if heat else None,
            round(fmean(counts), 4),
        ]
        if values
        else [0, None, None, None, None, None, None]
        for values, heat, counts in zip(kappas, temperatures, effective, strict=True)
    ]


def _scale(cell: Cell) -> dict[str, Any]:
    settings = cell.settings
    return {
        "days": settings.virtual_days,
        "clients": settings.num_clients,
        "partition": "own" if settings.task else settings.partition,
        "concurrency": settings.max_in_flight or settings.fraction_train,
        "times": f"{settings.latency} {settings.latency_min}-{settings.latency_max}",
        "lr_decay_per": settings.lr_decay_per,
        "local_epochs": settings.local_epochs,
        "lr": settings.lr,
        "batch_size": settings.batch_size,
        "step": settings.step,
        # Left out at their defaults, as rows of earlier versions do.
        **({"model": settings.model} if settings.model != "default" else {}),
        **({"width": settings.model_width} if settings.model_width != 1 else {}),
        # Rows without it are of an earlier version, whose compiled step rounded differently.
        **({"compiled": "epochs"} if settings.step == "compiled" else {}),
    }


def _numbers(summary: Summary, curve: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    numbers = {name: _rounded(summary.get(name)) for name in _NUMBERS}
    numbers["late_accuracy"] = _rounded(late_mean(curve))
    return numbers


def _rounded(value: Any) -> float | None:
    return float(f"{value:.7g}") if isinstance(value, float) else value
