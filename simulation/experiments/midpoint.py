"""Which runs the experiments about Midpoint consist of."""

from __future__ import annotations

from itertools import product

from simulation.environment import RunConfig
from simulation.experiments.cells import CONTROL, METHODS, Cell, Label
from simulation.experiments.grids import INTERVALS, places
from simulation.experiments.options import Options

SUBJECT = "Midpoint"
STEPS: dict[str, RunConfig] = {
    "CA2FL": METHODS["CA2FL"],
    "CA2FL (η ½)": {"strategy": "ca2fl", "server-lr": 0.5},
    "CA2FL (η ¼)": {"strategy": "ca2fl", "server-lr": 0.25},
}
"""CA2FL with several steps: the fair baseline is the best of them."""

EVIDENCE: dict[str, RunConfig] = {
    SUBJECT: METHODS[SUBJECT],
    **{name: STEPS[name] for name in ("CA2FL", "CA2FL (η ½)")},
    **{name: METHODS[name] for name in ("FedBuff", CONTROL, "FedPSA")},
    **{name: METHODS[name] for name in ("FedAsync", "FedFa", "FedAvg")},
    **{name: METHODS[name] for name in ("FADAS", "ACE", "ACED")},
    # They take a step for each upload: one the size of a buffered method's.
    "ACE (η ⅕)": {"strategy": "ace", "server-lr": 0.2},
    "ACED (η ⅕)": {"strategy": "aced", "server-lr": 0.2},
    "AREA": METHODS["AREA"],
    **{name: METHODS[name] for name in ("FedAC weights", "Rescaled")},
}
MODELS = {"mlp": "perceptron", "default": "the dataset's own model"}

_PARTS_MODULE = "simulation.experiments.midpoint_parts"
PARTS: dict[str, RunConfig] = {
    SUBJECT: METHODS[SUBJECT],
    "θ = 0": {"strategy": "midpoint", "shift": 0.0},
    "θ = ¼": {"strategy": "midpoint", "shift": 0.25},
    "θ = ¾": {"strategy": "midpoint", "shift": 0.75},
    "β = 1": {"strategy": "midpoint", "fit-memory": False},
    "θ grows": {"strategy": "midpoint", "shift-grows": True},
    "step 1": {"strategy": "midpoint", "step-limit": 0.0},
    "h over all N": {"strategy": "midpoint", "remembered-over": "all"},
    "slow momentum": {
        "strategy": "midpoint",
        "server-lr": 0.3,
        "step-limit": 0.0,
        "momentum": 1.5,
    },
    "without calibration": {"strategy": f"{_PARTS_MODULE}:Uncalibrated"},
    "FedInit's shift": {"strategy": f"{_PARTS_MODULE}:RelaxedStart"},
    "κ weighs residuals": {"strategy": f"{_PARTS_MODULE}:KappaResiduals"},
    "CA2FL": METHODS["CA2FL"],
}

CONCURRENCIES = (0.1, 0.2, 0.4, 0.6)
BUFFERS = (1, 5, 10)
ROBUST: dict[str, RunConfig] = {SUBJECT: METHODS[SUBJECT], **STEPS}


def evidence(options: Options) -> list[Cell]:
    """Midpoint and the others, on perceptrons and the datasets' own models."""
    rows = EVIDENCE
    if options.methods is not None:
        rows = {SUBJECT: METHODS[SUBJECT]} | {name: METHODS[name] for name in options.methods}
    return _cells(options, rows, (0.1, 1.0))


def parts(options: Options) -> list[Cell]:
    """Midpoint with its parts changed one at a time."""
    return _cells(options, PARTS, (0.1,))


def robustness(options: Options) -> list[Cell]:
    """Midpoint and CA2FL over concurrency, buffer and response times, with the same settings."""
    cells = []
    for times, busy, buffer in product(INTERVALS, CONCURRENCIES, BUFFERS):
        config: RunConfig = {
            "fraction-train": busy,
            "buffer-size": buffer,
            "latency-min": times[0],
            "latency-max": times[1],
        }
        labels: dict[str, Label] = {"circumstances": circumstances(busy, buffer, times)}
        cells += _cells(options, ROBUST, (0.1,), config, labels)
    return cells


def circumstances(busy: float, buffer: int, times: tuple[int, int]) -> str:
    """Return the label of the runs with these settings."""
    return f"{busy:g} busy, buffer {buffer}, times {times[0]}-{times[1]}"


def _cells(
    options: Options,
    rows: dict[str, RunConfig],
    alphas: tuple[float, ...],
    config: RunConfig | None = None,
    labels: dict[str, Label] | None = None,
) -> list[Cell]:
    """Return a cell for each row, on perceptrons and own models unless one of them is chosen."""
    chosen = options.extra.get("model")
    models = list(MODELS) if chosen is None else [str(chosen)]
    cells = []
    for model, place in product(models, places(options, alphas)):
        of_model: RunConfig = {} if chosen is not None or model == "default" else {"model": model}
        for name, own in rows.items():
            cell_labels = {"method": name, **place, "model": MODELS[model], **(labels or {})}
            cells.append(options.cell(cell_labels, {**own, **of_model, **(config or {})}))
    return cells
