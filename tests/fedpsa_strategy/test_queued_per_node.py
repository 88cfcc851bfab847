"""The next task may wait at a node while it works, so that it starts at once."""

from collections import Counter
from statistics import fmean

import pytest
from flwr.app import Error

from fedpsa_strategy import FedAvg, FedBuff
from support.grids import ScriptedGrid, update
from support.runs import in_train, recorded, virtual

WORK, POLL = 4.0, 3.0


class Node(ScriptedGrid):
    """Nodes work on one task at a time, and look for the next one every three seconds.

    One that waits at the node when another ends is begun at once.
    """

    def __init__(self, num_nodes, behaviour=lambda message: update()):
        super().__init__(num_nodes, behaviour)
        self.free_at = dict.fromkeys(self.nodes, 0.0)
        self.delay = self.begin
        self.queued = Counter()

    def begin(self, message):
        node, now = message.metadata.dst_node_id, self.time.now
        free = self.free_at[node]
        self.queued[node] += free > now
        begun = free if free > now else now + POLL
        self.free_at[node] = begun + WORK
        return self.free_at[node] - now


def measured(strategy, num_versions=40, **kwargs):
    grid = Node(4, **kwargs)
    return grid, recorded(strategy, grid, num_versions=num_versions)


def asynchronous(queued, **kwargs):
    kwargs = {"fraction_train": 1.0} | kwargs
    return FedBuff(buffer_size=2, queued_per_node=queued, **kwargs)


def test_nodes_work_without_a_pause_on_models_that_are_older():
    _, without = measured(asynchronous(0))
    grid, with_one = measured(asynchronous(1))
    first, second = (r.of("end")[0].time for r in (without, with_one))
    assert second < 0.65 * first  # 4 s a task instead of 7
    stale = [fmean(e.staleness for e in r.of("upload")) for r in (without, with_one)]
    assert stale[1] > stale[0]
    assert grid.most_outstanding == 8
    assert min(grid.queued.values()) > 10


@pytest.mark.parametrize("queued", [1, 3])
def test_no_more_than_that_wait_and_each_task_counts_once(queued):
    grid, recorder = measured(asynchronous(queued))
    assert grid.most_outstanding == 4 * (1 + queued)
    sequences = [event.sequence for event in recorder.of("upload")]
    assert len(sequences) == len(set(sequences)) == 80
    # Everybody works about equally often.
    assert max(Counter(e.client for e in recorder.of("upload")).values()) <= 25


def test_where_some_are_idle_they_get_the_work():
    grid, _ = measured(asynchronous(1, fraction_train=0.5))
    assert grid.most_outstanding == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda queued: FedBuff(
            buffer_size=2, queued_per_node=queued, fraction_train=1.0, **virtual(4)
        ),
        lambda queued: FedAvg(queued_per_node=queued, fraction_train=1.0),
    ],
    ids=["virtual clock", "rounds"],
)
def test_it_changes_nothing_with(make):
    def told(queued):
        _, recorder = measured(make(queued))
        return [vars(event) for event in recorder.of("upload") + recorder.of("dispatch")]

    assert told(1) == told(0)


def test_one_that_fails_loses_one_task():
    failed = []

    def behaviour(message):
        if in_train(message) and not failed and grid.time.now > 20:
            failed.append(message)
            return Error(code=1, reason="out of memory")
        return update()

    grid = Node(4, behaviour)
    strategy = asynchronous(1)
    recorder = recorded(strategy, grid, num_versions=40)
    (reject,) = recorder.of("reject")
    assert reject.sequence not in {event.sequence for event in recorder.of("upload")}
    clients = strategy.state.clients
    assert all(0 <= client.tasks <= 2 for client in clients)
    assert clients.num_busy == sum(client.tasks > 0 for client in clients)


def test_a_silent_node_gets_no_more():
    grid = Node(4)
    silent = min(grid.nodes)
    usual = grid.delay
    grid.delay = lambda m: 1e9 if m.metadata.dst_node_id == silent and in_train(m) else usual(m)
    strategy = asynchronous(1)
    recorder = recorded(strategy, grid, num_versions=60, timeout=1000.0)
    assert len([event for event in recorder.of("dispatch") if event.client == 0]) == 2
    assert [event.client for event in recorder.of("overdue")] == [0]
    assert strategy.state.version == 60
