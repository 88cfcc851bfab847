"""What an update costs on real processes, where Flower starts a new one for each."""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from fedpsa_strategy import Probe
from server_app.build import make_task
from server_app.settings import Settings
from simulation.grpc_engine import run_on_processes


def one_update(dataset: str, data_dir: str, cache_dir: str, probe: str) -> dict[str, float]:
    """Make an update in a fresh process and return how long its parts took."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.fresh_client_run"),
            *(str(time.time()), dataset, data_dir, cache_dir, probe),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def deployed(dataset: str, data_dir: str, cache_dir: str, nodes: int, versions: int) -> list[float]:
    """Run on SuperLink and SuperNodes; return the seconds from sending a task to its upload."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config: dict[str, Any] = {
            "dataset": dataset,
            "data-dir": data_dir,
            "cache-dir": cache_dir,
            "num-clients": nodes,
            "clock": "wall",
            "max-in-flight": 1,
            "buffer-size": 1,
            "queue-size": 2,
            "num-server-rounds": versions,
            "evaluate-every": 1000,
            "run-dir": str(run_dir),
        }
        run_on_processes(ROOT, config, num_nodes=nodes, stream=False)
        lines = (run_dir / "events.jsonl").read_text().splitlines()
    sent, found = {}, []
    for event in map(json.loads, lines):
        if event["event"] == "dispatch":
            sent[event["sequence"]] = event["wall"]
        elif event["event"] == "upload":
            found.append(event["wall"] - sent[event["sequence"]])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.fresh_client", __doc__ or "")
    options.add_argument("--dataset", default="fmnist")
    options.add_argument("--data-dir", default="", help="where the dataset's files are")
    options.add_argument(
        "--deploy", type=int, default=0, metavar="N", help="also N updates on real processes"
    )
    parsed = options.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    command = f"python -m benchmarks.fresh_client --dataset {parsed.dataset}"
    report = Report("fresh_client", "An update in a fresh process", command)
    report.text(
        f"{parsed.dataset}, 50 clients, 5 epochs, the eager step, data from the cache that the "
        "first process of a node fills. Seconds of wall time; median and range."
    )
    with tempfile.TemporaryDirectory() as cache:
        settings = Settings(dataset=parsed.dataset, data_dir=parsed.data_dir, cache_dir=cache)
        task: Any = make_task(settings)
        task.prepare()
        model = task.make_model(0)
        shape = tuple(task.test_data().x.shape[1:])
        probe = json.dumps(Probe.gaussian(model, shape, num_classes=10).config())
        runs = [
            one_update(parsed.dataset, parsed.data_dir, cache, probe)
            for _ in range(parsed.repeats + 1)
        ][1:]
        times = (
            deployed(parsed.dataset, parsed.data_dir, cache, 2, parsed.deploy)
            if parsed.deploy
            else []
        )
    parts = {key: Spread.of(run[key] for run in runs) for key in runs[0]}
    ours = [sum(value for key, value in run.items() if key.startswith("ours")) for run in runs]
    report.table("", ["part", "seconds"], [[key, value.show()] for key, value in parts.items()])
    report.text(f"Our part: {Spread.of(ours).show()} s.")
    if times:
        report.text(
            f"On a SuperLink with two SuperNodes over gRPC, {len(times)} updates one after the "
            f"other: {Spread.of(times).show()} s from sending a task to its upload, mean "
            f"{statistics.fmean(times):.3g} s. Beside the parts above that is Flower's: the "
            "SuperNode's polling, two transfers, and starting the process."
        )
    report.target(f"{parsed.dataset}: our part of a fresh update, s", statistics.median(ours), 0.5)
    report.data("parts", parts)
    report.data("ours", Spread.of(ours))
    report.data("deployed_seconds", times)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
