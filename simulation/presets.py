"""Settings by name: the paper's, and small ones to try things out."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.environment import RunConfig
from simulation.errors import Refused

# Some are defaults as well. They are written down all the same, so that a preset stays what it is
# when a default changes.
_PAPER: RunConfig = {
    "num-clients": 50,
    "fraction-train": 0.2,
    "partition": "client-dirichlet",
    "dirichlet-alpha": 0.5,
    "test-fraction": 0.1,
    "lr": 0.01,
    "lr-decay": 0.999,
    "lr-decay-per": "version",
    "local-epochs": 5,
    "batch-size": 64,
    "latency": "uniform",
    "latency-min": 10,
    "latency-max": 500,
    "latency-per": "client",
    "virtual-days": 10.0,
    "evaluate-interval": 2160.0,
}

PRESETS: dict[str, RunConfig] = {
    "quick": {"dataset": "digits", "num-clients": 50, "virtual-days": 0.25},
    **{f"paper-{name}": {**_PAPER, "dataset": name} for name in ("mnist", "fmnist")},
    **{f"paper-{name}": {**_PAPER, "dataset": name} for name in ("cifar10", "cifar100")},
    # Parts, to be named behind one of those above.
    "skew-strong": {"dirichlet-alpha": 0.1},
    "skew-weak": {"dirichlet-alpha": 1.0},
    **{
        f"times-{law}-{low}-{high}": {"latency": law, "latency-min": low, "latency-max": high}
        for law in ("uniform", "long-tail")
        for low, high in ((10, 500), (20, 1000), (50, 2500))
    },
    "without-thermometer": {"strategy": "fedpsa", "thermometer": False},
    "without-sensitivity": {"strategy": "fedpsa", "signal": "parameters"},
}
"""What each name stands for; later ones override earlier ones."""


def preset_config(names: Sequence[str]) -> RunConfig:
    """Return the settings that presets stand for."""
    config: RunConfig = {}
    for name in names:
        if name not in PRESETS:
            raise Refused(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        config |= PRESETS[name]
    return config
