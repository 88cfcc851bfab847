"""What runs measure for the experiments, and what the methods of one seed share."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from torch import nn
from torch.nn import functional

from fedpsa_strategy import FedBuff, UniformLatency, VirtualClock
from fedpsa_strategy.server.callbacks import Callback
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.events import Dispatched, RunEnded, Uploaded
from fedpsa_strategy.server.loop import AsyncLoop
from fedpsa_strategy.watch.status_line import StatusLine
from fedpsa_strategy.wire.replies import TrainReply
from server_app.alignment import Alignment
from server_app.build import build_experiment, make_clock, make_task
from server_app.run_dir import model_sha256
from simulation.engines.local.run import run_locally
from simulation.experiments.cells import CONTROL, METHODS
from simulation.experiments.options import Options
from support.engines import events
from support.grids import ScriptedGrid, model_arrays
from support.sensitivities import cross_entropy
from task.tensors import Shard


def test_alignment_is_the_cosine_of_two_gradients():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    shard = Shard(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    strategy = FedBuff(buffer_size=2)
    strategy.begin(ArrayRecord(model.state_dict()), [7])
    weights = [item.detach().clone() for item in model.parameters()]
    size = sum(item.numel() for item in weights)
    delta = np.linspace(-1, 1, size, dtype=np.float32)
    alignment = Alignment(model, shard, cross_entropy, every=2, seed=0)
    alignment.begin(strategy.state)
    task = SimpleNamespace(start=strategy.state.model)
    reply = TrainReply(delta, {}, 1.0, 5, MetricRecord({"num-examples": 5}), 0)

    assert "align" not in alignment.check(task, reply, reply).metrics  # the first of two
    strategy.state.uploads = 1
    measured = alignment.check(task, reply, reply).metrics

    def gradient(parameters):
        own = [item.clone().requires_grad_() for item in parameters]
        outputs = functional.linear(shard.x, *own)
        grads = torch.autograd.grad(functional.cross_entropy(outputs, shard.y), own)
        return torch.cat([item.flatten() for item in grads])

    parts = torch.split(torch.from_numpy(delta), [item.numel() for item in weights])
    moved = [item + part.view_as(item) for item, part in zip(weights, parts, strict=True)]
    expected = functional.cosine_similarity(gradient(moved), gradient(weights), dim=0)
    assert measured["align"] == pytest.approx(float(expected), abs=1e-6)
    assert measured["num-examples"] == 5
    still = TrainReply(0 * delta, {}, 0.0, 5, MetricRecord({"num-examples": 5}), 0)
    assert alignment.check(task, still, still).metrics["align"] == pytest.approx(1.0)


class Slow(FedBuff):
    """Takes half a second for an upload."""

    now = 0.0

    def aggregate_train(self, *args):
        self.now += 0.5
        return super().aggregate_train(*args)


class Preparing(Callback):
    """Takes a hundredth of a second each time that there is nothing to do."""

    prepared = 0

    def __init__(self, strategy):
        self.strategy = strategy

    def idle(self):
        self.strategy.now += 0.01
        self.prepared += 1


def loop(listener, *, versions, store=None, resume=None):
    grid = ScriptedGrid(4)
    strategy = Slow(
        buffer_size=2,
        max_in_flight=2,
        clock=VirtualClock(UniformLatency(seed=1)),
        num_clients=4,
        listeners=[listener],
        checkpointer=Checkpointer(store, every_versions=1, resume_from=resume),
    )
    preparing = Preparing(strategy)
    strategy.callbacks.append(preparing)
    strategy.begin(model_arrays())
    AsyncLoop(
        strategy,
        grid,
        num_versions=versions,
        timeout=100.0,
        train_config=ConfigRecord({"note": "", "none": []}),
        evaluate_config=ConfigRecord(),
        evaluate_fn=None,
        monotonic=grid.time.monotonic,
        sleep=grid.time.sleep,
        perf_counter=lambda: strategy.now,
    ).run()
    return preparing.prepared


def test_bytes_and_the_servers_time_are_in_events_and_summary(tmp_path):
    found = []
    status = StatusLine(1000.0, True)

    def listen(event):
        found.append(event)
        status(event)

    store = CheckpointStore(tmp_path)
    prepared = loop(listen, versions=3, store=store)
    assert prepared > 0
    end = found[-1]
    assert isinstance(end, RunEnded)
    assert end.server_seconds == pytest.approx(0.5 * 6 + 0.01 * prepared)  # six uploads
    dispatched = [event for event in found if isinstance(event, Dispatched)]
    size = len(Array(np.zeros(2, np.float32)).data)
    for event in dispatched:
        assert size < event.num_bytes < size + 200
    uploaded = [event for event in found if isinstance(event, Uploaded)]
    # Δ, names and values of num-examples, train-loss and a sketch of two numbers, and the mark.
    mark = len("arrays") + len("delta")
    assert {event.num_bytes for event in uploaded} == {size + 12 + 8 + 10 + 8 + 6 + 16 + mark}
    assert status.run.bytes_down == sum(event.num_bytes for event in dispatched)
    assert status.run.bytes_up == sum(event.num_bytes for event in uploaded)
    assert status.run.server_seconds == end.server_seconds

    again = []
    prepared += loop(again.append, versions=5, resume=store.load_newest())
    assert isinstance(again[-1], RunEnded)
    # What was before the interruption counts too.
    assert again[-1].server_seconds == pytest.approx(0.5 * 10 + 0.01 * prepared)


def tiny(method, **config):
    labels = {"method": method, "dataset": "digits", "alpha": 0.3, "seed": 5}
    return Options(days=0.004, extra=config).cell(labels, METHODS[method]).settings


@pytest.mark.engine
def test_measuring_alignment_changes_nothing(tmp_path):
    summaries = {
        every: run_locally(
            tiny("FedPSA", **{"alignment-every": every}).to_run_config()
            | {"run-dir": str(tmp_path / str(every))},
            workers=0,
            stream=False,
        )
        for every in (0, 3)
    }
    assert summaries[0]["model_sha256"] == summaries[3]["model_sha256"]
    assert not any("align" in item["metrics"] for item in events(tmp_path / "0", "upload"))
    aligned = [item["metrics"].get("align") for item in events(tmp_path / "3", "upload")]
    assert len(aligned) >= 6
    for number, value in enumerate(aligned, 1):
        assert (value is None) == (number % 3 != 0)
        assert value is None or -1 <= value <= 1
    assert summaries[3]["mean_train_seconds"] > 0
    assert summaries[3]["mean_sensitivity_seconds"] > 0
    assert summaries[3]["bytes_down"] > summaries[3]["bytes_up"] > 0
    assert summaries[3]["server_seconds"] > 0


@pytest.mark.engine
def test_methods_of_one_seed_share_data_model_clients_and_times(tmp_path):
    """Common random numbers: what differs between two methods is the methods alone."""
    methods = ("FedPSA", "FedAsync", CONTROL)
    seen = []
    for method in methods:
        settings = tiny(method)
        experiment = build_experiment(settings, [])
        task, clock = make_task(settings), make_clock(settings)
        assert isinstance(clock, VirtualClock)
        shards = [
            task.train_data({"partition-id": i, "num-partitions": settings.num_clients})
            for i in (0, 7, 49)
        ]
        path = tmp_path / method
        run_locally(settings.to_run_config() | {"run-dir": str(path)}, workers=0, stream=False)
        uploads = events(path, "upload")[:5]
        seen.append(
            {
                "model": model_sha256(experiment.initial_arrays),
                "data": [shard.x.numpy().tobytes() + shard.y.numpy().tobytes() for shard in shards],
                "test": task.test_data().x.numpy().tobytes(),
                "times": [clock.latency(i, 0) for i in range(settings.num_clients)],
                "sizes": [item["num_examples"] for item in events(path, "join")],
                "first": [(e["time"], e["client"]) for e in events(path, "dispatch")[:12]],
                "uploads": [(e["time"], e["client"]) for e in uploads],
                "start": events(path, "evaluate")[0]["metrics"],
            }
        )
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]["first"]) == 12
