"""What every table and figure says about where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simulation.experiments.options import PAPER_DAYS
from simulation.experiments.rows import Row

_PARTITIONS = {
    "client-dirichlet": "equal sizes with the class mixture of each client from Dir(α·p), p the"
    " class frequencies (client-dirichlet)",
    "class-dirichlet": "each class over the clients by Dir(α) (class-dirichlet)",
    "iid": "evenly at random (iid)",
}


def scale_text(rows: Sequence[Row]) -> str:
    """Return how large the runs were, and how many there are."""
    days = _values(row.scale["days"] for row in rows)
    clients = _values(row.scale["clients"] for row in rows)
    partitions = ", ".join(
        _PARTITIONS[kind] for kind in dict.fromkeys(row.scale["partition"] for row in rows)
    )
    whole = all(row.scale["days"] == PAPER_DAYS for row in rows)
    of_paper = "as in the paper" if whole else f"the paper's last {PAPER_DAYS:g}"
    lr, epochs, batch, decay = (
        _values(row.scale[key] for row in rows)
        for key in ("lr", "local_epochs", "batch_size", "lr_decay_per")
    )
    done = {row.id for row in rows if row.completed}
    everything = {row.id for row in rows}
    return (
        f"{days} virtual days of 86,400 units ({of_paper}), {clients} clients, data split"
        f" {partitions}; lr {lr}, {epochs} local epochs, batch {batch}, decay per {decay}."
        f" {len(done)} of {len(everything)} runs finished."
    )


def seeds_text(rows: Sequence[Row]) -> str:
    """Return which seeds there are, and what stands behind the ±."""
    seeds = sorted({int(row.labels["seed"]) for row in rows})
    listed = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return f"Seed {listed} alone: no deviation is known."
    return f"Mean ± sample standard deviation over {len(seeds)} seeds ({listed})."


def origin_text(rows: Sequence[Row]) -> str:
    """Return versions and machines."""
    done = [row for row in rows if row.completed]
    if not done:
        return "Nothing has been run yet."
    names = dict.fromkeys(name for row in done for name in row.versions)
    versions = ", ".join(
        f"{_package(name)} {_values(row.versions.get(name, '?') for row in done)}" for name in names
    )
    machines = dict.fromkeys(_machine(row) for row in done)
    return f"{versions}. Run on {'; '.join(machines)}."


def short_caption(rows: Sequence[Row]) -> str:
    """Return the caption of a figure, in a few lines."""
    days = _values(row.scale["days"] for row in rows)
    clients = _values(row.scale["clients"] for row in rows)
    kinds = _values(row.scale["partition"] for row in rows)
    seeds = _values(sorted({row.labels["seed"] for row in rows}))
    return (
        f"{days} virtual days (paper: {PAPER_DAYS:g}), {clients} clients, {kinds}, seeds {seeds}\n"
        f"{origin_text(rows)}"
    )


def _machine(row: Row) -> str:
    found = row.machine
    if not found:
        return "an unknown machine"
    cpu, cores, engine = (found.get(key, "?") for key in ("cpu", "cores", "engine"))
    return f"{cpu}, {cores} cores, engine {engine}"


def _package(name: str) -> str:
    return {"python": "Python", "flwr": "Flower", "torch": "PyTorch", "numpy": "NumPy"}.get(
        name, name
    )


def _values(values: Iterable[Any]) -> str:
    unique = dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    return ", ".join(unique)
