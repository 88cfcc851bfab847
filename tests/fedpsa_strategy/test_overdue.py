"""A slot is never lost to one slow client."""

from itertools import pairwise

import pytest
from flwr.app import Error, Message
from hypothesis import given
from hypothesis import strategies as st

from fedpsa_strategy import FedAvg, FedBuff
from fedpsa_strategy.server.callbacks.patience import Patience
from fedpsa_strategy.server.callbacks.staleness_limit import StalenessLimit
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.clients import Clients
from fedpsa_strategy.server.events import KINDS
from fedpsa_strategy.server.options import Failures, Limits
from support.grids import ScriptedGrid, update
from support.runs import in_train, recorded, run, virtual

NEVER = 1e9


def first_nodes(grid, number):
    return set(sorted(grid.nodes)[:number])


class Waking(ScriptedGrid):
    """Lets time pass until something arrives, or for some seconds."""

    def wait(self, seconds):
        now = self.time.now
        arrivals = [at for at, _ in self.pending.values() if at > now]
        self.time.sleep(min([now + 5.0, *arrivals]) - now)


def fleet(num_nodes, seconds, silent=0):
    """Nodes that take `seconds`, but for some that never answer a train message."""
    grid = Waking(num_nodes)
    still = first_nodes(grid, silent)
    grid.delay = lambda message: (
        0.01
        if not in_train(message)
        else NEVER
        if message.metadata.dst_node_id in still
        else seconds
    )
    return grid


def fleet_with_a_slow_one():
    """Nodes that take 20 s, but for client 0, which takes 200 s."""
    grid = fleet(4, 20.0)
    slow, usual = min(grid.nodes), grid.delay
    grid.delay = lambda message: (
        200.0 if in_train(message) and message.metadata.dst_node_id == slow else usual(message)
    )
    return grid


def versions_per_hour(hours, failures, timeout=3600.0):
    grid = fleet(10, 10.0, silent=3)
    strategy = FedBuff(
        buffer_size=5, max_in_flight=2, failures=failures, limits=Limits(deadline=3600.0 * hours)
    )
    recorder = recorded(strategy, grid, num_versions=10**6, timeout=timeout)
    return strategy.state.version / hours, recorder


def test_three_silent_nodes_of_ten_cost_little():
    """Two slots, tasks of 10 s, 5 uploads a version: 144 versions an hour if all are there."""
    before, _ = versions_per_hour(3, Failures(overdue_factor=0))
    after, recorder = versions_per_hour(3, Failures())
    assert before < 20
    assert after > 135
    assert {event.client for event in recorder.of("overdue")} == {0, 1, 2}


def test_a_silent_node_is_asked_less_and_less_often():
    _, recorder = versions_per_hour(2, Failures(overdue_ceiling=60.0), timeout=300.0)
    asked = [event.time for event in recorder.of("dispatch") if event.client == 0]
    gaps = [b - a for a, b in pairwise(asked)]
    # 300 s until its message expires, then a pause of 600 s, of 1200 s, ...
    assert len(gaps) >= 3
    for number, gap in enumerate(gaps):
        assert gap == pytest.approx(300 + 600 * 2**number, rel=0.1)
    pauses = [event for event in recorder.of("quarantine") if event.client == 0]
    assert [event.until - event.time for event in pauses] == [
        600.0 * 2**n for n in range(len(pauses))
    ]


def test_a_late_reply_counts_as_stale_as_it_is():
    grid = fleet(4, 10.0)
    slow = min(grid.nodes)
    usual, first = grid.delay, []

    def delay(message):
        if in_train(message) and message.metadata.dst_node_id == slow and not first:
            first.append(message)
            return 500.0
        return usual(message)

    grid.delay = delay
    strategy = FedBuff(buffer_size=1, max_in_flight=2)
    recorder = recorded(strategy, grid, num_versions=150, timeout=3600.0)
    (late,) = recorder.of("overdue")
    assert late.kind in KINDS
    assert late.client == 0
    assert late.waited > late.limit >= 30.0
    (upload,) = [event for event in recorder.of("upload") if event.sequence == late.sequence]
    assert upload.staleness > 60
    assert upload.time == pytest.approx(500.0, abs=25)
    assert not recorder.of("reject")
    # It is given work again, no more clients are busy than before, and nothing is left behind.
    assert [event for event in recorder.of("dispatch") if event.client == 0][-1].time > upload.time
    assert strategy.state.clients.num_busy <= 2
    assert grid.most_outstanding == 3


