"""Curves of bounded length, however long the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_POINTS = 400
_BINS = 240


@dataclass
class Point:
    """One or more neighbouring values, and when the last of them was."""

    time: float
    elapsed: float
    uploads: int
    total: float
    count: int
    low: float
    high: float

    def row(self) -> list[float]:
        """Return time, elapsed, uploads, mean, lowest and highest value."""
        mean = self.total / self.count
        return [short(self.time), short(self.elapsed), self.uploads, *map(short, (mean, self.low, self.high))]


@dataclass
class Series:
    """Values over time; when there are too many, neighbours are merged two by two."""

    points: list[Point] = field(default_factory=list)
    stride: int = 1  # values per full point

    def add(self, time: float, elapsed: float, uploads: int, value: float) -> None:
        """Add a value."""
        point = Point(time, elapsed, uploads, value, 1, value, value)
        if self.points and self.points[-1].count < self.stride:
            self.points[-1] = _merged(self.points[-1], point)
        else:
            self.points.append(point)
        if len(self.points) > _POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[-1:] if len(self.points) % 2 else []
            self.points = [_merged(*pair) for pair in pairs] + odd
            self.stride *= 2

    def rewind(self, time: float) -> None:
        """Forget what came after `time`."""
        self.points = [point for point in self.points if point.time <= time]

    def rows(self) -> list[list[float]]:
        """Return the rows of all points."""
        return [point.row() for point in self.points]


@dataclass
class Rate:
    """Uploads per real second, in bins that grow with the run."""

    width: float = 1.0
    bins: list[tuple[int, float, int]] = field(default_factory=list)  # count, time, uploads

    def add(self, time: float, elapsed: float, uploads: int) -> None:
        """Count an upload."""
        while elapsed >= self.width * _BINS:
            self.width *= 2
            if len(self.bins) % 2:
                self.bins.append((0, *self.bins[-1][1:]))
            halves = zip(self.bins[::2], self.bins[1::2], strict=True)
            self.bins = [(first[0] + second[0], *second[1:]) for first, second in halves]
        while len(self.bins) <= elapsed / self.width:
            self.bins.append((0, *self.bins[-1][1:]) if self.bins else (0, time, uploads))
        self.bins[-1] = (self.bins[-1][0] + 1, time, uploads)

    def rows(self, elapsed: float) -> list[list[float]]:
        """Return rows as those of a series, of the bins that are over at `elapsed`."""
        rows = []
        for index, (count, time, uploads) in enumerate(self.bins):
            end, rate = (index + 1) * self.width, short(count / self.width)
            if end <= elapsed:
                rows.append([short(time), short(end), uploads, rate, rate, rate])
        return rows


def short(value: float) -> float:
    """Return the value with as many digits as a curve can show."""
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def _merged(a: Point, b: Point) -> Point:
    low, high = min(a.low, b.low), max(a.high, b.high)
    return Point(b.time, b.elapsed, b.uploads, a.total + b.total, a.count + b.count, low, high)
