"""What an upload costs the server as the number of clients grows."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from benchmarks.echo_client import SKETCH
from benchmarks.jobs import ROOT
from benchmarks.measure import Spread, own_peak, paired_ratio
from benchmarks.report import Report, parser, with_unit
from fedpsa_strategy import FedPSA, UniformLatency, VirtualClock
from fedpsa_strategy.events import Event, RunStarted, Uploaded
from simulation.local_engine import LocalGrid

CLIENTS = (50, 500, 5_000, 50_000)
IN_FLIGHT = (10, 100, 1_000)
_MODEL = (784, 10)  # Fashion-MNIST's


class _Stopwatch:
    """Listener that notes the processor time of every upload."""

    def __init__(self) -> None:
        self.started = 0.0
        self.times: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started = time.process_time()
        elif isinstance(event, Uploaded):
            self.times.append(time.process_time())


def measure_here(clients: int, in_flight: int, uploads: int) -> dict[str, float]:
    """Run FedPSA with clients that answer at once, all in this process."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    watch = _Stopwatch()
    strategy = FedPSA(
        sketch_fn=lambda _arrays: SKETCH,
        max_in_flight=in_flight,
        clock=VirtualClock(UniformLatency()),
        num_clients=clients,
        node_timeout=3600.0,
        listeners=[watch],
    )
    arrays = ArrayRecord(
        {"weight": Array(np.zeros(_MODEL[::-1], np.float32)), "bias": Array(np.zeros(10, "f4"))}
    )
    before = time.process_time()
    with LocalGrid(clients, {}, workers=0, app="benchmarks.echo_client:app") as grid:
        strategy.start(
            grid,
            arrays,
            num_rounds=(uploads + in_flight) // 5,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 5, "batch-size": 64}),
        )
    counted = watch.times[in_flight:]  # from where on the slots are filled one by one
    return {
        "seconds_per_upload": (counted[-1] - counted[0]) / (len(counted) - 1),
        "start_seconds": watch.started - before,
        "peak_memory": own_peak(),
    }


def measure(clients: int, in_flight: int, uploads: int) -> dict[str, float]:
    """Do that in a process of its own, for the sake of its memory."""
    command = [sys.executable, "-m", "benchmarks.growth", "--one"]
    numbers = map(str, (clients, in_flight, uploads))
    done = subprocess.run(
        [*command, *numbers], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.growth", __doc__ or "")
    options.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    options.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    options.add_argument("--uploads", type=int, default=1000)
    options.add_argument("--one", type=int, nargs=3, help="clients, in flight, uploads: only this")
    parsed = options.parse_args(arguments)
    if parsed.one:
        print(json.dumps(measure_here(*parsed.one)))
        return
    report = Report("growth", "Growth in the number of clients", "python -m benchmarks.growth")
    report.text(
        "FedPSA with Fashion-MNIST's linear model on the local engine, virtual clock. The clients "
        "answer at once, so that what is left is ours: sampling, messages, the order of replies, "
        "checks, aggregation. Processor time of the one process, client side included. Median and "
        "range over the repeats, in turn."
    )
    cells = [
        (clients, in_flight)
        for clients in parsed.clients
        for in_flight in parsed.in_flight
        if in_flight <= clients
    ]
    found: dict[tuple[int, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    for _ in range(parsed.repeats):
        for cell in cells:
            found[cell].append(measure(*cell, parsed.uploads))
    costs = {cell: [run["seconds_per_upload"] for run in runs] for cell, runs in found.items()}
    rows: list[list[Any]] = []
    for (clients, in_flight), runs in found.items():
        cost = Spread.of(costs[clients, in_flight])
        rows.append(
            [
                f"{clients:,}",
                f"{in_flight:,}",
                cost.show(1e3),
                f"{1 / cost.median:,.0f}",
                paired_ratio(costs[clients, in_flight], costs[cells[0]]).show(),
                with_unit(max(run["peak_memory"] for run in runs)),
                Spread.of(run["start_seconds"] for run in runs).show(),
            ]
        )
    report.table(
        "",
        ["clients", "in flight", "ms per upload", "uploads/s", "relative", "memory", "start, s"],
        rows,
    )
    worst = max(paired_ratio(costs[cell], costs[cells[0]]).median for cell in cells)
    report.target("cost of an upload, largest over smallest setting", worst, 1.2)
    report.data(
        "runs", [{"clients": c, "in_flight": f, "runs": runs} for (c, f), runs in found.items()]
    )
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
