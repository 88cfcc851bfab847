"""Means, deviations and correlations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

_BIN = 0.1  # the width of bins of κ


@dataclass(frozen=True)
class Estimate:
    """A number measured with several seeds."""

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


def correlation(x: Sequence[float], y: Sequence[float], *, ranked: bool = False) -> float | None:
    """Return Pearson's correlation, or Spearman's of the ranks; None where it is not defined."""
    from scipy import stats  # takes a second

    if min(len(set(x)), len(set(y))) < 2:
        return None
    measure = stats.spearmanr if ranked else stats.pearsonr
    return float(measure(x, y).statistic)


def binned(pairs: Sequence[Sequence[float]]) -> list[tuple[float, float, int]]:
    """Return the mean of y in bins of x that are not empty: (centre, mean, number)."""
    bins: dict[int, list[float]] = defaultdict(list)
    for x, y in pairs:
        # The addend keeps 0.3 out of the bin below, where rounding would put it.
        number = min(math.floor(x / _BIN + 1e-9), round(1 / _BIN) - 1)
        bins[number].append(y)
    return [
        (round((number + 0.5) * _BIN, 9), fmean(values), len(values))
        for number, values in sorted(bins.items())
    ]


def interpolated(curve: Sequence[Sequence[float]], x: float) -> float:
    """Return the value of a curve at x, between its points on straight lines."""
    return float(np.interp(x, [point[0] for point in curve], [point[1] for point in curve]))
