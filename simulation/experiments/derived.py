"""What is computed from rows for the figures and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from simulation.experiments.cells import Label
from simulation.experiments.numbers import binned, correlation
from simulation.experiments.rows import Row

GAP_BINS = (
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 4),
    (5, 8),
    (9, 16),
    (17, 32),
    (33, 64),
    (65, 128),
    (129, 256),
    (257, 512),
)


def groups(rows: Sequence[Row], *keys: str) -> dict[tuple[Label, ...], list[Row]]:
    """Return rows by some of their labels, in the order in which they were planned."""
    found: dict[tuple[Label, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.labels[key] for key in keys), []).append(row)
    return found


def costs_per_upload(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return milliseconds and kilobytes per upload, means over seeds.

    These are `train`, `sensitivity` (0 where there is none) and `server` in ms; `up` and `down` in
    kB.
    """
    done = [row for row in rows if row.completed and row.number("uploads")]

    def mean(name: str, factor: float, *, per_upload: bool) -> float | None:
        values = [
            value / ((row.number("uploads") or 1) if per_upload else 1)
            for row in done
            if (value := row.number(name)) is not None
        ]
        return factor * fmean(values) if values else None

    return {
        "train": mean("mean_train_seconds", 1e3, per_upload=False),
        "sensitivity": mean("mean_sensitivity_seconds", 1e3, per_upload=False) or 0.0,
        "server": mean("server_seconds", 1e3, per_upload=True),
        "up": mean("bytes_up", 1e-3, per_upload=True),
        "down": mean("bytes_down", 1e-3, per_upload=True),
    }


def correlations(row: Row) -> dict[tuple[str, str], float | None]:
    """Return the correlations of a run: (raw or binned, pearson or spearman)."""
    pairs = row.series.get("pairs", [])
    bins = binned(pairs)
    raw = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    # Two points always lie on a line.
    bins = bins if len(bins) > 2 else []
    means = [centre for centre, _, _ in bins], [mean for _, mean, _ in bins]
    return {
        ("raw", "pearson"): correlation(*raw),
        ("raw", "spearman"): correlation(*raw, ranked=True),
        ("binned", "pearson"): correlation(*means),
        ("binned", "spearman"): correlation(*means, ranked=True),
    }


def all_pairs(rows: Sequence[Row]) -> list[Sequence[float]]:
    """Return the pairs (κ, align) of all seeds."""
    return [pair for row in rows for pair in row.series.get("pairs", [])]


def time_weight(gap: float) -> float:
    """Return what FedAsync and FedBuff make of a version gap τ: 1/√(1+τ)."""
    return float((1 + gap) ** -0.5)


def gap_bins(rows: Sequence[Row], stage: str) -> list[tuple[int, int, int, float, float]]:
    """Return κ by bins of the version gap, over all seeds, "early" or "late" in the runs.

    For bins that are not empty: first and last gap, number of uploads, mean and deviation.
    """
    gaps = [item for row in rows for item in row.series.get("gaps", {}).get(stage, [])]
    bins = []
    for low, high in GAP_BINS:
        inside = [item for item in gaps if low <= item[0] <= high]
        count = sum(item[1] for item in inside)
        if not count:
            continue
        mean = sum(n * m for _, n, m, _ in inside) / count
        # Of the bin: the variances inside the groups, and that of the groups' means.
        variance = sum(n * (d * d + (m - mean) ** 2) for _, n, m, d in inside) / count
        bins.append((low, high, int(count), mean, variance**0.5))
    return bins
