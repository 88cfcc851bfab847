"""A real deployment: what a SuperLink spends on nodes and updates, and how long an update takes."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread
from benchmarks.report import Report, parser, with_unit
from simulation.engines.grpc import Deployment


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident(pid: int) -> int:
    """Return the memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)


def update_seconds(events: Path) -> list[float]:
    """Return for each upload of a run the seconds since its task was sent."""
    sent: dict[int, float] = {}
    found = []
    for event in map(json.loads, events.read_text().splitlines()):
        if event["event"] == "dispatch":
            sent[event["sequence"]] = event["wall"]
        elif event["event"] == "upload":
            found.append(event["wall"] - sent[event["sequence"]])
    return found


def measure_idle(nodes: int, seconds: float) -> dict[str, float]:
    """Start a SuperLink with some nodes and watch it while nothing is to be done."""
    with Deployment(ROOT, num_nodes=nodes) as deployment:
        pid = deployment.superlink_pid
        time.sleep(3.0)
        before, started = cpu_seconds(pid), time.monotonic()
        time.sleep(seconds)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - started)
        return {"nodes": nodes, "cpu_share": idle, "memory": resident(pid)}


def measure_runs(
    nodes: int, updates: Sequence[int], idle: float, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Let runs of different lengths pass through a SuperLink.

    `idle` is the share of a core that it takes anyway.
    """
    found = []
    with Deployment(ROOT, num_nodes=nodes) as deployment, tempfile.TemporaryDirectory() as folder:
        for number in updates:
            run_dir = Path(folder) / str(number)
            before, started = cpu_seconds(deployment.superlink_pid), time.monotonic()
            summary = deployment.run(
                {
                    "num-clients": nodes,
                    "clock": "wall",
                    "buffer-size": 1,
                    "queue-size": 2,
                    "max-in-flight": nodes,
                    "num-server-rounds": number,
                    "evaluate-every": 1000,
                    "run-dir": str(run_dir),
                    **config,
                },
                stream=False,
            )
            seconds = time.monotonic() - started
            busy = cpu_seconds(deployment.superlink_pid) - before - idle * seconds
            found.append(
                {
                    "updates": summary["uploads"],
                    "seconds": seconds,
                    "cpu_seconds": busy,
                    "server_app_seconds": summary["server_seconds"],
                    "bytes_up": summary["bytes_up"],
                    "update_seconds": Spread.of(update_seconds(run_dir / "events.jsonl")),
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.superlink", __doc__ or "")
    options.add_argument("--nodes", type=int, nargs=2, default=[2, 20], metavar=("FEW", "MANY"))
    options.add_argument("--idle", type=float, default=60.0, help="seconds of watching")
    options.add_argument(
        "--updates", type=int, nargs=2, default=[4, 24], metavar=("FEW", "MANY"), help="of two runs"
    )
    options.add_argument("--dataset", default="digits")
    options.add_argument("--data-dir", default="")
    parsed = options.parse_args(arguments)
    report = Report(
        "superlink",
        "A real deployment",
        "python -m benchmarks.superlink"
        f" --nodes {parsed.nodes[0]} {parsed.nodes[1]} --idle {parsed.idle:g}"
        f" --updates {parsed.updates[0]} {parsed.updates[1]} --dataset {parsed.dataset}",
    )
    few, many = (measure_idle(nodes, parsed.idle) for nodes in parsed.nodes)
    config = {"dataset": parsed.dataset, "data-dir": parsed.data_dir}
    short, long = measure_runs(parsed.nodes[0], parsed.updates, few["cpu_share"], config)
    per_node = (many["cpu_share"] - few["cpu_share"]) / (many["nodes"] - few["nodes"])
    per_update = (long["cpu_seconds"] - short["cpu_seconds"]) / (long["updates"] - short["updates"])
    report.text(
        "Processor time of the SuperLink's process. Idle: SuperNodes are connected and ask for "
        f"work every 3 seconds. Updates: two runs ({parsed.dataset}, {parsed.nodes[0]} nodes), so "
        "that what a run costs once, such as handing out the app, cancels out; both messages of an "
        "update and the polling of the ServerApp are in it. The time of an update is that from "
        "sending its task to its upload: the node's polling, a child of the warm process, "
        "training, and two transfers. Median and range."
    )
    report.table(
        "Idle",
        ["nodes", "share of a core", "memory"],
        [
            [run["nodes"], f"{100 * run['cpu_share']:.2f} %", with_unit(run["memory"])]
            for run in (few, many)
        ],
    )
    report.table(
        "Updates",
        ["updates", "seconds", "one update, s", "CPU seconds beyond idling", "bytes up per update"],
        [
            [
                run["updates"],
                f"{run['seconds']:.0f}",
                run["update_seconds"].show(),
                f"{run['cpu_seconds']:.2f}",
                with_unit(run["bytes_up"] / run["updates"]),
            ]
            for run in (short, long)
        ],
    )
    report.text(
        f"One more idle node costs {100 * per_node:.3f} % of a core, one more update "
        f"{per_update:.3f} s of processor time."
    )
    report.data("per_idle_node", per_node)
    report.data("per_update", per_update)
    report.data("idle", [few, many])
    report.data("runs", [short, long])
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
