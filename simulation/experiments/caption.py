"""What every table and figure says about where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simulation.experiments.cells import Label
from simulation.experiments.markdown import data_name
from simulation.experiments.options import PAPER_DAYS
from simulation.experiments.rows import Row

_PARTITIONS = {
    "client-dirichlet": "equal sizes with the class mixture of each client from Dir(α·p), p the"
    " class frequencies (client-dirichlet)",
    "fitted-dirichlet": "equal sizes with the class mixture of each client from Dir(α·p), redrawn"
    " until their mean is p (fitted-dirichlet)",
    "class-dirichlet": "each class over the clients by Dir(α) (class-dirichlet)",
    "iid": "evenly at random (iid)",
    "own": "by the task itself",
}


def scale_text(rows: Sequence[Row]) -> str:
    """Return how large the runs are that are shown, and how many of the planned ones these are."""
    found = shown(rows)
    partitions = ", ".join(
        _PARTITIONS[kind] for kind in dict.fromkeys(row.scale["partition"] for row in found)
    )
    lr, epochs, batch, decay = (
        _values(row.scale[key] for row in found)
        for key in ("lr", "local_epochs", "batch_size", "lr_decay_per")
    )
    done = {row.id for row in rows if row.completed}
    everything = {row.id for row in rows}
    return (
        f"{_days(found)} of 86,400 units ({_beside_paper(found)}),"
        f" {_values(row.scale['clients'] for row in found)} clients, data split {partitions};"
        f" lr {lr}, {epochs} local epoch{_plural(epochs)}, batch {batch}, decay per {decay},"
        f" {_steps(found)}{_models(found)}. {len(done)} of {len(everything)} runs finished."
    )


def seeds_text(rows: Sequence[Row]) -> str:
    """Return which seeds there are in which part of the tables, and what stands behind the ±."""
    parts = []
    for seeds, places in _seeds(shown(rows)):
        if len(seeds) > 1:
            text = f"mean ± sample standard deviation over {_counted(seeds)}"
        else:
            text = f"seed {seeds[0]} alone, without a deviation"
        parts.append(f"{text}{',' * (len(seeds) == 1 and bool(places))}{places}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


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
    """Return what a table or a figure shows, in two lines."""
    found = shown(rows)
    datasets = _values(data_name(row.labels["dataset"]) for row in found)
    clients = _values(row.scale["clients"] for row in found)
    kinds = _values(row.scale["partition"] for row in found)
    seeds = "; ".join(f"{_counted(seeds)}{places}" for seeds, places in _seeds(found))
    return (
        f"{datasets}, {_days(found)} ({_beside_paper(found)}), {clients} clients, {kinds},"
        f" {_steps(found)}{_models(found)}, {seeds}\n{origin_text(rows)}"
    )


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of which there are numbers; all of them while there are none."""
    return [row for row in rows if row.completed] or list(rows)


def _days(rows: Sequence[Row]) -> str:
    days = _values(row.scale["days"] for row in rows)
    return f"{days} virtual day{_plural(days)}"


def _beside_paper(rows: Sequence[Row]) -> str:
    whole = all(row.scale["days"] == PAPER_DAYS for row in rows)
    return "as in the paper" if whole else f"paper: {PAPER_DAYS:g}"


def _steps(rows: Sequence[Row]) -> str:
    steps = {(row.scale.get("step", "eager"), "compiled" in row.scale): None for row in rows}
    return ", ".join(
        f"{step} step{' of an earlier version' * (step == 'compiled' and not recent)}"
        for step, recent in steps
    )


def _models(rows: Sequence[Row]) -> str:
    """Return which models were trained, unless they were the datasets' own at full width."""
    texts = dict.fromkeys(
        _model(str(row.scale.get("model", "default")), row.scale.get("width", 1)) for row in rows
    )
    return "" if list(texts) == [_model("default", 1)] else f", model: {' and '.join(texts)}"


def _model(name: str, width: float) -> str:
    of_width = "" if width == 1 else f" at {width:g} of its width"
    kind = "perceptron with a hidden layer of 64" if name == "mlp" else "the dataset's own"
    return f"{kind}{of_width}"


def _plural(count: str) -> str:
    return "" if count == "1" else "s"


def _counted(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{_plural(str(len(seeds)))} ({', '.join(map(str, seeds))})"


def _seeds(rows: Sequence[Row]) -> list[tuple[list[int], str]]:
    """Return which seeds there are, and for which datasets and α where they are not the same."""
    by_place: dict[tuple[Label, Label], set[int]] = {}
    for row in rows:
        place = row.labels["dataset"], row.labels["alpha"]
        by_place.setdefault(place, set()).add(int(row.labels["seed"]))
    by_seeds: dict[tuple[int, ...], list[tuple[Label, Label]]] = {}
    for place, seeds in by_place.items():
        by_seeds.setdefault(tuple(sorted(seeds)), []).append(place)
    if len(by_seeds) == 1:
        return [(list(seeds), "") for seeds in by_seeds]
    datasets, alphas = ({place[i] for place in by_place} for i in (0, 1))

    def name(place: tuple[Label, Label]) -> str:
        parts = [data_name(place[0])] if len(datasets) > 1 else []
        parts += [f"α = {place[1]:g}"] if len(alphas) > 1 else []
        return ", ".join(parts)

    return [
        (list(seeds), f" for {' and '.join(map(name, places))}")
        for seeds, places in sorted(by_seeds.items(), key=lambda item: -len(item[0]))
    ]


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
