"""Cells of an experiment per minute: the local scheduler, and Ray nodes of one processor each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from simulation.engines.flower.processes import ProcessGroup
from simulation.environment import TOKEN_VARIABLE, free_port, new_token

CASES = {
    "local scheduler, one at a time": (1, 0),
    "one Ray node of one processor": (1, 1),
    "local scheduler, two side by side": (2, 0),
    "two Ray nodes of one processor each": (2, 2),
}
"""How many cells run at a time, and on how many Ray nodes; 0: without Ray."""

_START_SECONDS = 120.0


@contextmanager
def ray_nodes(number: int) -> Iterator[str]:
    """Start Ray nodes of one processor each on this machine; give the cluster's address."""
    environment = {**os.environ, TOKEN_VARIABLE: new_token(), "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's sockets need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        ProcessGroup(Path(folder) / "logs", environment=environment) as group,
    ):
        port, address = free_port(), ""
        for index in range(number):
            place = ["--head", f"--port={port}", "--include-dashboard=false"]
            place.append(f"--ray-client-server-port={free_port()}")
            if address:
                place = [f"--address={address}"]
            own = Path(folder) / str(index)
            own.mkdir()
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place]
            command += ["--num-cpus=1", f"--temp-dir={own}"]
            node = group.start(f"node-{index}", command)
            deadline = time.monotonic() + _START_SECONDS
            while "Ray runtime started" not in (said := node.tail(100)):
                if not node.running or time.monotonic() > deadline:
                    raise RuntimeError(f"Ray did not start:\n{said}")
                time.sleep(0.1)
            local = next(line for line in said.splitlines() if "Local node IP" in line)
            address = address or f"{local.rpartition(' ')[2]}:{port}"
        yield address


def measure(cells: int, days: float, jobs: int, nodes: int) -> tuple[float, float]:
    """Return cells per minute once they run, and the seconds before the first one starts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "simulation", "reproduce", "table-accuracy"]
        command += ["--datasets", "digits", "--alphas", "0.5", "--methods", "FedBuff"]
        command += ["--seeds", f"0-{cells - 1}", "--days", f"{days:g}", "--jobs", str(jobs)]
        if not nodes:
            return _timed(command, folder)
        with ray_nodes(nodes) as address:
            return _timed([*command, "--on", "ray", "--ray-address", address], folder)


def _timed(command: Sequence[str], folder: str) -> tuple[float, float]:
    begun = time.monotonic()
    first = last = 0.0
    finished = 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("started") and not first:
                first = time.monotonic()
            elif line.startswith("finished"):
                finished, last = finished + 1, time.monotonic()
    if process.returncode or not finished:
        raise RuntimeError(f"the command ended with exit code {process.returncode}")
    return 60 * finished / (last - first), first - begun


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.cluster", __doc__ or "")
    options.add_argument("--cells", type=int, default=8, help="runs in each measurement")
    options.add_argument("--days", type=float, default=0.25, help="virtual days of a run")
    parsed = options.parse_args(arguments)
    command = f"python -m benchmarks.cluster --cells {parsed.cells} --days {parsed.days:g}"
    report = Report("cluster", "Experiments on Ray", f"{command} --repeats {parsed.repeats}")
    report.text(
        f"`reproduce` with {parsed.cells} runs of FedBuff on digits, {parsed.days:g} virtual days"
        " each, in turn with the local scheduler and as Ray tasks. Ray nodes are processes on one"
        " machine, of one processor each as Ray counts; all share the machine's real ones. Before"
        " the first run Ray's driver joins, and each node is checked for code, packages and data."
        " Median and range over the repeats."
    )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(parsed.repeats):
        for name, (jobs, nodes) in CASES.items():
            found[name].append(measure(parsed.cells, parsed.days, jobs, nodes))
            print(f"  {name}: {found[name][-1][0]:.2f} cells/min", flush=True)
    rows: list[list[Any]] = []
    for name, runs in found.items():
        rates, starts = zip(*runs, strict=True)
        rows.append([name, Spread.of(rates).show(), Spread.of(starts).show()])
    report.table("", ["where", "cells/min", "seconds before the first"], rows)
    report.data("cases", found)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
