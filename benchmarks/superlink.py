"""What a SuperLink spends on a connected node, and on an update that passes through it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT
from benchmarks.report import Report, parser, with_unit
from simulation.grpc_engine import Deployment

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(
    nodes: int, idle_seconds: float, versions: int, config: dict[str, Any]
) -> dict[str, float]:
    """Start a SuperLink with some nodes; watch it idle, then with a run of `versions` updates."""
    with Deployment(ROOT, num_nodes=nodes) as deployment:
        pid = deployment.superlink_pid
        time.sleep(3.0)
        before, started = cpu_seconds(pid), time.monotonic()
        time.sleep(idle_seconds)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - started)
        found = {"nodes": nodes, "idle_cpu_share": idle, "memory_idle": resident(pid)}
        if not versions:
            return found
        with tempfile.TemporaryDirectory() as folder:
            before, started = cpu_seconds(pid), time.monotonic()
            summary = deployment.run(
                {
                    "num-clients": nodes,
                    "clock": "wall",
                    "buffer-size": 1,
                    "queue-size": 2,
                    "max-in-flight": nodes,
                    "num-server-rounds": versions,
                    "evaluate-every": 1000,
                    "run-dir": str(Path(folder) / "run"),
                    **config,
                },
                stream=False,
            )
            seconds = time.monotonic() - started
            busy = cpu_seconds(pid) - before - idle * seconds
    return found | {
        "updates": summary["uploads"],
        "seconds_of_run": seconds,
        "cpu_per_update": busy / summary["uploads"],
        "server_app_seconds_per_update": summary["server_seconds"] / summary["uploads"],
        "bytes_up_per_update": summary["bytes_up"] / summary["uploads"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.superlink", __doc__ or "")
    options.add_argument("--nodes", type=int, nargs="+", default=[2, 6])
    options.add_argument("--idle", type=float, default=30.0, help="seconds of watching")
    options.add_argument("--updates", type=int, default=10)
    options.add_argument("--dataset", default="digits")
    options.add_argument("--data-dir", default="")
    parsed = options.parse_args(arguments)
    report = Report(
        "superlink", "What passes through a SuperLink", "python -m benchmarks.superlink"
    )
    config = {"dataset": parsed.dataset, "data-dir": parsed.data_dir}
    found = [measure(n, parsed.idle, parsed.updates, config) for n in parsed.nodes]
    report.text(
        f"Processor time of the SuperLink's process: with SuperNodes that are connected and have "
        f"nothing to do, and beyond that per update of a run ({parsed.dataset}, both messages, "
        "polling by the ServerApp included)."
    )
    report.table(
        "",
        ["nodes", "idle: share of a core", "per update, CPU s", "bytes up", "memory, idle"],
        [
            [
                run["nodes"],
                f"{100 * run['idle_cpu_share']:.2f} %",
                f"{run['cpu_per_update']:.3g}" if "cpu_per_update" in run else "",
                with_unit(run["bytes_up_per_update"]) if "bytes_up_per_update" in run else "",
                with_unit(run["memory_idle"]),
            ]
            for run in found
        ],
    )
    if len(found) > 1:
        first, last = found[0], found[-1]
        slope = (last["idle_cpu_share"] - first["idle_cpu_share"]) / (
            last["nodes"] - first["nodes"]
        )
        report.text(f"One more idle node costs {100 * slope:.3f} % of a core.")
        report.data("idle_slope", slope)
    report.data("runs", found)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
