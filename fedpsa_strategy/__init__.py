"""Asynchronous federated learning on Flower: FedPSA and its peers as strategies.

Everything is imported on first use: the strategies need no torch, the methods no Flower either.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpsa_strategy.client.mod import fedpsa_mod
    from fedpsa_strategy.client.reply import make_reply
    from fedpsa_strategy.methods.base import BufferedRule, Method, Rule, Update, setting
    from fedpsa_strategy.probe.calibration import Calibration
    from fedpsa_strategy.probe.probe import Probe
    from fedpsa_strategy.probe.sensitivity import sensitivity
    from fedpsa_strategy.probe.sketch import Sketch
    from fedpsa_strategy.probe.state_dicts import arrays_of, load_arrays
    from fedpsa_strategy.server.callbacks import (
        Callback,
        DifferentialPrivacy,
        NormGuard,
        StalenessLimit,
    )
    from fedpsa_strategy.server.clock import (
        ConstantLatency,
        LongTailLatency,
        UniformLatency,
        VirtualClock,
        WallClock,
    )
    from fedpsa_strategy.server.fedpac import FedPAC
    from fedpsa_strategy.server.fedpsa import FedPSA
    from fedpsa_strategy.server.options import Evaluation, Failures, Limits, Training
    from fedpsa_strategy.server.strategies import (
        ACE,
        ACED,
        AREA,
        CA2FL,
        FADAS,
        FedAC,
        FedAsync,
        FedAvg,
        FedBuff,
        FedFa,
        Midpoint,
        Rescaled,
    )
    from fedpsa_strategy.server.strategy import AsyncStrategy
    from fedpsa_strategy.watch.comparison import Comparison, compare
    from fedpsa_strategy.watch.runs import Run, load

_PLACES = {
    "client.mod": ("fedpsa_mod",),
    "client.reply": ("make_reply",),
    "methods.base": ("BufferedRule", "Method", "Rule", "Update", "setting"),
    "probe.calibration": ("Calibration",),
    "probe.probe": ("Probe",),
    "probe.sensitivity": ("sensitivity",),
    "probe.sketch": ("Sketch",),
    "probe.state_dicts": ("arrays_of", "load_arrays"),
    "server.callbacks": ("Callback", "DifferentialPrivacy", "NormGuard", "StalenessLimit"),
    "server.clock": (
        "ConstantLatency",
        "LongTailLatency",
        "UniformLatency",
        "VirtualClock",
        "WallClock",
    ),
    "server.fedpac": ("FedPAC",),
    "server.fedpsa": ("FedPSA",),
    "server.options": ("Evaluation", "Failures", "Limits", "Training"),
    "server.strategies": (
        "ACE",
        "ACED",
        "AREA",
        "CA2FL",
        "FADAS",
        "FedAC",
        "FedAsync",
        "FedAvg",
        "FedBuff",
        "FedFa",
        "Midpoint",
        "Rescaled",
    ),
    "server.strategy": ("AsyncStrategy",),
    "watch.comparison": ("Comparison", "compare"),
    "watch.runs": ("Run", "load"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "ACE",
    "ACED",
    "AREA",
    "CA2FL",
    "FADAS",
    "AsyncStrategy",
    "BufferedRule",
    "Calibration",
    "Callback",
    "Comparison",
    "ConstantLatency",
    "DifferentialPrivacy",
    "Evaluation",
    "Failures",
    "FedAC",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedFa",
    "FedPAC",
    "FedPSA",
    "Limits",
    "LongTailLatency",
    "Method",
    "Midpoint",
    "NormGuard",
    "Probe",
    "Rescaled",
    "Rule",
    "Run",
    "Sketch",
    "StalenessLimit",
    "Training",
    "UniformLatency",
    "Update",
    "VirtualClock",
    "WallClock",
    "arrays_of",
    "compare",
    "fedpsa_mod",
    "load",
    "load_arrays",
    "make_reply",
    "sensitivity",
    "setting",
]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
