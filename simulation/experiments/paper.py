"""The paper's published numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulation.experiments.cells import Label

Lookup = Callable[[Mapping[str, Label]], float | None]

_PATH = Path(__file__).parents[1] / "paper.json"


def accuracy(labels: Mapping[str, Label]) -> float | None:
    """Return the final accuracy of a method, in percent."""
    return _find("table-accuracy", labels["dataset"], labels["method"], _alpha(labels))


def area(labels: Mapping[str, Label]) -> float | None:
    """Return the area under a method's curve, in days."""
    return _find("table-aulc", labels["dataset"], labels["method"], _alpha(labels))


def heterogeneity(labels: Mapping[str, Label]) -> float | None:
    """Return the final accuracy for a law and an interval of response times, in percent."""
    law, _, interval = str(labels["times"]).partition(" ")
    if labels["dataset"] != "cifar100":
        return None
    return _find("table-heterogeneity", interval, labels["method"], law)


def ablation(labels: Mapping[str, Label]) -> float | None:
    """Return the final accuracy of a variant of FedPSA, in percent."""
    if labels["dataset"] != "cifar10":
        return None
    return _find("table-ablation", _alpha(labels), labels["variant"], str(labels["concurrency"]))


def calibration(labels: Mapping[str, Label]) -> float | None:
    """Return the final accuracy for a kind and a size of the calibration batch, in percent."""
    if labels["dataset"] != "cifar10":
        return None
    return _find("table-calibration", _alpha(labels), str(labels["size"]), labels["batch"])


def correlation(kind: str, name: str) -> float | None:
    """Return a correlation of κ and alignment: "raw" or "binned", "pearson" or "spearman"."""
    return _find("figure-kappa", kind, name)


def _alpha(labels: Mapping[str, Label]) -> str:
    alpha = labels["alpha"]
    return alpha if isinstance(alpha, str) else str(float(alpha))


def _find(table: str, *keys: Label) -> float | None:
    found: Any = _numbers()[table]
    for key in keys:
        found = found.get(key)
        if found is None:
            return None
    return float(found)


@lru_cache(maxsize=1)
def _numbers() -> dict[str, Any]:
    # Some names are followed by a remark in parentheses.
    tables = json.loads(_PATH.read_text(encoding="utf-8"))
    return {name.partition(" ")[0]: table for name, table in tables.items()}
