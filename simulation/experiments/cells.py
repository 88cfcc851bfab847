"""A cell of a table: one run, known by the settings that decide its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from server_app.settings import MAY_CHANGE, Settings
from simulation.environment import ConfigValue

Label = str | int | float
RunConfig = dict[str, ConfigValue]

CONTROL = "Uniform"
"""The method that weighs all uploads alike; what a weighting is worth is its distance to it."""

METHODS: dict[str, RunConfig] = {
    "FedPSA": {"strategy": "fedpsa"},
    "FedBuff": {"strategy": "fedbuff"},
    "CA2FL": {"strategy": "ca2fl"},
    "FedAsync": {"strategy": "fedasync"},
    "FedFa": {"strategy": "fedfa"},
    "FedAvg": {"strategy": "fedavg"},
    "FedPAC": {"strategy": "fedpac"},
    CONTROL: {"strategy": "fedbuff", "staleness-exponent": 0.0},
}
"""What the methods of the tables are in the run config."""

# Raise it when a change of the code makes runs of before worthless: all cells are then run again.
_FORMAT = 1

_LIMITS = {"num-server-rounds", "virtual-days", "time-limit", "target-accuracy"}
WITHOUT_EFFECT = MAY_CHANGE - _LIMITS
"""Settings that say where and how a run is run, and change nothing in what comes out."""

_READ_BY: dict[str, tuple[str, ...]] = {
    "buffer-size": ("fedpsa", "fedbuff", "ca2fl", "fedfa"),
    "server-lr": ("fedbuff", "ca2fl"),
    "staleness-exponent": ("fedbuff", "fedasync"),
    "memory": ("ca2fl",),
    **dict.fromkeys(
        ("queue-size", "gamma", "delta", "thermometer", "signal", "alignment-every"), ("fedpsa",)
    ),
    **dict.fromkeys(("sketch-dim", "sketch-kind", "sketch-seed"), ("fedpsa",)),
    **dict.fromkeys(("calibration", "calibration-size", "calibration-seed"), ("fedpsa",)),
    **dict.fromkeys(("calibration-transport", "audit-fraction", "audit-tolerance"), ("fedpsa",)),
    **dict.fromkeys(("mixing", "staleness", "hinge-slope"), ("fedasync",)),
    **dict.fromkeys(("hinge-threshold", "proximal"), ("fedasync",)),
    **dict.fromkeys(("alignment", "head-lr", "head-epochs"), ("fedpac",)),
}


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Parameters
    ----------
    labels : Mapping[str, str | int | float]
        Its place in the experiment: `method`, `dataset`, `alpha`, `seed` and whatever else varies.
        Two cells with other labels may be the same run.
    settings : Settings
        What is run.
    """

    labels: Mapping[str, Label]
    settings: Settings

    @cached_property
    def id(self) -> str:
        """Equal for cells that have the same outcome, in every experiment."""
        identity = {"format": _FORMAT, **decisive_settings(self.settings)}
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def run_config(self) -> RunConfig:
        """The run config to launch it with; what the method does not read is left out."""
        values, defaults = self.settings.to_run_config(), Settings().to_run_config()
        places = {key: values[key] for key in WITHOUT_EFFECT if values[key] != defaults[key]}
        return {**decisive_settings(self.settings), **places}

    @property
    def name(self) -> str:
        """What a person calls it."""
        usual = ("method", "dataset", "alpha", "seed")
        more = [str(value) for key, value in self.labels.items() if key not in usual]
        labels = self.labels
        parts = [labels["method"], labels["dataset"], f"α {labels['alpha']:g}", *more]
        return " · ".join(str(part) for part in [*parts, f"seed {labels['seed']}"])


def decisive_keys(settings: Settings) -> set[str]:
    """Return the keys of the settings that decide the outcome of a run."""
    by_upload = settings.lr_decay_per == "upload"

    def matters(key: str) -> bool:
        if key in WITHOUT_EFFECT:
            return False
        if key == "buffer-size" and by_upload:  # the decay counts in units of it
            return True
        return settings.strategy in _READ_BY.get(key, (settings.strategy,))

    return {key for key in settings.to_run_config() if matters(key)}


def decisive_settings(settings: Settings) -> RunConfig:
    """Return the settings that decide the outcome of a run and differ from their default.

    Those at their default are left out so that a new setting, whose default changes nothing, does
    not make all finished runs strangers.
    """
    values, defaults = settings.to_run_config(), Settings().to_run_config()
    keys = decisive_keys(settings)
    return {key: values[key] for key in values if key in keys and values[key] != defaults[key]}
