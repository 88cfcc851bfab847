"""Measured figures in README and docs, written from files: `python -m benchmarks.pages`.

A page names what it shows between `<!-- measured: NAME -->` and `<!-- end -->`; the functions here
make these parts from files in `results/` and `benchmarks/results/`. A test makes them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, pstdev, stdev
from typing import Any

from benchmarks import leftovers, midpoint_tables, reproduction_tables
from simulation.experiments.markdown import table
from simulation.experiments.numbers import interpolated
from simulation.experiments.rows import Row, from_lines

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
NODES = ("ordinary", "warm")
_PART = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LINK = 125e6  # bytes a second of a link of 1 Gbit/s
_MODELS = {
    "digits": "digits, perceptron",
    "fmnist": "Fashion-MNIST, linear",
    "mnist": "MNIST, CNN",
    "cifar10": "CIFAR-10, CNN",
    "resnet18": "ResNet-18",
    "100m": "large perceptron",
}


def curves_table() -> str:
    """Return accuracies on Fashion-MNIST after one day and at the end, α = 0.1, three seeds."""
    rows = [row for row in _rows("figure-curves") if row.labels["alpha"] == 0.1 and row.completed]
    lines = []
    for name in dict.fromkeys(str(row.labels["method"]) for row in rows):
        curves = [row.curve for row in rows if row.labels["method"] == name]
        days = [[100 * interpolated(curve, day) for curve in curves] for day in (1, 5, 10)]
        lines.append([_method(name), *map(_estimate, days)])
    return table(["method", "after 1 day (%)", "after 5 days (%)", "after 10 days (%)"], lines)


def sketch_noise_table() -> str:
    """Return how much of κ's variance is the sketch's, by its length."""
    lines = []
    pages = ("sketch_noise", "sketch_noise-cnn")
    models = {name: found for page in pages for name, found in _measured(page)["models"].items()}
    for name, stages in models.items():
        for stage in stages:
            shares = [f"{100 * value:.0f} %" for value in stage["share"].values()]
            spread = f"{fmean(stage['exact']):.3f} ± {pstdev(stage['exact']):.3f}"
            lines.append([name, str(stage["versions"]), spread, *shares])
    lengths = [f"k = {k}" for k in stages[0]["share"]]
    return table(["model", "versions", "exact cosines", *lengths], lines)


def leftovers_table() -> str:
    """Return how many samples of clients are not of the classes drawn for them."""
    return table(*leftovers.table_of(_measured("leftovers")["shares"]))


def cost_table() -> str:
    """Return what an update costs server, SuperLink, client and network."""
    superlink, traffic = _measured("superlink"), _measured("traffic")["traffic"]
    models = _measured("sketch")["models"]
    shares = {name: 100 * model["share"]["median"] for name, model in models.items()}
    of_digits = shares.pop("digits")
    added = max(
        sum(bytes_of["fedpsa"].values()) - sum(bytes_of["fedbuff"].values())
        for bytes_of in traffic.values()
    )
    seconds = {kind: median(_measured("nodes")["digits"][kind]["seconds"]) for kind in NODES}
    idle = superlink["per_idle_node"]
    deployment, nodes, sketch, network = map(_page, ("superlink", "nodes", "sketch", "traffic"))
    lines = [
        ["SuperLink, an update", f"{superlink['per_update']:.2f} s of a core", deployment],
        ["SuperLink, an idle node", f"{100 * idle:.2f} % of a core", deployment],
        [
            "node, an update of a small model",
            f"{seconds['warm']:.1f} s if the node is warm, {seconds['ordinary']:.1f} s if not",
            nodes,
        ],
        [
            "client, FedPSA's sensitivity and sketch",
            f"{min(shares.values()):.0f} to {max(shares.values()):.0f} % of its training; with the"
            f" small model for digits {of_digits:.0f} %",
            sketch,
        ],
        ["network", f"the model, each way; FedPSA adds {added:.0f} bytes", network],
    ]
    return _text_table(["where", "cost", "measured in"], lines)


def formats_table() -> str:
    """Return what shorter updates save, what they cost a core, and the accuracies with them."""
    alone = _measured("large_model")["formats"]
    found = _measured("traffic")["accuracy"]
    heads = ["`update-dtype`", "bytes of 100 million numbers", "client", "server"]
    names = {key: f"{_MODELS[key.partition('=')[0]]} (%)" for key in found}
    lines = []
    for update_dtype, one in alone.items():
        accuracies = [
            f"{100 * fmean(run['accuracy'] for run in found[key][update_dtype]):.2f}"
            for key in names
        ]
        seconds = [_seconds(one[f"{side}_seconds"]) for side in ("client", "server")]
        lines.append([update_dtype, f"{one['bytes'] / 1e6:.0f} MB", *seconds, *accuracies])
    return table([*heads, *names.values()], lines)


def large_table() -> str:
    """Return what an update of a large model takes over gRPC."""
    lines = []
    for update_dtype, run in _measured("large_model")["runs"].items():
        sizes = [f"{run[f'bytes_{way}'] / 1e6:.0f} MB" for way in ("down", "up")]
        memory = [
            f"{run['memory'][kind] / 1e9:.1f} GB"
            for kind in ("ServerApp", "SuperLink", "ClientApp, warm process")
        ]
        lines.append([update_dtype, *sizes, f"{run['update_seconds']['median']:.0f} s", *memory])
    return table(
        ["`update-dtype`", "down", "up", "an update", "ServerApp", "SuperLink", "ClientApp"], lines
    )


def update_sentence() -> str:
    """Return how long an update takes on real processes."""
    measured = _measured("nodes")["digits"]
    warm, ordinary = (median(measured[kind]["seconds"]) for kind in ("warm", "ordinary"))
    return (
        f"With real processes an update of the small model takes {warm:.1f} s on\n"
        f"[warm nodes](docs/NODES.md), and {ordinary:.1f} s on Flower's own."
    )


def nodes_table() -> str:
    """Return how long an update takes and what it costs, on warm nodes and ordinary ones."""
    lines = []
    for dataset, title in (("digits", "digits"), ("fmnist", "Fashion-MNIST, linear")):
        measured = _measured("nodes")[dataset]
        cells = []
        for what, digits in (("seconds", 1), ("cpu", 2)):
            ordinary, warm = (median(measured[kind][what]) for kind in NODES)
            cells += [f"{ordinary:.{digits}f}", f"{warm:.{digits}f}", f"{ordinary / warm:.1f}"]
        own = median(measured["warm"]["parts"]["own part"])
        lines.append([title, *cells, f"{own:.2f}"])
    heads = ["one update, s", "ordinary", "warm", "ratio"]
    heads += ["processor time, ordinary", "warm", "ratio", "start and import, warm"]
    return table(heads, lines)


def queued_table() -> str:
    """Return what a task that waits at its node gains and costs."""
    lines = []
    for waiting, runs in _measured("queued")["runs"].items():
        rate, staleness, accuracy = (
            fmean(run[key] for run in runs)
            for key in ("uploads_per_minute", "staleness", "accuracy")
        )
        lines.append([waiting, f"{rate:.0f}", f"{staleness:.2f}", f"{100 * accuracy:.1f}"])
    heads = ["`queued-per-node`", "uploads a minute", "mean staleness", "accuracy (%)"]
    return table(heads, lines)


def cluster_table() -> str:
    """Return how fast cells run with the local scheduler and as Ray tasks."""
    lines = []
    for name, runs in _measured("cluster")["cases"].items():
        rate, start = (median(values) for values in zip(*runs, strict=True))
        lines.append([name, f"{rate:.1f}", f"{start:.1f}"])
    return table(["where", "cells a minute", "seconds before the first"], lines)


def fleet_table() -> str:
    """Return how many nodes and updates fill one core of the SuperLink."""
    superlink = _measured("superlink")
    return table(
        ["one core of the SuperLink carries", ""],
        [
            ["nodes that are connected and idle", _round(1 / superlink["per_idle_node"])],
            ["updates a second", f"{1 / superlink['per_update']:.0f}"],
        ],
    )


def server_table() -> str:
    """Return how many uploads a second a core of the ServerApp and a link carry, by model size."""
    measured = _measured("server")
    buffer = measured["buffer"]
    lines = []
    for size, times in sorted(measured["times"].items(), key=lambda item: int(item[0])):
        rates = []
        for rule in ("fedbuff", "fedpsa", "ca2fl"):
            upload, version = (times[rule][key]["median"] for key in ("upload", "version"))
            rates.append(_round(buffer / ((buffer - 1) * upload + version)))
        link = _LINK / (2 * 4 * int(size))
        lines.append([f"{int(size):,}", *rates, _round(link)])
    heads = ["parameters", "FedBuff", "FedPSA, without its sketch", "CA2FL", "link of 1 Gbit/s"]
    return table(heads, lines)


def sketch_table() -> str:
    """Return what FedPSA's sensitivity and sketch take, by model."""
    lines = []
    for name, model in _measured("sketch")["models"].items():
        seconds = model["seconds"]
        both = seconds["sensitivity"]["median"] + seconds["sketch"]["median"]
        lines.append(
            [
                _MODELS[name],
                f"{model['parameters']:,}",
                _seconds(both),
                _seconds(seconds["training"]["median"]),
                f"{100 * model['share']['median']:.0f} %",
            ]
        )
    heads = [
        "model",
        "parameters",
        "sensitivity and sketch",
        "local training, five epochs",
        "share",
    ]
    return table(heads, lines)


