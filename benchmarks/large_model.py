"""A model of a hundred million parameters over real gRPC: memory, bytes, time, checkpoints."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import nn

from benchmarks.jobs import ROOT
from benchmarks.measure import Spread, cpu_seconds_of, peak_memory
from benchmarks.report import Report, parser, with_unit
from benchmarks.superlink import update_seconds
from fedpsa_strategy import FedBuff, make_reply
from fedpsa_strategy.server.checkpoint import CheckpointStore
from fedpsa_strategy.server.events import Uploaded
from fedpsa_strategy.server.snapshot import take_snapshot
from fedpsa_strategy.watch.event_log import read_events
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS
from fedpsa_strategy.wire.layout import Layout
from fedpsa_strategy.wire.replies import count_bytes, read_train_reply
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPE_KEY, UPDATE_DTYPES
from simulation.engines.grpc import Deployment
from simulation.engines.local.internals import SERVER_NODE_ID, act_as, give_id

_TASK = """
import torch
from torch import nn
from torch.nn import functional

HIDDEN = {hidden}


def make_model(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(256, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, 10))


def _data(seed, samples):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 256, generator=generator), torch.arange(samples) % 10


def train_data(node_config):
    return _data(1 + node_config["partition-id"], 32)


def test_data():
    return _data(0, 20)


def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")
"""


def hidden_width(parameters: int) -> int:
    """Return the width of a perceptron with so many parameters."""
    return int((-268 + math.sqrt(268**2 + 4 * parameters)) / 2)


class Memory(threading.Thread):
    """Watches what each kind of process takes at most, all processes of the kind together."""

    def __init__(self, superlink: int, nodes: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.superlink = superlink
        self.nodes = nodes
        self.peak: dict[str, int] = {}
        self.total = 0
        self._over = threading.Event()

    def run(self) -> None:
        """Look five times a second."""
        while not self._over.wait(0.2):
            found: Counter[str] = Counter()
            for process in _family(self.superlink):
                with suppress(psutil.Error):
                    server = any("flwr-serverapp" in word for word in process.cmdline())
                    found["ServerApp" if server else "SuperLink"] += _private(process)
            for node in self.nodes:
                for process in _family(node):
                    with suppress(psutil.Error):
                        name = "SuperNode" if process.pid == node else "ClientApp, warm process"
                        found[name] += _private(process)
            self.total = max(self.total, found.total())
            for name, size in found.items():
                self.peak[name] = max(self.peak.get(name, 0), size)

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        self.join()


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _private(process: psutil.Process) -> int:
    """Return what a process has for itself: pages shared with a parent count once, there."""
    info: Any = process.memory_info()
    return int(info.rss - info.shared)


@contextmanager
def the_task(parameters: int) -> Iterator[str]:
    """Put the task where server and nodes find it; yields its name."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        text = _TASK.format(hidden=hidden_width(parameters))
        (Path(folder) / "large_task.py").write_text(text)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
        try:
            yield "large_task"
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def measure_run(
    deployment: Deployment, task: str, update_dtype: str, strategy: str, updates: int
) -> dict[str, Any]:
    """Let one client at a time make a few updates of the model."""
    memory = Memory(deployment.superlink_pid, deployment.node_pids)
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config: dict[str, Any] = {
            "strategy": strategy,
            "task": task,
            "num-clients": len(deployment.nodes),
            "clock": "wall",
            "buffer-size": 1,
            "max-in-flight": 1,
            "num-server-rounds": updates,
            "local-epochs": 1,
            "batch-size": 16,
            "evaluate-every": 1000,
            "checkpoint-seconds": 0.0,
            "update-dtype": update_dtype,
            "run-dir": str(run_dir),
        }
        started = time.monotonic()
        summary = deployment.run(config, stream=False)
        seconds = time.monotonic() - started
        memory.end()
        events = list(read_events(run_dir / "events.jsonl"))
        of_each = update_seconds(run_dir / "events.jsonl")
    return {
        "updates": summary["uploads"],
        "seconds": seconds,
        "update_seconds": Spread.of(of_each[1:] or of_each),
        "train_seconds": Spread.of(
            event.metrics["train-seconds"] for event in events if isinstance(event, Uploaded)
        ),
        "server_seconds": summary["server_seconds"] / summary["uploads"],
        "bytes_up": summary["bytes_up"] / summary["uploads"],
        "bytes_down": summary["bytes_down"] / summary["uploads"],
        "memory": memory.peak,
        "memory_in_all": memory.total,
    }


def measure_formats(parameters: int, formats: Sequence[str]) -> dict[str, dict[str, float]]:
    """Make a reply as a client does and read it as the server does, without anything between."""
    torch.set_num_threads(1)
    act_as(SERVER_NODE_ID)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(parameters))})
    arrays = ArrayRecord(model.state_dict())
    layout = Layout(arrays)
    start = layout.read(arrays)
    with torch.no_grad():
        model["w"].normal_(generator=torch.Generator().manual_seed(0))
    found = {}
    for update_dtype in formats:
        config: Any = {REPLY_ARRAYS: DELTA, "seed": 1, UPDATE_DTYPE_KEY: update_dtype}
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
        message = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
        give_id(message, "m1")
        replies: list[Message] = []
        figures: dict[str, float] = {}

        def make(message: Message = message, replies: list[Message] = replies) -> None:
            replies.append(make_reply(message, model, num_examples=1))

        def read(replies: list[Message] = replies, name: str = update_dtype) -> None:
            read_train_reply(replies[0], layout, start, update_dtype=name)

        for side, work in (("client", make), ("server", read)):
            spent: list[float] = []
            timed = partial(_note_seconds, work, spent)
            figures[f"{side}_memory"] = peak_memory(timed)
            figures[f"{side}_seconds"] = spent[0]
        figures["bytes"] = count_bytes(replies[0].content)
        found[update_dtype] = figures
    return found


