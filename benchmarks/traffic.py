"""How many bytes travel per update, for every method; and what shorter uploads cost."""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report, parser, with_unit
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.events import Dispatched, Uploaded
from fedpsa_strategy.watch.event_log import read_events
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPES
from simulation.engines.local.run import run_locally
from simulation.machine import num_cores


@dataclass(frozen=True)
class Traffic:
    """Bytes per update, as Flower's messages carry them, without what a transport adds."""

    down: float
    up: float


def measure(method: str, dataset: str, data_dir: str, **settings: Any) -> Traffic:
    """Run a few updates of a method and count."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "strategy": method,
            "dataset": dataset,
            "data-dir": data_dir,
            "num-clients": 2000 if dataset != "digits" else 50,  # little to train on
            "local-epochs": 1,
            "test-fraction": 0.01,
            "evaluate-every": 1000,
            "max-in-flight": 2,
            "buffer-size": 2,
            "num-server-rounds": 2,
            "run-dir": str(Path(folder) / "run"),
            **settings,
        }
        run_locally(config, workers=0, stream=False)
        events = list(read_events(Path(folder) / "run" / "events.jsonl"))
    down = [event.num_bytes for event in events if isinstance(event, Dispatched)]
    up = [event.num_bytes for event in events if isinstance(event, Uploaded)]
    return Traffic(statistics.fmean(down), statistics.fmean(up))


def accuracy(dataset: str, width: float, days: float, parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the final accuracies with each of the number formats."""
    usual: dict[str, Any] = {"lr": 0.1, "batch-size": 16} if dataset == "digits" else {}
    found: dict[str, Any] = {}
    for update_dtype in parsed.formats:
        runs = []
        for seed in range(parsed.seeds):
            with tempfile.TemporaryDirectory() as folder:
                config = {
                    "dataset": dataset,
                    "model-width": width,
                    "data-dir": parsed.data_dir,
                    "dirichlet-alpha": 0.1,
                    "virtual-days": days,
                    "seed": seed,
                    "update-dtype": update_dtype,
                    "evaluate-interval": days * 86_400 / 20,
                    "run-dir": str(Path(folder) / "run"),
                    **usual,
                }
                runs.append(run_locally(config, workers=parsed.workers, stream=False))
        found[update_dtype] = [
            {key: run[key] for key in ("accuracy", "best_accuracy", "uploads", "bytes_up")}
            for run in runs
        ]
    return found


def _report_traffic(report: Report, parsed: argparse.Namespace) -> None:
    rows, data = [], {}
    for dataset in parsed.datasets:
        found = {
            method: measure(method, dataset, parsed.data_dir)
            for method, kind in METHODS.items()
            if not (kind.needs_head and dataset == "fmnist")  # its model has no encoder
        }
        for update_dtype in parsed.formats[1:]:
            found[f"fedpsa, {update_dtype}"] = measure(
                "fedpsa", dataset, parsed.data_dir, **{"update-dtype": update_dtype}
            )
        base = found["fedbuff"]
        for name, traffic in found.items():
            more = traffic.down + traffic.up - base.down - base.up
            rows.append(
                [
                    dataset,
                    name,
                    with_unit(traffic.down),
                    with_unit(traffic.up),
                    f"{more:+,.0f} B ({100 * more / base.up:+.2g} % of an upload)",
                ]
            )
        data[dataset] = found
        ours = found["fedpsa"]
        if dataset in ("mnist", "cifar10", "cifar100"):
            report.target(
                f"{dataset}: what FedPSA adds, both ways, in % of an update",
                100 * (ours.down + ours.up - base.down - base.up) / base.up,
                0.1,
            )
    if rows:
        report.table("", ["dataset", "method", "down", "up", "against FedBuff, both ways"], rows)
    report.data("traffic", data)


def _report_accuracies(report: Report, parsed: argparse.Namespace) -> None:
    accuracies = {}
    for text in parsed.accuracy:
        model, _, days = text.partition("=")
        dataset, _, width = model.partition(":")
        wide = f" (model-width {width})" if width else ""
        found = accuracy(dataset, float(width or 1), float(days), parsed)
        accuracies[text] = found
        exact = [run["accuracy"] for run in found["float32"]]
        report.table(
            f"{dataset}{wide}, {days} virtual days, FedPSA, α 0.1: accuracy by `update-dtype`",
            ["format", "accuracy per seed, %", "mean", "mean difference to float32", "bytes up"],
            [
                [
                    update_dtype,
                    ", ".join(f"{100 * run['accuracy']:.2f}" for run in runs),
                    f"{100 * statistics.fmean(run['accuracy'] for run in runs):.2f}",
                    f"{_difference(runs, exact):+.2f}",
                    with_unit(runs[0]["bytes_up"]),
                ]
                for update_dtype, runs in found.items()
            ],
        )
    report.data("accuracy", accuracies)


def _difference(runs: Sequence[dict[str, Any]], exact: Sequence[float]) -> float:
    pairs = zip(runs, exact, strict=True)
    return 100 * statistics.fmean(run["accuracy"] - value for run, value in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.traffic", __doc__ or "")
    options.add_argument("--datasets", nargs="*", default=["digits", "fmnist", "mnist"])
    options.add_argument("--data-dir", default="", help="where the datasets' files are")
    options.add_argument(
        "--accuracy",
        nargs="*",
        default=[],
        metavar="DATASET[:WIDTH]=DAYS",
        help="also the accuracies, with models of that width",
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--formats", nargs="+", default=UPDATE_DTYPES, choices=UPDATE_DTYPES)
    options.add_argument("--workers", type=int, default=num_cores(), help="0: no other process")
    options.add_argument("--label", default="", help="word behind the page's name")
    parsed = options.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    command = "python -m benchmarks.traffic --datasets " + " ".join(parsed.datasets)
    if parsed.accuracy:
        command += " --accuracy " + " ".join(parsed.accuracy)
    if parsed.label:
        command += f" --seeds {parsed.seeds} --formats " + " ".join(parsed.formats)
    report = Report("traffic", "Bytes per update", command, parsed.label)
    report.text(
        "What the records of a train message and of its reply hold: arrays with NumPy's headers, "
        "names and numbers. FedPSA's own part is its difference to FedBuff: what a node needs to "
        "rebuild the calibration batch and the projection on the way down, the sketch and its "
        "timing on the way up."
    )
    _report_traffic(report, parsed)
    _report_accuracies(report, parsed)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
