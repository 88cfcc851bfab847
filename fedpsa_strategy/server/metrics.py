"""Combining the metrics of several clients."""

from __future__ import annotations

import logging
import math
from statistics import median_low

from flwr.app import MetricRecord, RecordDict

log = logging.getLogger("flwr")

_MOST_OF_MEDIAN = 1000


def with_plausible_weights(records: list[RecordDict], weight_key: str) -> list[RecordDict]:
    """Return the records without those whose weight is negative, or outweighs all others.

    Parameters
    ----------
    records : list[RecordDict]
        Metrics of clients; those that tell no weight stay.
    weight_key : str
        The metric that weighs them.
    """
    weights = [
        _scalar(next(iter(item.metric_records.values())), weight_key, 1.0) for item in records
    ]
    most = math.inf if len(weights) < 3 else _MOST_OF_MEDIAN * max(1.0, median_low(weights))
    kept = [item for item, weight in zip(records, weights, strict=True) if 0 <= weight <= most]
    if len(kept) < len(records):
        log.warning(
            "Evaluation: %d replies are left out, whose %r is negative or above %g",
            len(records) - len(kept),
            weight_key,
            most,
        )
    return kept


def weighted_mean(records: list[RecordDict], weight_key: str) -> MetricRecord:
    """Return the mean of every scalar metric that all records have, weighted by `weight_key`.

    Unlike a strict average it tolerates clients that report something extra, so that one odd client
    cannot stop a run.
    """
    metrics = [
        next(item for item in record.values() if isinstance(item, MetricRecord))
        for record in records
    ]
    names = [
        name
        for name, value in metrics[0].items()
        if name != weight_key and not isinstance(value, list)
    ]
    weights = [float(_scalar(record, weight_key, 1.0)) for record in metrics]
    total = sum(weights)
    result = MetricRecord()
    for name in names:
        values = [
            value for record in metrics if not isinstance(value := record.get(name, []), list)
        ]
        if total > 0 and len(values) == len(metrics):
            result[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    return result


def _scalar(record: MetricRecord, name: str, default: float) -> float:
    value = record.get(name, default)
    return default if isinstance(value, list) else value
