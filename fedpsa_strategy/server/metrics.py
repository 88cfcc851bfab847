"""Combining the metrics of several clients."""

from __future__ import annotations

from flwr.app import MetricRecord, RecordDict


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
        if total > 0 and all(name in record for record in metrics):
            values = [_scalar(record, name, 0.0) for record in metrics]
            result[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    return result


def _scalar(record: MetricRecord, name: str, default: float) -> float:
    value = record.get(name, default)
    return default if isinstance(value, list) else value
