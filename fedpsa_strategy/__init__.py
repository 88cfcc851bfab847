"""Asynchronous federated learning on Flower: FedPSA and its peers as strategies.

The strategies need no torch; what does (`Probe`, `sensitivity`, `make_reply`) is imported on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedpsa_strategy.probe.calibration import Calibration
from fedpsa_strategy.probe.sketch import Sketch
from fedpsa_strategy.server.ca2fl import CA2FL
from fedpsa_strategy.server.clock import (
    ConstantLatency,
    LongTailLatency,
    UniformLatency,
    VirtualClock,
    WallClock,
)
from fedpsa_strategy.server.fedasync import FedAsync
from fedpsa_strategy.server.fedavg import FedAvg
from fedpsa_strategy.server.fedbuff import FedBuff
from fedpsa_strategy.server.fedfa import FedFa
from fedpsa_strategy.server.fedpac import FedPAC
from fedpsa_strategy.server.fedpsa import FedPSA
from fedpsa_strategy.server.strategy import AsyncStrategy

if TYPE_CHECKING:
    from fedpsa_strategy.client.mod import fedpsa_mod
    from fedpsa_strategy.client.reply import make_reply
    from fedpsa_strategy.probe.probe import Probe
    from fedpsa_strategy.probe.sensitivity import sensitivity

_NEEDS_TORCH = {
    "Probe": "fedpsa_strategy.probe.probe",
    "fedpsa_mod": "fedpsa_strategy.client.mod",
    "make_reply": "fedpsa_strategy.client.reply",
    "sensitivity": "fedpsa_strategy.probe.sensitivity",
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
