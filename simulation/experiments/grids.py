"""Which runs each experiment consists of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from fedpsa_strategy.methods.registry import find_method
from server_app.settings import DATASETS, Settings
from simulation.environment import RunConfig
from simulation.experiments.cells import CONTROL, METHODS, OWN_SPLIT, Cell, Label
from simulation.experiments.options import Options

COMPARED = tuple(METHODS)
HETEROGENEITY_METHODS = ("FedBuff", "CA2FL", "FedPSA", CONTROL)
INTERVALS = ((10, 500), (20, 1000), (50, 2500))
LAWS = ("uniform", "long-tail")
CONCURRENCIES = (0.1, 0.2, 0.3)
CALIBRATION_SIZES = (16, 32, 128, 512)
GAMMAS = (0.1, 1.0, 5.0, 10.0)
DELTAS = (0.1, 0.5, 1.0, 5.0)
BUFFERS = (5, 10, 20, 50)
QUEUES = (10, 50, 200, 1000)
SHARP_DELTAS, SHARP_DIMS = (1.0, 0.5, 0.1, 0.05), (16, 256)
MOTIVATION_METHODS = ("FedPSA", "FedAsync", CONTROL)
# Wide enough for gaps of a hundred versions, and not so fast that days cost more than elsewhere.
MOTIVATION_TIMES: RunConfig = {"latency": "long-tail", "latency-min": 50, "latency-max": 10_000}

VARIANTS: dict[str, RunConfig] = {
    "full": {"strategy": "fedpsa"},
    "without T": {"strategy": "fedpsa", "thermometer": False},
    "without S": {"strategy": "fedpsa", "signal": "parameters"},
    "without T and S": {"strategy": "fedpsa", "thermometer": False, "signal": "parameters"},
    CONTROL: METHODS[CONTROL],
}

# Enough pairs for a correlation, few enough for a small file.
_PAIRS = 2000
_UPLOADS_PER_DAY = 3600  # with the paper's clients, concurrency and response times


def compare_methods(options: Options) -> list[Cell]:
    """All methods on all datasets and partitions: final accuracy, area, curves."""
    return list(_methods(options, COMPARED, (0.1, 0.5, 1.0)))


def overhead(options: Options) -> list[Cell]:
    """One partition is enough to see what methods cost."""
    return list(_methods(options, COMPARED, (0.5,)))


def heterogeneity(options: Options) -> list[Cell]:
    """Other response times: wider intervals, two laws."""
    cells: list[Cell] = []
    for (low, high), law in product(INTERVALS, LAWS):
        times: RunConfig = {"latency": law, "latency-min": low, "latency-max": high}
        labels: dict[str, Label] = {"times": f"{law} {low}-{high}"}
        cells += _methods(options, HETEROGENEITY_METHODS, (1.0,), times, labels)
    return cells


def ablation(options: Options) -> list[Cell]:
    """FedPSA without its parts, for several concurrencies."""
    cells = []
    for place, concurrency in product(places(options, (1.0, 0.1)), CONCURRENCIES):
        for variant, config in VARIANTS.items():
            labels = {
                "method": CONTROL if variant == CONTROL else "FedPSA",
                **place,
                "variant": variant,
                "concurrency": concurrency,
            }
            cells.append(options.cell(labels, {**config, "fraction-train": concurrency}))
    return cells


def calibration(options: Options) -> list[Cell]:
    """Real or Gaussian calibration batches of several sizes; the control has none."""
    cells = []
    for place, size in product(places(options, (0.1, 1.0)), CALIBRATION_SIZES):
        configs: dict[str, RunConfig] = {
            "real": {
                "calibration": "real",
                "calibration-transport": "arrays",
                "held-out": size,
            },
            "gaussian": {"calibration": "gaussian"},
        }
        for batch, config in configs.items():
            labels = {"method": "FedPSA", **place, "batch": batch, "size": size}
            own = {**METHODS["FedPSA"], **config, "calibration-size": size}
            cells.append(options.cell(labels, own))
        labels = {"method": CONTROL, **place, "batch": CONTROL, "size": size}
        cells.append(options.cell(labels, METHODS[CONTROL]))
    return cells


def hyper(options: Options) -> list[Cell]:
    """Two grids through the paper's values, and the control beside them."""
    cells = []
    for place in places(options, (0.1,)):
        for gamma, delta in product(GAMMAS, DELTAS):
            labels = {"method": "FedPSA", **place, "grid": "γ, δ", "x": gamma, "y": delta}
            own: RunConfig = {**METHODS["FedPSA"], "gamma": gamma, "delta": delta}
            cells.append(options.cell(labels, own))
        for buffer, queue in product(BUFFERS, QUEUES):
            labels = {"method": "FedPSA", **place, "grid": "L_s, L_q", "x": buffer, "y": queue}
            own = {**METHODS["FedPSA"], "buffer-size": buffer, "queue-size": queue}
            cells.append(options.cell(labels, own))
        labels = {"method": CONTROL, **place, "grid": "control", "x": 0, "y": 0}
        cells.append(options.cell(labels, METHODS[CONTROL]))
    return cells


