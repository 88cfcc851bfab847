"""What a person chooses about an experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fedpsa_strategy.methods.registry import find_method, is_ours
from fedpsa_strategy.server.clock import DAY
from server_app.settings import DATASETS, Settings
from server_app.task_defaults import resolve
from simulation.environment import ConfigValue, RunConfig
from simulation.experiments.cells import Cell, Label

PAPER_DAYS = 10.0

_EVALUATIONS_PER_DAY = 40
_PLACES = {"run-dir", "resume"}  # every run has a folder of its own


@dataclass(frozen=True)
class Options:
    """The choices that all experiments share.

    Alphas and methods (by their labels) that are None are the experiment's own; `lr_decay_per` is
    what the decay of the learning rate counts, "version" or "upload"; `extra` is more run config
    for all runs.
    """

    datasets: tuple[str, ...] = ("fmnist",)
    alphas: tuple[float, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    days: float = PAPER_DAYS
    lr_decay_per: str = "version"
    extra: Mapping[str, ConfigValue] = field(default_factory=dict)

    def cell(self, labels: Mapping[str, Label], run_config: Mapping[str, ConfigValue]) -> Cell:
        """Return the cell with these labels: `dataset`, `alpha` and `seed` are settings too.

        `ValueError` says that a setting is not allowed, or that one that the experiment varies was
        set for all runs.
        """
        seed = labels["seed"]
        own_task = labels["dataset"] not in DATASETS
        place: RunConfig = (
            {"task": labels["dataset"]}
            if own_task
            else {"dataset": labels["dataset"], "dirichlet-alpha": labels["alpha"]}
        )
        varied: RunConfig = {
            **place,
            "seed": seed,
            "virtual-days": self.days,
            "lr-decay-per": self.lr_decay_per,
            "clock": "virtual",
            **run_config,
        }
        if both := sorted((varied.keys() | _PLACES | {"dataset", "task"}) & self.extra.keys()):
            raise ValueError(
                f"{', '.join(both)} cannot be set for all runs: the experiment, or an option of its"
                " own, decides it"
            )
        # The same moments for all methods, however many versions they make in between. Sketch and
        # calibration batch follow the seed, so that deviations over seeds cover them too.
        usual: RunConfig = {
            "evaluate-interval": min(1.0, self.days) * DAY / _EVALUATIONS_PER_DAY,
            "sketch-seed": seed,
            "calibration-seed": seed,
        }
        config = {**usual, **self.extra, **varied}
        if is_ours(str(config["strategy"])):  # meant for the others
            config.pop("method-settings", None)
        return make_cell(labels, config)


def make_cell(labels: Mapping[str, Label], config: Mapping[str, ConfigValue]) -> Cell:
    """Return the cell of a run config."""
    settings = resolve(Settings.from_run_config(config))
    own_method = not is_ours(settings.strategy)
    return Cell(
        labels,
        settings,
        source_of(settings.task) if settings.task else "",
        source_of(find_method(settings.strategy).__module__) if own_method else "",
    )


def source_of(reference: str) -> str:
    """Return the hash of the file of a user's own module; empty if it has none."""
    found = find_spec(reference.partition(":")[0])
    if found is None or not found.origin or not Path(found.origin).is_file():
        return ""
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:12]
