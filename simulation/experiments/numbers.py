"""Means, deviations and correlations, with nothing behind them but the standard library."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev


@dataclass(frozen=True)
class Estimate:
    """A number measured with several seeds.

    Parameters
    ----------
    by_seed : Mapping[int, float]
        The values.
    """

    by_seed: Mapping[int, float]

    def __bool__(self) -> bool:
        return bool(self.by_seed)

    def __len__(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.by_seed.values())

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; None for a single one."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def standard_error(self) -> float | None:
        """The deviation of the mean."""
        deviation = self.deviation
        return None if deviation is None else deviation / math.sqrt(len(self.by_seed))

    def minus(self, other: Estimate) -> Estimate:
        """Return the differences, seed by seed: what both share cancels out."""
        common = self.by_seed.keys() & other.by_seed.keys()
        return Estimate({seed: self.by_seed[seed] - other.by_seed[seed] for seed in sorted(common)})


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where it is not defined."""
    if len(x) < 2:
        return None
    mean_x, mean_y = fmean(x), fmean(y)
    dx, dy = [value - mean_x for value in x], [value - mean_y for value in y]
    norms = math.sqrt(math.fsum(d * d for d in dx)) * math.sqrt(math.fsum(d * d for d in dy))
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / norms if norms > 0 else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's correlation: Pearson's of the ranks."""
    return pearson(ranks(x), ranks(y))


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order) or values[order[place]] != values[order[start]]:
            for index in order[start:place]:
                result[index] = (start + 1 + place) / 2
            start = place
    return result


def binned(pairs: Sequence[Sequence[float]], width: float = 0.1) -> list[tuple[float, float, int]]:
    """Return the mean of y in bins of x that are not empty: (centre, mean, number)."""
    bins: dict[int, list[float]] = defaultdict(list)
    for x, y in pairs:
        # The addend keeps 0.3 out of the bin below, where rounding would put it.
        number = min(math.floor(x / width + 1e-9), round(1 / width) - 1)
        bins[number].append(y)
    return [
        (round((number + 0.5) * width, 9), fmean(values), len(values))
        for number, values in sorted(bins.items())
    ]


def interpolated(curve: Sequence[Sequence[float]], x: float) -> float:
    """Return the value of a curve at x, between its points on straight lines."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x1, y1), (x2, y2) in pairwise(curve):
        if x <= x2:
            return y2 if x2 == x1 else y1 + (y2 - y1) * (x - x1) / (x2 - x1)
    return curve[-1][1]