def sharpness(options: Options) -> list[Cell]:
    """FedPSA at a constant, ever lower temperature, with short and long sketches."""
    cells = []
    for place in places(options, (0.1,)):
        cells.append(options.cell({"method": CONTROL, **place}, METHODS[CONTROL]))
        for delta, dim in product(SHARP_DELTAS, SHARP_DIMS):
            own: RunConfig = {"gamma": 0.0, "delta": delta, "queue-size": 1, "sketch-dim": dim}
            labels = {"method": f"Temp {delta:g}, k {dim}", **place}
            cells.append(options.cell(labels, {**METHODS["FedPSA"], **own}))
    return cells


def kappa(options: Options) -> list[Cell]:
    """FedPSA with the agreement of gradients measured beside κ."""
    every = max(1, round(options.days * _UPLOADS_PER_DAY / _PAIRS))
    measured: RunConfig = {"alignment-every": every}
    return list(_methods(options, ("FedPSA",), (0.1,), measured, fixed=True))


def motivation(options: Options) -> list[Cell]:
    """Large version gaps, for a small and a large distribution shift."""
    return list(_methods(options, MOTIVATION_METHODS, (1.0, 0.1), MOTIVATION_TIMES, fixed=True))


def _methods(
    options: Options,
    methods: tuple[str, ...],
    alphas: tuple[float, ...],
    config: RunConfig | None = None,
    labels: dict[str, Label] | None = None,
    *,
    fixed: bool = False,
) -> Iterator[Cell]:
    """Yield the cells of methods in the places of an experiment.

    Where the methods are `fixed`, the person's choice of others does not count.
    """
    chosen = methods if fixed or options.methods is None else options.methods
    for place in places(options, alphas):
        for method in chosen:
            needs_head = find_method(str(METHODS[method]["strategy"])).needs_head
            dataset, model = str(place["dataset"]), options.extra.get("model")
            if needs_head and not _has_encoder(dataset, str(model)):
                continue
            yield options.cell(
                {"method": method, **place, **(labels or {})},
                {**METHODS[method], **(config or {})},
            )


@lru_cache
def _has_encoder(dataset: str, kind: str) -> bool:
    if dataset in DATASETS:
        return Settings(dataset=dataset, model=kind).has_encoder
    from task.tasks import find_task  # not at the top: it loads torch

    model = find_task(dataset).make_model(0)
    return hasattr(model, "encoder") and hasattr(model, "head")


def places(options: Options, alphas: tuple[float, ...]) -> Iterator[dict[str, Label]]:
    """Yield the datasets, partitions and seeds of an experiment."""
    for dataset in options.datasets:
        own: tuple[Label, ...] = (OWN_SPLIT,)
        chosen = (options.alphas or alphas) if dataset in DATASETS else own
        for alpha, seed in product(chosen, options.seeds):
            yield {"dataset": dataset, "alpha": alpha, "seed": seed}
