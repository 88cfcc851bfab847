"""Numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.experiments.cells import Label
from simulation.experiments.numbers import Estimate

NOTHING = "–"

DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fmnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, decimals: int = 2) -> str:
    """Return a number, with a minus sign that is as wide as a plus."""
    return NOTHING if value is None else f"{value:.{decimals}f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """Return a difference, with its sign."""
    return NOTHING if value is None else f"{value:+.{decimals}f}".replace("-", "−")


def estimate(value: Estimate, decimals: int = 2, *, sign: bool = False) -> str:
    """Return mean ± deviation over seeds."""
    if not value:
        return NOTHING
    mean = signed(value.mean, decimals) if sign else number(value.mean, decimals)
    deviation = value.deviation
    return mean if deviation is None else f"{mean} ± {number(deviation, decimals)}"


def data_name(dataset: Label) -> str:
    """Return the name of a dataset, or of an own task."""
    return DATASETS.get(str(dataset), str(dataset))


def split(alpha: Label) -> str:
    """Return how data is split, as a heading."""
    return alpha if isinstance(alpha, str) else f"α = {alpha:g}"


def place(dataset: Label, alpha: Label) -> str:
    """Return a dataset and a partition as a heading."""
    return f"{data_name(dataset)}, {split(alpha)}"
