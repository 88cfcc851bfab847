"""Asynchronous federated learning on Flower: FedPSA and its peers as strategies.

The strategies need no torch; what does (`Probe`, `sensitivity`, `make_reply`) is imported on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedpsa_strategy.ca2fl import CA2FL
from fedpsa_strategy.calibration import Calibration
from fedpsa_strategy.clock import (
    ConstantLatency,
    LongTailLatency,
    UniformLatency,
    VirtualClock,
    WallClock,
)
from fedpsa_strategy.fedasync import FedAsync
from fedpsa_strategy.fedavg import FedAvg
from fedpsa_strategy.fedbuff import FedBuff
from fedpsa_strategy.fedfa import FedFa
from fedpsa_strategy.fedpac import FedPAC
from fedpsa_strategy.fedpsa import FedPSA
from fedpsa_strategy.sketch import Sketch
from fedpsa_strategy.strategy import AsyncStrategy

if TYPE_CHECKING:
    from fedpsa_strategy.client import make_reply
    from fedpsa_strategy.mod import fedpsa_mod
    from fedpsa_strategy.parameter_sensitivity import sensitivity
    from fedpsa_strategy.probe import Probe

_NEEDS_TORCH = {
    "Probe": "fedpsa_strategy.probe",
    "fedpsa_mod": "fedpsa_strategy.mod",
    "make_reply": "fedpsa_strategy.client",
    "sensitivity": "fedpsa_strategy.parameter_sensitivity",
}

__all__ = [
    "CA2FL",
    "AsyncStrategy",
    "Calibration",
    "ConstantLatency",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedFa",
    "FedPAC",
    "FedPSA",
    "LongTailLatency",
    "Probe",
    "Sketch",
    "UniformLatency",
    "VirtualClock",
    "WallClock",
    "fedpsa_mod",
    "make_reply",
    "sensitivity",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use."""
    if name in _NEEDS_TORCH:
        value = getattr(import_module(_NEEDS_TORCH[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