def test_a_slow_client_that_is_always_slow_keeps_its_slot():
    strategy = FedBuff(buffer_size=2, max_in_flight=4)
    recorder = recorded(strategy, fleet_with_a_slow_one(), num_versions=300, timeout=3600.0)
    by_slow = [event for event in recorder.of("upload") if event.client == 0]
    assert len(by_slow) > 8
    # Until three of its own are known, only those of the others say what to expect.
    assert [event.client for event in recorder.of("overdue")] == [0, 0, 0]


def test_a_client_whose_updates_are_ignored_keeps_its_slot_too():
    strategy = FedBuff(buffer_size=1, max_in_flight=4, callbacks=[StalenessLimit(10)])
    recorder = recorded(strategy, fleet_with_a_slow_one(), num_versions=300, timeout=3600.0)
    assert len([event for event in recorder.of("reject") if event.client == 0]) > 8
    assert {event.client for event in recorder.of("upload")} == {1, 2, 3}
    # Its replies came: from the third on it is known how long they take.
    assert [event.client for event in recorder.of("overdue")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 30.0),
        ({"overdue_floor": 1.0}, 15.0),
        ({"overdue_floor": 1.0, "overdue_ceiling": 12.0}, 12.0),
    ],
)
def test_floor_and_ceiling(options, limit):
    strategy = FedBuff(buffer_size=2, max_in_flight=2, failures=Failures(**options))
    run(strategy, fleet(3, 10.0), num_versions=10)
    patience = strategy.callbacks[-1]
    # All take 10 s (and a little until it is seen): at least half of the median is added.
    assert patience.limit(0) == pytest.approx(limit, rel=0.1)
    assert patience.limit(99) == pytest.approx(limit, rel=0.1)


def test_before_anything_is_known_the_ceiling_counts():
    grid = fleet(3, 10.0, silent=3)
    strategy = FedBuff(
        max_in_flight=1, failures=Failures(overdue_ceiling=50.0), limits=Limits(deadline=170.0)
    )
    recorder = recorded(strategy, grid, timeout=3600.0)
    assert [event.limit for event in recorder.of("overdue")] == [50.0] * 3
    assert all(50 < event.waited < 60 for event in recorder.of("overdue"))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: FedBuff(buffer_size=2, max_in_flight=2, **virtual(4)),
        lambda: FedAvg(fraction_train=0.5),
        lambda: FedBuff(buffer_size=2, failures=Failures(overdue_factor=0)),
    ],
    ids=["virtual clock", "rounds", "factor 0"],
)
def test_nobody_is_overdue(strategy):
    made = strategy()
    assert not any(isinstance(item, Patience) for item in made.callbacks)


def test_what_was_learned_is_saved(tmp_path):
    store = CheckpointStore(tmp_path)
    first = FedBuff(buffer_size=1, checkpointer=Checkpointer(store, every_versions=1))
    run(first, fleet(3, 40.0), num_versions=6)
    saved = store.load_newest()
    second = FedBuff(buffer_size=1, checkpointer=Checkpointer(resume_from=saved))
    run(second, fleet(3, 40.0), num_versions=7)
    before, after = first.callbacks[-1], second.callbacks[-1]
    assert before.limit(0) == pytest.approx(60.0, rel=0.05)
    assert after.limit(99) == pytest.approx(60.0, rel=0.05)
    # A checkpoint of before this was learned has none of it.
    del saved["callbacks"]["Patience"]
    for client in saved["clients"]:
        for name in ("tasks", "overdue", "answered", "silences"):
            del client[name]
        client["busy"] = False
    run(
        FedBuff(buffer_size=1, checkpointer=Checkpointer(resume_from=saved)),
        fleet(3, 40.0),
        num_versions=7,
    )


