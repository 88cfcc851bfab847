"""Warm nodes and ordinary ones: how long an update takes, where its time goes, and what it costs.

Two real deployments stand side by side, and runs alternate between them. The parts of an update
come from the log of the nodes and from a ClientApp that says when it has been imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from simulation.engines.grpc import Deployment, Node

KINDS = {"ordinary": False, "warm": True}
PARTS = {
    "node asks for work": "Flower: an idle node asks every 3 s",
    "start": "from there to Flower's first line in the client's process: the executor's look for"
    " work, and the process with its imports, or hand-over and fork",
    "message and bundle": "Flower: fetching the message, unpacking the app",
    "import of the app": "with torch, unless it is preloaded",
    "training": "with building the model and reading the data",
    "way back": "Flower: handing over the reply, which the node looks for twice a second and sends",
}
_TIMED = """\
import time

started = time.time()
from client_app.app import app as inner

print("BENCHMARK", started, time.time(), flush=True)
from flwr.clientapp import ClientApp


class Timed(ClientApp):
    def __call__(self, message, context):
        reply = inner(message, context)
        print("BENCHMARK END", time.time(), flush=True)
        return reply


app = Timed()
"""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})")


def timed_app(folder: Path) -> Path:
    """Copy the app, with a ClientApp that prints when it was imported."""
    for package in ("fedpsa_strategy", "server_app", "client_app", "task"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")  # which its bundle must hold
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        text.replace("client_app.app:app", "client_app.timed:app")
    )
    (folder / "client_app" / "timed.py").write_text(_TIMED)
    return folder


def cpu_seconds(nodes: Sequence[Node]) -> float:
    """Return the processor time of nodes so far, with that of all processes they have had."""
    total = 0.0
    for node in nodes:
        supernode = psutil.Process(node.pid)
        for process in [supernode, *supernode.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
    return total


def messages(log: str) -> Iterator[dict[str, float]]:
    """Yield the moments of each train message in a node's log."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        stamp = _STAMP.search(line)
        now = datetime.fromisoformat(stamp[1]).timestamp() if stamp else 0.0
        if "Receiving: " in line:
            found = {"received": now} if "train message" in line else {}
        elif "Start `flwr-clientapp` process" in line:
            found["started"] = now
        elif "fedpsa-node: started in" in line:
            found["handed over in"] = float(line.split("started in ")[1].split()[0])
        elif line.startswith("BENCHMARK END"):
            found["ended"] = float(line.split()[2])
        elif line.startswith("BENCHMARK"):
            _, begun, done = line.split()
            found |= {"import begun": float(begun), "imported": float(done)}
        elif "Sent successfully" in line and "ended" in found and "received" in found:
            yield found | {"sent": now}
            found = {}


def parts(log: str, events: Sequence[dict[str, Any]], node_id: int) -> dict[str, list[float]]:
    """Return for each part of an update its seconds, over all updates of a node."""
    sent = {e["sequence"]: e["wall"] for e in events if e["event"] == "dispatch"}
    mine = [
        (sent[e["sequence"]], e["wall"])
        for e in events
        if e["event"] == "upload" and e["node_id"] == node_id
    ]
    found = defaultdict(list)
    for moments in messages(log):
        received = moments["received"] + 0.01  # the log has milliseconds
        begun = [begin for begin, end in mine if begin <= received <= end]
        if not begun:
            continue  # of another run, or after its end
        found["node asks for work"].append(received - begun[0])
        found["start"].append(moments["started"] - moments["received"])
        found["message and bundle"].append(moments["import begun"] - moments["started"])
        found["import of the app"].append(moments["imported"] - moments["import begun"])
        found["training"].append(moments["ended"] - moments["imported"])
        found["way back"].append(moments["sent"] - moments["ended"])
        if "handed over in" in moments:
            own = moments["handed over in"] + found["import of the app"][-1]
            found["hand-over and fork"].append(moments["handed over in"])
            found["own part"].append(own)
    return found


def run_once(
    deployment: Deployment, folder: Path, updates: int, config: dict[str, Any]
) -> dict[str, Any]:
    """Run, and return the time of each update, its parts, and the processor time of one."""
    logs = {node.node_id: node.process.log_path for node in deployment.nodes}
    read = {node_id: path.stat().st_size for node_id, path in logs.items()}
    before = cpu_seconds(deployment.nodes)
    nodes = len(deployment.nodes)
    summary = deployment.run(
        {
            "num-clients": nodes,
            "clock": "wall",
            "buffer-size": 2,
            "queue-size": 4,
            "max-in-flight": 1,
            "num-server-rounds": updates // 2,
            "evaluate-every": 1000,
            "run-dir": str(folder),
            **config,
        },
        stream=False,
    )
    spent = cpu_seconds(deployment.nodes) - before
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    sent = {e["sequence"]: e["wall"] for e in events if e["event"] == "dispatch"}
    seconds = [e["wall"] - sent[e["sequence"]] for e in events if e["event"] == "upload"]
    found: dict[str, list[float]] = defaultdict(list)
    for node_id, path in logs.items():
        text = path.read_bytes()[read[node_id] :].decode(errors="replace")
        for name, values in parts(text, events, int(node_id or 0)).items():
            found[name] += values
    return {
        "seconds": seconds,
        "cpu": spent / len(seconds),
        "parts": found,
        "model": summary["model_sha256"],
    }


