"""A strategy run on a scripted grid in fake time, and what listens to it."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, MessageType, MetricRecord

from fedpsa_strategy import UniformLatency, VirtualClock, WallClock
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.loop import AsyncLoop
from support.grids import Behaviour, ScriptedGrid, model_arrays


def run(
    strategy,
    grid,
    *,
    num_versions=4,
    arrays=None,
    evaluate_fn=None,
    timeout=100.0,
    config=None,
    should_stop=None,
):
    """Run a strategy on a scripted grid in fake time; return Flower's result."""
    if not strategy.clock.fixed_nodes:
        strategy.clock = WallClock(grid.time.monotonic)
    strategy.begin(arrays if arrays is not None else model_arrays())
    return AsyncLoop(
        strategy,
        grid,
        num_versions=num_versions,
        timeout=timeout,
        train_config=ConfigRecord(config or {}),
        evaluate_config=ConfigRecord(),
        evaluate_fn=evaluate_fn,
        should_stop=should_stop,
        monotonic=grid.time.monotonic,
        sleep=grid.time.sleep,
    ).run()


class Recorder(list):
    def __call__(self, event):
        self.append(event)

    def of(self, kind):
        return [event for event in self if event.kind == kind]


def recorded(strategy, grid, **options):
    """Run a strategy on a scripted grid with a recorder as its only listener; return that."""
    recorder = Recorder()
    strategy.listeners[:] = [recorder]
    run(strategy, grid, **options)
    return recorder


def virtual(num_clients, latency=None, **kwargs):
    return {
        "clock": VirtualClock(latency or UniformLatency(seed=1)),
        "num_clients": num_clients,
        **kwargs,
    }


def in_train(message):
    return message.metadata.message_type == MessageType.TRAIN


def counting_evaluation(accuracy=lambda version: 0.01 * version):
    calls = []

    def evaluate(version, arrays):
        calls.append(version)
        return MetricRecord({"accuracy": accuracy(version)})

    return evaluate, calls


class Killed(BaseException):
    """The server's process is gone."""


def killed_and_resumed(
    strategy, client: Callable[[], Behaviour], folder: Path, *, arrays=None, num_versions=6
):
    """Return the models of a run that was killed and resumed and of a whole one; what was saved.

    `strategy` is called with a checkpointer and a virtual clock of five clients, and `client` once
    for each run, as processes have no memory in common.
    """

    def go(checkpointer, die_after=10**9):
        behaviour, answered = client(), count(1)

        def dying(message):
            if next(answered) > die_after:
                raise Killed
            return behaviour(message)

        made = strategy(checkpointer=checkpointer, **virtual(5))
        result = run(made, ScriptedGrid(5, dying), num_versions=num_versions, arrays=arrays)
        return {key: array.data for key, array in result.arrays.items()}

    store = CheckpointStore(folder)
    with pytest.raises(Killed):
        go(Checkpointer(store, every_versions=1), die_after=8)
    saved = store.load_newest()
    return go(Checkpointer(resume_from=saved)), go(Checkpointer()), saved
