"""Curves of bounded length, however long the run is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Point:
    """One or more neighbouring values, and when the last of them was."""

    time: float
    elapsed: float
    uploads: int
    total: float
    count: int
    low: float
    high: float

    def merge(self, later: Point) -> Point:
        """Take in a later point."""
        self.time, self.elapsed, self.uploads = later.time, later.elapsed, later.uploads
        self.total += later.total
        self.count += later.count
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        return self


@dataclass
class Series:
    """Values over time; when there are more than `limit`, neighbours are merged two by two."""

    limit: int
    points: list[Point] = field(default_factory=list)
    stride: int = 1  # values per full point

    def add(self, time: float, elapsed: float, uploads: int, value: float) -> None:
        """Add a value."""
        point = Point(time, elapsed, uploads, value, 1, value, value)
        if self.points and self.points[-1].count < self.stride:
            self.points[-1].merge(point)
        else:
            self.points.append(point)
        if len(self.points) > self.limit:
            odd = self.points[len(self.points) // 2 * 2 :]
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [first.merge(second) for first, second in pairs] + odd
            self.stride *= 2

    def rewind(self, time: float) -> None:
        """Forget what came after `time`."""
        self.points = [point for point in self.points if point.time <= time]

    def rows(self) -> list[list[float]]:
        """Return time, elapsed, uploads, mean, lowest and highest value of every point."""
        return [
            [p.time, p.elapsed, p.uploads, short(p.total / p.count), short(p.low), short(p.high)]
            for p in self.points
        ]


def short(value: float) -> float:
    """Return the value with as many digits as a curve can show."""
    return float(f"{value:.6g}")
