"""A cell of a table: one run, known by the settings that decide its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedpsa_strategy.methods import registry
from server_app.settings import MAY_CHANGE, PAPER_DEFAULTS, Settings, former_defaults
from simulation.environment import RunConfig

Label = str | int | float

CONTROL = "Uniform"
"""The method that weighs all uploads alike; what a weighting is worth is its distance to it."""


METHODS: dict[str, RunConfig] = {
    method.label: {"strategy": method.name} for method in registry.METHODS.values()
} | {
    variant.label: {"strategy": method.name, **variant.settings}
    for method in registry.METHODS.values()
    for variant in method.variants
}
"""What the methods of the tables are in the run config."""

# Raise it when a change of the code makes earlier runs worthless: all cells are then run again.
_FORMAT = 1

_LIMITS = {"num-server-rounds", "virtual-days", "time-limit", "target-accuracy"}
WITHOUT_EFFECT = MAY_CHANGE - _LIMITS
"""Settings that say where and how a run is run, and change nothing in what comes out."""

OWN_SPLIT = "own split"
"""The label `alpha` of an own task, which shares out its data itself."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Its labels are its place in the experiment: `method`, `dataset`, `alpha`, `seed` and whatever
    else varies. Two cells with other labels may be the same run. Its settings leave nothing to the
    task (see `server_app.task_defaults`). The sources are hashes of the files of an own task and of
    a user's own method, which are others when they change.
    """

    labels: Mapping[str, Label]
    settings: Settings
    source: str = ""
    method_source: str = ""

    def __post_init__(self) -> None:
        if not self.settings.is_resolved:
            raise ValueError("a cell's settings must not be left to its task")

    @cached_property
    def id(self) -> str:
        """Equal for cells that have the same outcome, in every experiment."""
        values, usual = self.settings.to_run_config(), first_defaults()
        keys = decisive_keys(self.settings)
        # What is at its default is left out, so that a new setting, whose default changes nothing,
        # does not make all finished runs strangers.
        decisive = {key: values[key] for key in keys if values[key] != usual[key]}
        identity = {"format": _FORMAT, **decisive}
        if "method-settings" in decisive:  # however they were written
            decisive_settings = self.settings.decisive_method_settings
            identity |= {"method-settings": decisive_settings} if decisive_settings else {}
        if self.source:
            identity["task-source"] = self.source
        if self.method_source:
            identity["method-source"] = self.method_source
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def run_config(self) -> RunConfig:
        """The run config to launch it with; what the method does not read is left out."""
        values, defaults = self.settings.to_run_config(), Settings().to_run_config()
        keys = decisive_keys(self.settings) | WITHOUT_EFFECT
        return {key: values[key] for key in values if key in keys and values[key] != defaults[key]}

    def launch_config(self, *, resumed: bool) -> RunConfig:
        """Return the same with what a launch adds: all clients, and whether its run goes on."""
        more: RunConfig = {"resume": "true"} if resumed else {}
        return {"num-clients": self.settings.num_clients, **self.run_config, **more}

    @property
    def name(self) -> str:
        """What a person calls it."""
        usual = ("method", "dataset", "alpha", "seed")
        more = [str(value) for key, value in self.labels.items() if key not in usual]
        labels = self.labels
        alpha = labels["alpha"]
        split = alpha if isinstance(alpha, str) else f"α {alpha:g}"
        parts = [labels["method"], labels["dataset"], split, *more]
        return " · ".join(str(part) for part in [*parts, f"seed {labels['seed']}"])


def decisive_keys(settings: Settings) -> set[str]:
    """Return the keys of the settings that decide the outcome of a run."""
    by_upload = settings.lr_decay_per == "upload"
    read_by = registry.readers()

    def matters(key: str) -> bool:
        if key in WITHOUT_EFFECT:
            return False
        if key == "buffer-size" and by_upload:  # the decay counts in units of it
            return True
        if key == "evaluate-every" and settings.evaluate_interval:
            return False
        return settings.strategy in read_by.get(key, (settings.strategy,))

    return {key for key in settings.to_run_config() if matters(key)}


def first_defaults() -> RunConfig:
    """Return what a setting was in a run that says nothing about it.

    Defaults that have changed since are as they were when the first cells were identified, so that
    finished runs keep their ids.
    """
    return {**Settings().to_run_config(), **PAPER_DEFAULTS, **former_defaults()}