def engines_table() -> str:
    """Return uploads a second of the engines, beside another framework's."""
    lines = []
    for text, page, dataset in (
        ("Fashion-MNIST, linear, compiled step", "against_flgo", "fmnist"),
        ("MNIST, CNN, eager step", "against_flgo-mnist", "mnist"),
    ):
        runs = _measured(page)["runs"][dataset]
        names = (
            "local engine, 2 workers, FedBuff",
            "Flower's Ray engine, 2 actors, FedBuff",
            "FLGo, FedBuff",
        )
        rates = [median(rate for rate, _ in runs[name]) for name in names]
        lines.append([f"[{text}](../benchmarks/results/{page}.md)", *map(_round, rates)])
    return table(["FedBuff", "local engine", "Flower's Ray engine", "FLGo (one process)"], lines)


def overhead_table() -> str:
    """Return how much longer a run takes than its training alone."""
    lines = []
    for page, key, text in (
        ("engines", "fmnist, compiled", "Fashion-MNIST, linear, compiled step"),
        ("engines-cnn", "mnist, eager", "MNIST, CNN, eager step"),
        ("engines-cnn", "cifar10, eager", "CIFAR-10, CNN, eager step"),
    ):
        runs = _measured(page)["datasets"][key]["runs"]
        cells = []
        for name in ("local engine, FedBuff, 1", "local engine, 1"):
            pairs = zip(runs["bare loop, 1"], runs[name], strict=True)
            ratios = [a["uploads_per_second"] / b["uploads_per_second"] for a, b in pairs]
            cells.append(f"{median(ratios):.2f}")
        lines.append([f"[{text}](../benchmarks/results/{page}.md)", *cells])
    return table(["run over bare training loop, one process", "FedBuff", "FedPSA"], lines)