def measure(
    dataset: str, data_dir: str, updates: int, rounds: int, nodes: int
) -> dict[str, dict[str, Any]]:
    """Let runs alternate between a warm deployment and an ordinary one."""
    config = {"dataset": dataset, "data-dir": data_dir}
    found: dict[str, dict[str, Any]] = {
        kind: {"seconds": [], "cpu": [], "parts": defaultdict(list), "model": set()}
        for kind in KINDS
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "app").mkdir()
        app = timed_app(folder / "app")
        deployments = {
            kind: stack.enter_context(Deployment(app, num_nodes=nodes, warm=warm))
            for kind, warm in KINDS.items()
        }
        for number in range(rounds):
            for kind, deployment in deployments.items():
                run = run_once(deployment, folder / f"{kind}-{number}", updates, config)
                found[kind]["seconds"] += run["seconds"]
                found[kind]["cpu"].append(run["cpu"])
                found[kind]["model"].add(run["model"])
                for name, values in run["parts"].items():
                    found[kind]["parts"][name] += values
    return found


def add_to(report: Report, dataset: str, found: dict[str, dict[str, Any]]) -> None:
    """Write what was measured with one dataset."""
    seconds = {kind: Spread.of(each["seconds"]) for kind, each in found.items()}
    cpu = {kind: Spread.of(each["cpu"]) for kind, each in found.items()}
    report.table(
        f"{dataset}: one update",
        ["nodes", "updates", "seconds", "processor time on the node, s"],
        [
            [kind, seconds[kind].repeats, seconds[kind].show(), cpu[kind].show(digits=2)]
            for kind in KINDS
        ],
    )
    ratio = seconds["ordinary"].median / seconds["warm"].median
    saved = cpu["ordinary"].median / cpu["warm"].median
    report.text(
        f"Ratio of the medians: {ratio:.1f} in time, {saved:.1f} in processor time. Models of all"
        f" runs: {len(set.union(*(each['model'] for each in found.values())))} different."
    )
    rows = [
        [
            part,
            *(Spread.of(found[kind]["parts"][part]).show() for kind in KINDS),
            meaning,
        ]
        for part, meaning in PARTS.items()
    ]
    report.table(f"{dataset}: where the time goes, s", ["part", *KINDS, ""], rows)
    own = Spread.of(found["warm"]["parts"]["own part"])
    forked = Spread.of(found["warm"]["parts"]["hand-over and fork"])
    report.text(
        f"Our own part with a warm node, hand-over and fork ({forked.show()} s) and the import of"
        f" the app, is {own.show()} s."
    )
    report.target(f"{dataset}: own part, s", own.median, 0.5)
    report.target(f"{dataset}: processor time, ordinary over warm", saved, 2.0, at_least=True)
    report.data(
        dataset,
        {
            kind: {
                "seconds": each["seconds"],
                "cpu": each["cpu"],
                "parts": dict(each["parts"]),
                "models": sorted(each["model"]),
            }
            for kind, each in found.items()
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.nodes", __doc__ or "")
    options.add_argument("--datasets", nargs="+", default=["digits", "fmnist"])
    options.add_argument("--data-dir", default="")
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--updates", type=int, default=8, help="of a run")
    options.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parsed = options.parse_args(arguments)
    report = Report(
        "nodes",
        "Warm nodes",
        f"python -m benchmarks.nodes --datasets {' '.join(parsed.datasets)}"
        f" --nodes {parsed.nodes} --updates {parsed.updates} --rounds {parsed.rounds}",
    )
    report.text(
        "A SuperLink and SuperNodes over loopback, one task in flight; the time of an update is"
        " that from sending its task to its upload. A deployment with warm nodes (`fedpsa-node`)"
        " and one with Flower's own stand side by side, and runs alternate between them. Processor"
        " time is that of a node's processes during a run, divided by the run's uploads: SuperNode,"
        " executor, ClientApps, warm process. Median and range; parts are from the nodes' logs."
    )
    os.environ["FLWR_LOG_LEVEL"] = "DEBUG"
    for dataset in parsed.datasets:
        found = measure(dataset, parsed.data_dir, parsed.updates, parsed.rounds, parsed.nodes)
        add_to(report, dataset, found)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
