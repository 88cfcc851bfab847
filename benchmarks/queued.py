"""Tasks that wait at a node: what they gain in uploads, and cost in staleness and accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from benchmarks.superlink import update_seconds
from fedpsa_strategy.watch.event_log import read_events
from simulation.engines.grpc import Deployment


def measure(deployment: Deployment, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Let a run pass, and return its numbers."""
    summary = deployment.run(config | {"run-dir": str(folder)}, stream=False)
    times = [event.time for event in read_events(folder / "events.jsonl") if event.kind == "upload"]
    skipped = len(times) // 4  # until all nodes are at work, and have loaded what they need
    return {
        "uploads_per_minute": 60 * (len(times) - 1 - skipped) / (times[-1] - times[skipped]),
        "staleness": summary["mean_staleness"],
        "accuracy": summary["accuracy"],
        "update_seconds": Spread.of(update_seconds(folder / "events.jsonl")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turn, and write the page."""
    options = parser("benchmarks.queued", __doc__ or "")
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--queued", type=int, nargs="+", default=[0, 1], help="tasks that wait")
    options.add_argument("--updates", type=int, default=40, help="of each run")
    options.set_defaults(repeats=2)
    options.add_argument("--dataset", default="digits")
    options.add_argument("--data-dir", default="")
    parsed = options.parse_args(arguments)
    command = (
        f"python -m benchmarks.queued --nodes {parsed.nodes} --updates {parsed.updates}"
        f" --repeats {parsed.repeats} --dataset {parsed.dataset}"
        f" --queued {' '.join(map(str, parsed.queued))}"
    )
    report = Report("queued", "Tasks that wait at a node", command)
    found: dict[int, list[dict[str, Any]]] = {queued: [] for queued in parsed.queued}
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(ROOT, num_nodes=parsed.nodes) as deployment,
    ):
        for repeat in range(parsed.repeats):
            for queued, runs in found.items():
                config = {
                    "dataset": parsed.dataset,
                    "data-dir": parsed.data_dir,
                    "num-clients": parsed.nodes,
                    "clock": "wall",
                    "fraction-train": 1.0,
                    "queued-per-node": queued,
                    "buffer-size": 2,
                    "num-server-rounds": parsed.updates // 2,
                    "evaluate-every": parsed.updates // 2,
                    "seed": repeat,
                }
                runs.append(measure(deployment, Path(folder) / f"{queued}-{repeat}", config))
    report.text(
        f"SuperLink and {parsed.nodes} SuperNodes as processes of this machine, {parsed.dataset}, "
        f"FedPSA with a buffer of 2, all nodes kept busy, {parsed.updates} uploads a run, runs in "
        "turn. The rate leaves out the first quarter of the uploads. An update is the time from "
        "sending a task to its upload; with tasks that wait it has the time of waiting in it. "
        "Medians and ranges over the runs, for an update over the uploads of the last run."
    )
    report.table(
        "Runs",
        ["tasks that wait", "uploads a minute", "mean staleness", "final accuracy", "an update, s"],
        [
            [
                queued,
                Spread.of(run["uploads_per_minute"] for run in runs).show(),
                Spread.of(run["staleness"] for run in runs).show(),
                Spread.of(run["accuracy"] for run in runs).show(),
                runs[-1]["update_seconds"].show(),
            ]
            for queued, runs in found.items()
        ],
    )
    report.data("runs", {str(queued): runs for queued, runs in found.items()})
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