PARTS: dict[str, Callable[[], str]] = {
    "curves": curves_table,
    "accuracy": reproduction_tables.accuracy_table,
    "skew": reproduction_tables.skew_table,
    "fair": reproduction_tables.fair_table,
    "overhead-linear": reproduction_tables.overhead_table,
    "ablation": reproduction_tables.ablation_table,
    "times": reproduction_tables.times_table,
    "stages": reproduction_tables.stages_table,
    "held-out": reproduction_tables.held_out_table,
    "midpoint-areas": partial(midpoint_tables.gaps, "area_under_curve", 1.0, 4),
    "midpoint-parts": midpoint_tables.parts,
    "midpoint-robust": midpoint_tables.robust,
    "midpoint-ends": partial(midpoint_tables.gaps, "late_accuracy", 100.0, 2),
    "sketch-noise": sketch_noise_table,
    "leftovers": leftovers_table,
    "costs": cost_table,
    "formats": formats_table,
    "update": update_sentence,
    "nodes": nodes_table,
    "queued": queued_table,
    "cluster": cluster_table,
    "large": large_table,
    "fleet": fleet_table,
    "server": server_table,
    "sketch": sketch_table,
    "engines": engines_table,
    "overhead": overhead_table,
}


def with_figures(page: str) -> str:
    """Return a page with its measured parts made again."""
    return _PART.sub(lambda match: match[1] + PARTS[match[2]]().strip() + "\n" + match[3], page)


def _text_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(name: str) -> list[Row]:
    return from_lines((ROOT / "results" / name / "cells.jsonl").read_text(encoding="utf-8"))


def _measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _page(name: str) -> str:
    return f"[{name}](../benchmarks/results/{name}.md)"


def _method(name: str) -> str:
    return "uniform buffer (control)" if name == "Uniform" else name


def _estimate(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def _round(value: float) -> str:
    """Return two significant digits."""
    return f"{float(f'{value:.2g}'):,g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


def _seconds(value: float) -> str:
    return f"{_round(value)} s" if value >= 1 else f"{_round(1000 * value)} ms"


if __name__ == "__main__":
    for path in (ROOT / name for name in PAGES):
        path.write_text(with_figures(path.read_text(encoding="utf-8")), encoding="utf-8")
