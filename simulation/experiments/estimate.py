"""Rough estimates of how long runs take, before they have begun."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from fedpsa_strategy.server.clock import DAY, LongTailLatency, UniformLatency
from simulation.experiments.cells import Cell

# For one upload of the paper's setting (5 epochs on a fiftieth of the data) on one core of a server
# CPU, eager step; only for lists and the first minutes of a display, which soon knows better.
SECONDS_PER_UPLOAD = {
    "digits": 0.02,
    "fmnist": 0.05,
    "mnist": 9.0,
    "cifar10": 8.0,
    "cifar100": 8.0,
}
STARTUP_SECONDS = 6.0


def expected_uploads(cell: Cell) -> float:
    """Return how many uploads a run will see.

    Of m clients kept busy, client i with response time L_i is at work a share ρ_i of the time. As
    idle clients are sampled alike, ρ_i = λ L_i (1 - ρ_i), with λ such that Σ ρ_i = m, and it makes
    ρ_i / L_i uploads per unit of time. A synchronous round lasts as long as its slowest client.
    """
    settings = cell.settings
    num = settings.num_clients
    busy = settings.max_in_flight or max(1, int(settings.fraction_train * num + 1e-9))
    if settings.latency == "constant":
        times = [float(settings.latency_max)] * num
    else:
        law = UniformLatency if settings.latency == "uniform" else LongTailLatency
        latency = law(low=settings.latency_min, high=settings.latency_max)
        times = [latency.quantile((i + 0.5) / num) for i in range(num)]
    duration = settings.virtual_days * DAY
    if settings.method.rounds:
        slowest = times[min(num - 1, int(num * busy / (busy + 1)))]
        return duration / slowest * busy
    if busy >= num:
        return duration * sum(1 / time for time in times)
    low, high = 0.0, 1e6
    for _ in range(100):
        rate = (low + high) / 2
        at_work = sum(rate * time / (1 + rate * time) for time in times)
        low, high = (rate, high) if at_work < busy else (low, rate)
    return duration * sum(rate / (1 + rate * time) for time in times)


def expected_seconds(cell: Cell, seconds_per_upload: Mapping[str, float] | None = None) -> float:
    """Return how long a run will take on one core, from what was measured for its dataset."""
    settings = cell.settings
    known = {**SECONDS_PER_UPLOAD, **(seconds_per_upload or {})}
    share = settings.local_epochs / 5 * 50 / settings.num_clients
    each = known.get(settings.data_name, SECONDS_PER_UPLOAD["digits"])  # an own task may be small
    return STARTUP_SECONDS + expected_uploads(cell) * each * share


def measured_seconds(rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Return seconds per upload by dataset, from uploads per second of finished runs."""
    return {dataset: 1 / statistics.median(values) for dataset, values in rates.items() if values}


def in_words(seconds: float) -> str:
    """Return a duration as a person would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"