def test_who_comes_back_is_asked_at_once():
    grid = fleet(3, 10.0, silent=1)
    silent = min(grid.nodes)

    def connected():
        # It leaves after its first message has expired, and comes back.
        return [n for n in grid.nodes if n != silent or not 250 < grid.time.now < 300]

    grid.get_node_ids = connected
    strategy = FedBuff(buffer_size=1, max_in_flight=2, limits=Limits(deadline=400.0))
    recorder = recorded(strategy, grid, num_versions=10**6, timeout=200.0)
    asked = [event.time for event in recorder.of("dispatch") if event.client == 0]
    assert len(asked) == 2
    assert 300 <= asked[1] < 340


def test_an_outage_of_everybody_is_waited_out():
    """All nodes are silent for an hour, then answer again: the run goes on."""
    grid = fleet(3, 10.0)
    usual = grid.delay
    grid.delay = lambda message: NEVER if 100 < grid.time.now < 2000 else usual(message)
    strategy = FedBuff(buffer_size=1, max_in_flight=3, limits=Limits(deadline=5000.0))
    recorder = recorded(strategy, grid, num_versions=10**6, timeout=600.0)
    assert len(recorder.of("reject")) >= 3
    assert recorder.of("upload")[-1].time > 4900


def test_errors_are_no_response_times():
    grid = ScriptedGrid(4, delay=40.0)
    failing = first_nodes(grid, 1)
    grid.delay = lambda m: 0.01 if m.metadata.dst_node_id in failing else 40.0
    grid.behaviour = lambda m: (
        Error(code=5, reason="gone") if m.metadata.dst_node_id in failing else update()
    )
    strategy = FedBuff(buffer_size=2, max_in_flight=3)
    run(strategy, grid, num_versions=6)
    assert strategy.callbacks[-1].limit(0) == pytest.approx(60.0, rel=0.05)


def test_a_node_that_flower_takes_for_dead_is_asked_again_when_it_joins():
    """It has no chance to fail three times in a row before it is noticed to be gone."""
    grid = fleet(3, 10.0)
    dead, usual = min(grid.nodes), grid.pull_messages

    def gone():
        return 50 < grid.time.now < 200

    def pull(message_ids):
        replies = [m for m in usual(message_ids) if not (in_train(m) and gone() and is_dead(m))]
        for key, (_, message) in list(grid.pending.items()):
            if gone() and in_train(message) and message.metadata.dst_node_id == dead:
                del grid.pending[key]
                error = Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
                error.metadata.__dict__["_src_node_id"] = 1
                replies.append(error)
        return replies

    def is_dead(message):
        return message.metadata.src_node_id == dead

    grid.pull_messages = pull
    # Flower's list of nodes is looked at every five seconds.
    grid.get_node_ids = lambda: [n for n in grid.nodes if n != dead or not gone()]
    strategy = FedBuff(buffer_size=1, max_in_flight=3, limits=Limits(deadline=300.0))
    recorder = recorded(strategy, grid, num_versions=10**6, timeout=3600.0)
    assert len(recorder.of("reject")) == 1
    assert len(recorder.of("leave")) == 1
    again = [event for event in recorder.of("upload") if event.client == 0 and event.time > 200]
    assert again[0].time < 230


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "answer", "expire", "overdue"]), st.integers(0, 2))
    )
)
def test_slots_are_counted_whatever_happens(steps):
    clients = Clients(0)
    everybody = [clients.join(node) for node in (7, 8, 9)]
    for step, index in steps:
        client = everybody[index]
        if step == "start":
            clients.start_task(client)
        elif client.tasks and step in ("answer", "expire"):
            clients.end_task(client, answered=step == "answer")
        elif client.tasks and not client.overdue and step == "overdue":
            clients.give_slot_away(client)
        assert clients.num_busy == sum(c.tasks > 0 and not c.overdue for c in everybody)
        assert all(c.tasks >= 0 for c in everybody)
        assert not any(c.overdue and not c.tasks for c in everybody)
