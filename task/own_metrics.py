"""Metrics that a task brings itself: computed once over all samples, as many have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from task.errors import TaskError

MetricsFn = Callable[[Any, Tensor], Mapping[str, float]]

_TAKEN = ("loss", "num-examples")
_LONGEST_NAME = 128


def on_cpu(outputs: Any) -> Any:
    """Return a model's outputs on the CPU: a tensor, or tuples, lists and dicts of them.

    Of anything else only its `logits` are kept, under that name.
    """
    if isinstance(outputs, Tensor):
        return outputs.cpu()
    if isinstance(logits := getattr(outputs, "logits", None), Tensor):
        return SimpleNamespace(logits=logits.cpu())
    if isinstance(outputs, Mapping):
        return {key: on_cpu(value) for key, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return [on_cpu(value) for value in outputs]
    raise TaskError(
        f"metrics: the model returns a {type(outputs).__name__}, whose batches cannot be put "
        "together; it must return a tensor, a tuple, list or dict of them, or have `logits`"
    )


def own_metrics(metrics_fn: MetricsFn, outputs: Sequence[Any], targets: Tensor) -> dict[str, float]:
    """Return what a task's `metrics` makes of the outputs of all batches, checked."""
    try:
        found = metrics_fn(_together(outputs), targets.cpu())
        values = {name: float(value) for name, value in found.items()}
    except Exception as error:  # anything may come out of a user's metrics
        raise TaskError(
            f"metrics(outputs, targets) failed: {error}; it must return numbers by their names"
        ) from error
    for name in values:
        if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
            raise TaskError(f"metrics(outputs, targets) calls a number {name!r}: no such name")
        if name in _TAKEN:
            raise TaskError(f"metrics(outputs, targets) returns {name!r}, which the app reports")
    return values


def _together(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, SimpleNamespace):
        return SimpleNamespace(logits=_together([part.logits for part in parts]))
    if isinstance(first, dict):
        return {key: _together([part[key] for part in parts]) for key in first}
    return tuple(_together(list(column)) for column in zip(*parts, strict=True))
