"""Tables of the page about Midpoint, from files in `results/`."""

from __future__ import annotations

from benchmarks.reproduction_tables import ROOT, rows_of
from simulation.experiments.derived import groups
from simulation.experiments.grids import INTERVALS
from simulation.experiments.markdown import NOTHING, data_name, signed, table
from simulation.experiments.midpoint import (
    BUFFERS,
    CONCURRENCIES,
    STEPS,
    SUBJECT,
    circumstances,
)
from simulation.experiments.paired import Paired, with_error
from simulation.experiments.rows import Row

PEERS = (
    "CA2FL",
    "CA2FL (η ½)",
    "FedBuff",
    "FedPSA",
    "Uniform",
    "FedAsync",
    "FedFa",
    "FedAvg",
)


def gaps(name: str, factor: float, decimals: int) -> str:
    """Return a number of Midpoint's minus the same of other methods, wherever both were run."""
    layout = Paired(SUBJECT)
    lines = []
    for folder in sorted((ROOT / "results").glob("table-midpoint*/")):
        if folder.name.removeprefix("table-midpoint").startswith(("-parts", "-robust")):
            continue
        rows = rows_of(folder.name)
        for found in groups(rows, *layout.block).values():
            leads = dict(layout.gaps(found, name, factor))
            seeds = len({row.labels["seed"] for row in found})
            days = f"{found[0].scale['days']:g}"
            runs = f"[{_place(found[0])}](../results/{folder.name}/table.md)"
            cells = [
                with_error(leads[method], decimals) if method in leads else NOTHING
                for method in PEERS
            ]
            lines.append([runs, days, str(seeds), *cells])
    return table(["Midpoint minus", "days", "seeds", *PEERS], lines)


def parts() -> str:
    """Return Midpoint minus its variants, perceptron."""
    rows = rows_of("table-midpoint-parts")
    layout = Paired(SUBJECT)
    areas = dict(layout.gaps(rows, "area_under_curve", 1.0))
    ends = dict(layout.gaps(rows, "late_accuracy", 100.0))
    lines = [[name, with_error(areas[name], 4), with_error(ends[name], 2)] for name in areas]
    return table(["Midpoint minus", "area", "last tenth (points)"], lines)


def robust() -> str:
    """Return Midpoint minus CA2FL with the best of its steps, by concurrency and buffer."""
    found = groups(rows_of("table-midpoint-robust"), "circumstances")
    layout, leads = Paired(SUBJECT), {}
    for (label,), rows in found.items():
        each = [gap.mean for _, gap in layout.gaps(rows, "area_under_curve", 1.0) if gap]
        if len(each) == len(STEPS):
            leads[label] = min(each)
    lines = []
    for busy in CONCURRENCIES:
        labels = [circumstances(busy, buffer, INTERVALS[0]) for buffer in BUFFERS]
        lines.append([f"{busy:g}", *(signed(leads.get(label), 4) for label in labels)])
    text = table(["concurrency", *(f"buffer {buffer}" for buffer in BUFFERS)], lines)
    ahead = sum(lead > 0 for lead in leads.values())
    left = len(CONCURRENCIES) * len(BUFFERS) * len(INTERVALS) - len(leads)
    rest = f"; {left} with longer response times have not been run" if left else ""
    return f"{text}\n\nAhead in {ahead} of {len(leads)}{rest}."


def _place(row: Row) -> str:
    """Return in a few words what was learned, by which model, and how it was split."""
    model, width = row.scale.get("model", "default"), row.scale.get("width", 1)
    names = {"digits": "perceptron", "fmnist": "linear", "mnist": "CNN", "cifar10": "CNN"}
    kind = "perceptron" if model == "mlp" else names[str(row.labels["dataset"])]
    parts = [data_name(row.labels["dataset"]), kind if width == 1 else f"{kind} at {width:g} width"]
    parts.append(f"α = {row.labels['alpha']:g}")
    if row.scale["partition"] != "client-dirichlet":
        parts.append(row.scale["partition"])
    return ", ".join(parts)