def _note_seconds(work: Callable[[], None], spent: list[float]) -> None:
    spent.append(cpu_seconds_of(work))


def measure_checkpoint(parameters: int) -> dict[str, float]:
    """Save and load the state of a run with one task in flight, from an older version."""
    values = np.random.default_rng(0).normal(size=parameters).astype(np.float32)
    arrays = ArrayRecord({"w": Array(values)})
    strategy = FedBuff(buffer_size=2, num_clients=2)
    strategy.begin(arrays, [1, 2])
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        figures: dict[str, float] = {}
        for name, work in (
            ("save", lambda: store.save(1, take_snapshot(strategy.state, strategy.callbacks))),
            ("load", store.load_newest),
        ):
            started = time.monotonic()
            figures[f"{name}_core_seconds"] = cpu_seconds_of(work)
            figures[f"{name}_seconds"] = time.monotonic() - started
        (path,) = store.paths()
        return figures | {"bytes": path.stat().st_size}


def _report_runs(report: Report, parsed: argparse.Namespace) -> None:
    with (
        the_task(parsed.parameters) as task,
        Deployment(ROOT, num_nodes=1, warm=not parsed.cold) as deployment,
    ):
        found = {
            update_dtype: measure_run(
                deployment, task, update_dtype, parsed.strategy, parsed.updates
            )
            for update_dtype in parsed.formats
        }
    report.text(
        f"A perceptron of {parsed.parameters:,} parameters in float32 "
        f"({with_unit(4 * parsed.parameters)}), {parsed.strategy}, one SuperLink and one "
        f"{'node as Flower starts it' if parsed.cold else 'warm node'} as processes of one "
        f"machine, {parsed.updates} updates, one at a time. An update is from the task's message "
        "to its upload's effect; the first of a run is left out, because the node loads its "
        "libraries. It trains two batches of 16 samples. Bytes as the messages carry them."
    )
    report.table(
        "",
        ["update-dtype", "down", "up", "an update, s", "of it training, s", "ServerApp's work, s"],
        [
            [
                name,
                with_unit(run["bytes_down"]),
                with_unit(run["bytes_up"]),
                run["update_seconds"].show(),
                run["train_seconds"].show(),
                f"{run['server_seconds']:.2g}",
            ]
            for name, run in found.items()
        ],
    )
    roles = list(dict.fromkeys(role for run in found.values() for role in run["memory"]))
    report.table(
        "Memory at most, by kind of process",
        ["update-dtype", *roles, "in all at one time"],
        [
            [
                name,
                *(with_unit(run["memory"].get(role, 0)) for role in roles),
                with_unit(run["memory_in_all"]),
            ]
            for name, run in found.items()
        ],
    )
    report.text(
        "Resident memory without what processes share, looked at five times a second. The "
        "ClientApp's column has the warm process from which it starts, if there is one."
    )
    report.data("runs", found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.large_model", __doc__ or "")
    options.add_argument("--parameters", type=int, default=100_000_000)
    options.add_argument("--updates", type=int, default=3)
    options.add_argument("--strategy", default="fedpsa")
    options.add_argument("--cold", action="store_true", help="nodes as Flower starts them")
    options.add_argument(
        "--formats",
        nargs="*",
        default=["float32", "bfloat16", "int8"],
        help="of the runs over gRPC; none makes no runs",
    )
    parsed = options.parse_args(arguments)
    command = (
        f"python -m benchmarks.large_model --parameters {parsed.parameters}"
        f" --updates {parsed.updates} --strategy {parsed.strategy}"
        f" --formats {' '.join(parsed.formats)}" + (" --cold" if parsed.cold else "")
    )
    report = Report("large_model", "A large model", command)
    checkpoint = measure_checkpoint(parsed.parameters)
    alone = measure_formats(parsed.parameters, UPDATE_DTYPES)
    if parsed.formats:
        _report_runs(report, parsed)
    report.table(
        "Making and reading an update, without anything between",
        [
            "update-dtype",
            "bytes",
            "client: s of a core",
            "client: more memory",
            "server: s of a core",
            "server: more memory",
        ],
        [
            [
                name,
                with_unit(one["bytes"]),
                f"{one['client_seconds']:.2g}",
                with_unit(one["client_memory"]),
                f"{one['server_seconds']:.2g}",
                with_unit(one["server_memory"]),
            ]
            for name, one in alone.items()
        ],
    )
    report.text(
        f"A checkpoint has {with_unit(checkpoint['bytes'])}. Saving it takes "
        f"{checkpoint['save_core_seconds']:.2g} s of a core, "
        f"{checkpoint['save_seconds']:.2g} s with the disk; loading "
        f"{checkpoint['load_core_seconds']:.2g} s of a core, "
        f"{checkpoint['load_seconds']:.2g} s with the disk; checksums included (FedBuff, an empty "
        "buffer, no task from an older version)."
    )
    report.text(
        "There is no limit on messages to raise: Flower cuts arrays into objects of 5 MB "
        "(`FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE`) and moves each by itself, far below the 2 GB of "
        "gRPC, for which `flower-superlink` and `flower-supernode` have no option in 1.39."
    )
    report.data("formats", alone)
    report.data("checkpoint", checkpoint)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
