"""How many of a client's samples are not of the classes that were drawn for it.

A client whose classes have run out gets what is left of others. This counts such leftovers for the
partition that serves clients one after another, and for the one whose mixtures are redrawn first.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, parser
from task.datasets import load_raw
from task.partition import by_client_dirichlet, draw_mixtures, split_test

PARTITIONS = {"client-dirichlet": False, "fitted-dirichlet": True}
LAST = 10  # clients that are served last
_TEST_FRACTION = 0.1


def leftovers(
    labels: NDArray[np.integer], clients: int, alpha: float, seed: int, *, fitted: bool
) -> list[float]:
    """Return for each client the share of its samples that its mixture did not ask for."""
    _, mixtures = draw_mixtures(labels, clients, alpha, seed, fitted=fitted)
    classes = np.unique(labels)
    shares = []
    for mixture, owned in zip(
        mixtures, by_client_dirichlet(labels, clients, alpha, seed, fitted=fitted), strict=True
    ):
        got = np.array([np.count_nonzero(labels[owned] == label) for label in classes])
        # A class may have one sample more than asked for, because counts are whole numbers.
        surplus = np.maximum(got - np.ceil(mixture * len(owned)), 0)
        shares.append(float(surplus.sum() / len(owned)))
    return shares


def main(arguments: list[str] | None = None) -> None:
    """Count and write the page."""
    options = parser("benchmarks.leftovers", __doc__ or "")
    options.add_argument("--dataset", default="fmnist")
    options.add_argument("--clients", type=int, default=50, metavar="N")
    options.add_argument("--alphas", type=float, nargs="+", default=[0.1, 1.0], metavar="X")
    options.add_argument("--seeds", type=int, default=3, metavar="N")
    options.add_argument("--data-dir", default="")
    parsed = options.parse_args(arguments)
    alphas = " ".join(f"{alpha:g}" for alpha in parsed.alphas)
    report = Report(
        "leftovers",
        "Leftovers of a partition",
        f"python -m benchmarks.leftovers --dataset {parsed.dataset} --clients {parsed.clients}"
        f" --alphas {alphas} --seeds {parsed.seeds}",
    )
    _, labels = load_raw(parsed.dataset, parsed.data_dir)
    found = {
        name: {
            f"{alpha:g}": [
                leftovers(
                    labels[split_test(len(labels), _TEST_FRACTION, seed)[0]],
                    parsed.clients,
                    alpha,
                    seed,
                    fitted=fitted,
                )
                for seed in range(parsed.seeds)
            ]
            for alpha in parsed.alphas
        }
        for name, fitted in PARTITIONS.items()
    }
    report.text(
        f"{parsed.dataset}, {parsed.clients} clients, seeds 0 to {parsed.seeds - 1}: the share of"
        f" samples that are not of the classes drawn for their client, over the {LAST} clients"
        " served last and over all."
    )
    report.data("shares", found)
    report.table("", *table_of(found))
    print(report.write(parsed.out).read_text())


def table_of(found: dict[str, dict[str, list[list[float]]]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of the table, a number for each seed."""
    heads, lines = ["partition"], []
    for alpha in next(iter(found.values())):
        heads += [f"α = {alpha}: last {LAST} clients", "all"]
    for name, by_alpha in found.items():
        cells = []
        for seeds in by_alpha.values():
            for part in (slice(-LAST, None), slice(None)):
                shares = ", ".join(f"{100 * fmean(each[part]):.0f}" for each in seeds)
                cells.append(f"{shares} %")
        lines.append([f"`{name}`", *cells])
    return heads, lines


if __name__ == "__main__":
    main()
