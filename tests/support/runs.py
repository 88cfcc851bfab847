"""A strategy run on a scripted grid in fake time, and what listens to it."""

from flwr.app import ConfigRecord, MessageType, MetricRecord

from fedpsa_strategy import UniformLatency, VirtualClock, WallClock
from fedpsa_strategy.server.loop import AsyncLoop
from support.grids import model_arrays


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
