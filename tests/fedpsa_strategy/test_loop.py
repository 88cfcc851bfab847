"""The loop against a scripted grid: who is busy, what is stale, what is refused, when it ends."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MessageType, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpsa_strategy import (
    ConstantLatency,
    FedBuff,
    FedPSA,
    VirtualClock,
)
from fedpsa_strategy.errors import AllClientsFailedError, DivergedError, NodesMissingError
from fedpsa_strategy.server.clients import Clients
from fedpsa_strategy.server.events import event_from_dict
from fedpsa_strategy.server.options import Evaluation, Failures, Limits, Training
from support.grids import FakeTime, ScriptedGrid, model_arrays, update
from support.runs import Recorder, counting_evaluation, in_train, recorded, run, virtual

# --- Concurrency and staleness -----------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    num_nodes=st.integers(1, 12),
    limit=st.integers(1, 8),
    delays=st.lists(st.floats(0.001, 5.0), min_size=1, max_size=20),
    is_virtual=st.booleans(),
)
def test_concurrency_is_used_and_never_exceeded(num_nodes, limit, delays, is_virtual):
    grid = ScriptedGrid(
        num_nodes,
        delay=lambda message: delays[int(message.metadata.message_id[1:]) % len(delays)],
    )
    clock = virtual(num_nodes) if is_virtual else {}
    strategy = FedBuff(buffer_size=2, max_in_flight=limit, **clock)
    run(strategy, grid, num_versions=6)
    assert grid.most_outstanding == min(limit, num_nodes)
    assert strategy.state.version == 6
    assert strategy.state.uploads == 12


def test_staleness_is_the_version_now_minus_the_version_dispatched():
    """Node 0 is slow: it gets version 0 and answers when others have made several versions."""
    grid = ScriptedGrid(
        3,
        delay=lambda message: 50.0 if message.metadata.dst_node_id == min(grid.nodes) else 1.0,
    )
    strategy = FedBuff(buffer_size=1, max_in_flight=3)
    recorder = recorded(strategy, grid, num_versions=120)
    dispatched = {event.sequence: event.version for event in recorder.of("dispatch")}
    version, stalest = 0, 0
    for event in recorder:
        if event.kind == "upload":
            assert event.version == dispatched[event.sequence]
            assert event.staleness == version - dispatched[event.sequence]
            stalest = max(stalest, event.staleness)
        elif event.kind == "aggregate":
            version += 1
            assert event.version == version
    assert stalest > 50


def test_rule_sees_staleness_by_hand():
    """Two clients, constant latencies 1 and 3 by client: the slow one is 3 versions behind."""

    class ByClient(ConstantLatency):
        def __call__(self, client, sequence):
            return [1.0, 3.5][client]

    strategy = FedBuff(buffer_size=1, max_in_flight=2, **virtual(2, ByClient()))
    recorder = recorded(strategy, ScriptedGrid(2), num_versions=5)
    # t = 1, 2, 3: client 0; t = 3.5: client 1 (dispatched at version 0); t = 4: client 0.
    assert [(e.time, e.client, e.staleness) for e in recorder.of("upload")] == [
        (1.0, 0, 0),
        (2.0, 0, 0),
        (3.0, 0, 0),
        (3.5, 1, 3),
        (4.0, 0, 1),
    ]


@settings(deadline=None, max_examples=25)
@given(delays=st.lists(st.floats(0.001, 9.0), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_virtual_order_does_not_depend_on_the_order_of_arrival(delays, seed):
    def go(delay):
        grid = ScriptedGrid(
            8, lambda m: update([m.content["config"]["seed"] % 1000, 1.0]), delay=delay
        )
        recorder = Recorder()
        strategy = FedBuff(
            buffer_size=3, max_in_flight=4, seed=seed, listeners=[recorder], **virtual(8)
        )
        result = run(strategy, grid, num_versions=5)
        uploads = [(e.time, e.client, e.sequence, e.staleness) for e in recorder.of("upload")]
        return uploads, result.arrays["w"].numpy().tobytes()

    scrambled = go(lambda message: delays[int(message.metadata.message_id[1:]) % len(delays)])
    assert scrambled == go(lambda message: 0.01)
    times = [upload[0] for upload in scrambled[0]]
    assert times == sorted(times)


def test_ties_in_virtual_time_are_broken_by_dispatch_order():
    grid = ScriptedGrid(6, delay=lambda m: 9.0 - int(m.metadata.message_id[1:]) % 7)
    strategy = FedBuff(buffer_size=4, max_in_flight=4, **virtual(6, ConstantLatency(value=2.0)))
    recorder = recorded(strategy, grid, num_versions=3)
    sequences = [event.sequence for event in recorder.of("upload")]
    assert sequences == sorted(sequences)


def test_clients_in_the_buffer_are_left_out_while_there_are_others():
    strategy = FedBuff(buffer_size=5, max_in_flight=1, **virtual(6))
    recorder = recorded(strategy, ScriptedGrid(6), num_versions=20)
    clients = [event.client for event in recorder.of("upload")]
    # One at a time: the five uploads of a version come from five different clients.
    assert all(len(set(clients[i : i + 5])) == 5 for i in range(0, 100, 5))


def test_sampling_is_uniform():
    strategy = FedBuff(buffer_size=1, max_in_flight=1, **virtual(5))
    recorder = recorded(strategy, ScriptedGrid(5), num_versions=2000)
    clients = [event.client for event in recorder.of("upload")]
    for client in range(5):
        assert clients.count(client) == pytest.approx(400, abs=72)  # 4 standard deviations


# --- Bad input ---------------------------------------------------------------------------------


def with_metrics(**more) -> RecordDict:
    reply = update()
    for name, value in more.items():
        reply["metrics"][name] = value
    return reply


BAD_REPLIES = {
    "error": (lambda: Error(code=2, reason="it broke: out of memory"), "out of memory"),
    "no arrays": (lambda: RecordDict({"metrics": update()["metrics"]}), "lacks ArrayRecord"),
    "no metrics": (lambda: RecordDict({"arrays": model_arrays()}), "0 MetricRecords"),
    "wrong keys": (
        lambda: RecordDict(
            {
                "arrays": ArrayRecord({"v": Array(np.zeros(2, np.float32))}),
                "metrics": update()["metrics"],
            }
        ),
        "missing \\['w'\\], unknown \\['v'\\]",
    ),
    "wrong shape": (lambda: update([1.0, 2.0, 3.0]), "shape \\(3,\\), not \\(2,\\)"),
    "wrong dtype": (lambda: update(dtype=np.float64), "dtype float64, not float32"),
    "nan": (lambda: update([math.nan, 0.0]), "NaN, Inf.* first in 'w'"),
    "inf": (lambda: update([0.0, -math.inf]), "NaN, Inf"),
    "both infinities": (lambda: update([math.inf, -math.inf]), "NaN, Inf"),
    "no examples": (lambda: update(num_examples=0), "num-examples"),
    "negative examples": (lambda: update(num_examples=-5), "num-examples"),
    "nan metric": (
        lambda: RecordDict(
            {
                "arrays": model_arrays(),
                "metrics": MetricRecord({"num-examples": 1, "train-loss": math.nan}),
            }
        ),
        "train-loss",
    ),
    "no sketch": (lambda: update(sketch=None), "sketch"),
    "short sketch": (lambda: update(sketch=[1.0]), "1 numbers, need a list of 2"),
    "nan sketch": (lambda: update(sketch=[math.nan, 1.0]), "sketch"),
    "forged bytes": (
        lambda: RecordDict(
            {
                "arrays": ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"x" * 136)}),
                "metrics": update()["metrics"],
            }
        ),
        "NumPy's format",
    ),
    "huge update": (lambda: update([1e17, 1e17]), "norm 1.414e\\+17 is above .*e\\+06"),
    "huge amount of data": (lambda: update(num_examples=1e300), "num-examples.*above 1000"),
    "huge sketch": (lambda: update(sketch=[1e155, 0.0]), "sketch.*length 1e\\+155"),
    "huge sketch beyond floats": (lambda: update(sketch=[1.7e308, 1.7e308]), "sketch.*length inf"),
    "integer beyond floats": (lambda: with_metrics(big=10**400), "big.*not finite"),
    "many metrics": (
        lambda: with_metrics(**{f"m{i}": 0.5 for i in range(100_000)}),
        "100003 metrics, at most 256",
    ),
    "long metric name": (lambda: with_metrics(**{"x" * 10**6: 1.0}), "at most 128 characters"),
    "metric name with an escape code": (
        lambda: with_metrics(**{"\x1b[2J\n": 1.0}),
        r"\\x1b\[2J\\n",
    ),
    "long metric": (lambda: with_metrics(long=[1.0] * 10**6), "1000000 numbers, at most 65536"),
    "long array names": (
        lambda: RecordDict(
            {
                "arrays": ArrayRecord(
                    {f"{i}\n" * 10**5: Array(np.zeros(2, np.float32)) for i in range(9)}
                ),
                "metrics": update()["metrics"],
            }
        ),
        "and 4 more",
    ),
    "long record names": (lambda: RecordDict({"\n" * 10**6: MetricRecord()}), "lacks ArrayRecord"),
    "forged line in an error": (
        lambda: Error(code=2, reason="!" * 10**6 + "oops\n2026 INFO \x1b[32mall is well"),
        "client error: ",
    ),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_refused_and_never_touches_the_model(name):
    make, reason = BAD_REPLIES[name]
    bad = 1

    def behaviour(message):
        return make() if grid.partition(message) == bad else update([1.0, 1.0])

    grid = ScriptedGrid(4, behaviour)
    recorder = Recorder()
    strategy = FedPSA(
        sketch_fn=lambda arrays: [1.0, 0.0],
        buffer_size=2,
        max_in_flight=2,
        failures=Failures(max_failures=2),
        listeners=[recorder],
        **virtual(4),
    )
    result = run(strategy, grid, num_versions=10)
    rejections = recorder.of("reject")
    assert rejections
    assert all(event.client == bad for event in rejections)

    assert all(re.search(reason, event.reason) for event in rejections)
    assert all(event.reason.isprintable() and len(event.reason) <= 1000 for event in rejections)
    assert bad not in {event.client for event in recorder.of("upload")}
    # Twenty good updates of 1 in ten versions of two, equally weighted: the model is exactly 10.
    assert result.arrays["w"].numpy().tolist() == [10.0, 10.0]
    assert recorder.of("quarantine")[0].client == bad
    assert len(rejections) < len(recorder.of("dispatch"))


def test_a_reply_that_comes_from_another_node_is_refused():
    class Mixed(ScriptedGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if reply.metadata.src_node_id == self.nodes[1] and reply.has_content():
                    reply.metadata.__dict__["_src_node_id"] = self.nodes[2]
            return replies

    grid = Mixed(4)
    strategy = FedBuff(buffer_size=2, max_in_flight=2)
    grid.partition_of = lambda node: None
    recorder = recorded(strategy, grid, num_versions=10)
    (reason,) = {event.reason for event in recorder.of("reject")}
    assert reason == f"the reply comes from node {grid.nodes[2]}, not from node {grid.nodes[1]}"
    assert grid.nodes[1] not in {event.node_id for event in recorder.of("upload")}


def test_reasons_that_clients_invent_do_not_pile_up():
    numbers = itertools.count()

    def behaviour(message):
        if grid.partition(message) == 0:
            return Error(code=2, reason=f"excuse number {next(numbers)}")
        return Error(code=2, reason="full disk") if grid.partition(message) == 1 else update()

    grid = ScriptedGrid(4, behaviour)
    strategy = FedBuff(buffer_size=2, max_in_flight=2, failures=Failures(pause=0.1), **virtual(4))
    run(strategy, grid, num_versions=300)
    assert next(numbers) > 100
    assert len(strategy.state.reasons) <= 64
    assert strategy.state.reasons.most_common(1)[0][0] == "client error: full disk"


def test_a_paused_client_comes_back_and_one_success_clears_its_record():
    calls = []

    def behaviour(message):
        if grid.partition(message) == 0:
            calls.append(message)
            if len(calls) <= 2:
                return Error(code=2, reason="flaky")
        return update()

    grid = ScriptedGrid(3, behaviour)
    strategy = FedBuff(
        buffer_size=1,
        max_in_flight=1,
        failures=Failures(max_failures=2, pause=50.0),
        **virtual(3, ConstantLatency(value=1.0)),
    )
    recorder = recorded(strategy, grid, num_versions=200)
    (quarantine,) = recorder.of("quarantine")
    dispatches = [event.time for event in recorder.of("dispatch") if event.client == 0]
    assert not [t for t in dispatches if quarantine.time < t < quarantine.until]
    assert max(dispatches) >= quarantine.until
    assert strategy.state.clients[0].failures == 0


@pytest.mark.parametrize("clock", [{}, virtual(4)], ids=["wall", "virtual"])
def test_all_clients_failing_ends_with_the_reasons(clock):
    grid = ScriptedGrid(4, lambda message: Error(code=2, reason="ValueError: no such dataset"))
    with pytest.raises(AllClientsFailedError, match="no such dataset"):
        run(FedBuff(max_in_flight=2, **clock), grid)


@pytest.mark.parametrize("clock", [{}, virtual(3)], ids=["wall", "virtual"])
def test_a_reply_that_never_comes_is_given_up_and_its_slot_used_again(clock):
    grid = ScriptedGrid(3, delay=lambda m: 1e9 if grid.partition(m) == 0 and in_train(m) else 0.1)
    strategy = FedBuff(buffer_size=1, max_in_flight=2, failures=Failures(pause=1e6), **clock)
    recorder = recorded(strategy, grid, num_versions=500, timeout=5.0)
    assert {event.reason for event in recorder.of("reject")} == {"no reply within 5 s"}
    assert {event.client for event in recorder.of("reject")} == {0}


def test_simulated_clients_that_wait_for_a_processor_are_not_given_up():
    free_at = 0.0

    def one_after_the_other(message):
        nonlocal free_at
        if not in_train(message):
            return 0.1
        free_at = max(free_at, grid.time.now) + 3.0
        return free_at - grid.time.now

    grid = ScriptedGrid(10, delay=one_after_the_other)
    strategy = FedBuff(buffer_size=1, max_in_flight=10, **virtual(10))
    recorder = recorded(strategy, grid, num_versions=20, timeout=5.0)
    assert not recorder.of("reject")
    assert len(recorder.of("upload")) == 20


def test_a_message_that_cannot_be_pushed_frees_its_slot():
    grid = ScriptedGrid(3)
    grid.refuse_push = lambda message: in_train(message) and grid.partition(message) == 2
    strategy = FedBuff(buffer_size=1, max_in_flight=2, **virtual(3))
    recorder = recorded(strategy, grid, num_versions=30)
    assert {event.client for event in recorder.of("reject")} == {2}


def test_replies_to_unknown_or_consumed_messages_are_refused():
    recorder = Recorder()
    grid = ScriptedGrid(2)
    strategy = FedBuff(buffer_size=1, max_in_flight=1, listeners=[recorder])
    arrays = model_arrays()
    strategy.begin(arrays, grid.get_node_ids())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    ids = grid.push_messages(messages)
    grid.time.sleep(1)
    replies = list(grid.pull_messages(ids))
    new, metrics = strategy.aggregate_train(1, replies)
    assert new["w"].numpy().tolist() == [1.0, 1.0]
    assert metrics["train-loss"] == 0.5
    assert strategy.aggregate_train(2, replies) == (None, None)
    assert "already consumed" in recorder.of("reject")[0].reason
    assert strategy.state.uploads == 1


def test_replies_after_the_end_change_nothing():
    grid = ScriptedGrid(4)
    grid.delay = lambda message: 1.0 + grid.partition(message)
    strategy = FedBuff(buffer_size=1, max_in_flight=4)
    result = run(strategy, grid, num_versions=1)
    grid.time.sleep(10)
    late = list(grid.pull_messages(list(grid.pending)))
    assert len(late) == 3
    assert result.arrays["w"].numpy().tolist() == [1.0, 1.0]
    assert strategy.state.version == 1


# --- Nodes -------------------------------------------------------------------------------------


def test_nodes_join_and_leave_with_the_wall_clock():
    def behaviour(message):
        if len(grid.sent) > 60 and 5000 not in grid.nodes:
            grid.nodes.append(5000)
            gone.append(grid.nodes.pop(0))
        return update()

    gone = []
    grid = ScriptedGrid(3, behaviour, delay=1.0)
    strategy = FedBuff(buffer_size=1, max_in_flight=2)
    recorder = recorded(strategy, grid, num_versions=200)
    assert [event.node_id for event in recorder.of("leave")] == gone
    assert [event.node_id for event in recorder.of("join")][3:] == [5000]
    last = [event.node_id for event in recorder.of("dispatch")][-20:]
    assert 5000 in last
    assert gone[0] not in last


def test_nodes_are_ordered_by_partition_and_not_by_node_id():
    grid = ScriptedGrid(5)
    grid.partition_of = lambda node: 4 - sorted(grid.nodes).index(node)
    recorder = recorded(FedBuff(**virtual(5)), grid, num_versions=1)
    joined = recorder.of("join")
    assert [event.partition for event in joined] == [0, 1, 2, 3, 4]
    assert [event.client for event in joined] == [0, 1, 2, 3, 4]
    assert [event.node_id for event in joined] == sorted(grid.nodes, reverse=True)


class TellingGrid(ScriptedGrid):
    """Its first three nodes tell where they are: well, badly and not as text."""

    def _about(self, node):
        answer = super()._about(node)
        hosts = ["lab-3", "a\nRejected: client 9\x1b[31m" + 5000 * "x", 7]
        index = sorted(self.nodes).index(node)
        if index < len(hosts):
            answer["node"] = ConfigRecord({"host-name": hosts[index]})
        return answer


def test_a_client_has_the_name_of_its_machine_if_the_node_told_it(caplog):
    caplog.set_level("INFO", logger="flwr")
    grid = TellingGrid(4, lambda message: None if grid.partition(message) < 2 else update())
    strategy = FedBuff(buffer_size=1, max_in_flight=4, **virtual(4))
    recorder = recorded(strategy, grid, num_versions=2, timeout=5.0)
    first, second, *others = recorder.of("join")
    assert first.to_dict()["host"] == "lab-3"
    assert "host" not in others[0].to_dict() | others[1].to_dict()
    assert len(second.host) <= 100
    assert second.host.startswith(r"a\nRejected: client 9\x1b[31mxx")
    node = min(grid.nodes)
    assert f"Rejected: client 0 (node {node} on lab-3): no reply within 5 s" in caplog.messages
    # What was written before nodes told their host is still read.
    old = {key: value for key, value in first.to_dict().items() if key != "host"}
    assert event_from_dict(old) == replace(first, host="")
    assert event_from_dict(first.to_dict()) == first


def test_a_client_that_comes_back_as_another_node_has_the_name_of_that_one():
    clients = Clients(seed=0)
    clients.join(7, 0, 10, "lab-3")
    clients.leave(7)
    assert clients.join(7).named(7) == "client 0 (node 7 on lab-3)"  # not asked again
    clients.leave(7)
    client = clients.join(8, 0, 10, "lab-4")
    assert client.named(8) == "client 0 (node 8 on lab-4)"
    assert client.named(7) == "client 0 (node 7)"
    clients.leave(8)
    assert clients.join(9, 0, 10).named(9) == "client 0 (node 9)"


def test_with_the_virtual_clock_a_wrong_number_of_nodes_is_an_error():
    grid = ScriptedGrid(3)
    with pytest.raises(NodesMissingError, match=r"3 nodes are connected.*exactly 2"):
        run(FedBuff(**virtual(2)), grid)
    recorder = Recorder()
    with pytest.raises(NodesMissingError, match="only 3 of 4 nodes connected within 9 s"):
        run(FedBuff(failures=Failures(node_timeout=9.0), listeners=[recorder], **virtual(4)), grid)
    assert recorder.of("wait")[0].reason == "3 of 4 nodes connected"
    assert not [message for message in grid.sent if in_train(message)]


def test_with_the_virtual_clock_unknown_or_double_partitions_are_errors():
    grid = ScriptedGrid(2, partition_of=lambda node: None)
    with pytest.raises(NodesMissingError, match="no query function"):
        run(FedBuff(**virtual(2)), grid)
    grid = ScriptedGrid(2, partition_of=lambda node: 1)
    with pytest.raises(NodesMissingError, match=r"\[1, 1\]"):
        run(FedBuff(**virtual(2)), grid)


def test_the_time_of_a_run_stands_still_until_its_nodes_are_there():
    events = Recorder()
    grid = ScriptedGrid(2, lambda message: update([1.0, 0.0]))
    nodes = grid.nodes
    grid.get_node_ids = lambda: nodes if grid.time.now >= 30 else []
    strategy = FedBuff(buffer_size=2, max_in_flight=2, min_available_nodes=2, listeners=[events])
    run(strategy, grid)
    assert len(events.of("wait")) > 5
    assert {event.time for event in events.of("wait") + events.of("join")} == {0.0}
    times = [event.time for event in events]
    assert times == sorted(times)
    assert 0 < times[-1] < 1


def test_with_the_wall_clock_a_silent_node_still_takes_part():
    grid = ScriptedGrid(2)
    grid.delay = lambda message: 0.1 if in_train(message) else 1e9
    strategy = FedBuff(buffer_size=1, max_in_flight=2, failures=Failures(query_timeout=3.0))
    recorder = recorded(strategy, grid, num_versions=10)
    assert {event.client for event in recorder.of("upload")} == {0, 1}


def test_no_nodes_is_a_clear_error_after_the_timeout():
    grid = ScriptedGrid(1)
    grid.nodes.clear()
    with pytest.raises(NodesMissingError, match="only 0 of 1 nodes connected within 30 s"):
        run(FedBuff(failures=Failures(node_timeout=30.0)), grid)
    assert grid.time.now >= 30.0


def test_all_nodes_leaving_is_a_clear_error_after_the_timeout():
    def behaviour(message):
        if len(grid.sent) > 10:
            grid.nodes.clear()
            return None
        return update()

    grid = ScriptedGrid(2, behaviour)
    with pytest.raises((NodesMissingError, AllClientsFailedError)):
        run(
            FedBuff(buffer_size=1, failures=Failures(node_timeout=20.0)),
            grid,
            num_versions=100,
            timeout=10.0,
        )


# --- Evaluation and the end --------------------------------------------------------------------


def test_evaluation_every_n_versions_and_at_both_ends():
    evaluate, calls = counting_evaluation()
    result = run(
        FedBuff(buffer_size=1, evaluation=Evaluation(every=3), **virtual(4)),
        ScriptedGrid(4),
        num_versions=8,
        evaluate_fn=evaluate,
    )
    assert calls == [0, 3, 6, 8]
    assert sorted(result.evaluate_metrics_serverapp) == calls
    assert sorted(result.train_metrics_clientapp) == list(range(1, 9))


def test_evaluation_on_a_grid_of_times_sees_the_model_of_that_moment():
    evaluate, _ = counting_evaluation()
    strategy = FedBuff(
        buffer_size=1,
        evaluation=Evaluation(interval=5.0),
        limits=Limits(deadline=22.0),
        **virtual(1, ConstantLatency(value=2.0)),
    )
    recorder = recorded(strategy, ScriptedGrid(1), num_versions=1000, evaluate_fn=evaluate)
    # Uploads at 2, 4, 6, ...: at time 10 the one at 10 counts.
    seen = [(event.time, event.version) for event in recorder.of("evaluate")]
    assert seen == [(0, 0), (5, 2), (10, 5), (15, 7), (20, 10), (22, 11)]
    assert recorder.of("end")[0].time == 22.0


def test_stops_at_the_target_accuracy():
    evaluate, calls = counting_evaluation()
    strategy = FedBuff(buffer_size=1, limits=Limits(target_accuracy=0.05), **virtual(2))
    run(strategy, ScriptedGrid(2), num_versions=100, evaluate_fn=evaluate)
    assert strategy.state.version == 5
    assert calls == [0, 1, 2, 3, 4, 5]


def test_an_accuracy_of_1_may_be_a_whole_number():
    evaluate, calls = counting_evaluation(lambda version: version // 3)
    strategy = FedBuff(buffer_size=1, limits=Limits(target_accuracy=1.0), **virtual(2))
    run(strategy, ScriptedGrid(2, lambda message: update()), evaluate_fn=evaluate, num_versions=9)
    assert calls == [0, 1, 2, 3]


def test_stops_at_the_wall_deadline_and_at_the_time_limit():
    for limit in (Limits(deadline=7.0), Limits(time_limit=7.0)):
        grid = ScriptedGrid(2, delay=1.0)
        strategy = FedBuff(buffer_size=1, max_in_flight=1, limits=limit)
        run(strategy, grid, num_versions=100)
        assert 5 <= strategy.state.version <= 7


def test_stops_when_it_is_asked_to():
    grid = ScriptedGrid(2, delay=1.0)
    strategy = FedBuff(
        buffer_size=1, max_in_flight=1, limits=Limits(stop_fn=lambda: grid.time.now > 5.0)
    )
    recorder = recorded(strategy, grid, num_versions=100)
    assert 3 <= strategy.state.version <= 6
    assert recorder.of("end")[0].reason == "a stop was requested"


def test_a_wish_that_is_heard_between_two_evaluations_is_not_forgotten():
    wishes = []

    def stop():
        return bool(wishes and wishes.pop())  # once, and never again

    def evaluate(version, arrays):
        grid.time.now += 1.0  # a wish is asked for twice a second
        if len(evaluated) == 5:
            wishes.append(True)
        evaluated.append(version)
        return MetricRecord({"accuracy": 0.5})

    evaluated = []
    grid = ScriptedGrid(2, lambda message: update())
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=1,
        evaluation=Evaluation(interval=1.0),
        limits=Limits(stop_fn=stop),
        listeners=[recorder],
        **virtual(2),
    )
    run(strategy, grid, num_versions=50, evaluate_fn=evaluate)
    assert recorder.of("end")[0].reason == "a stop was requested"
    assert len(evaluated) == 6


def test_federated_evaluation_does_not_stop_training():
    def behaviour(message):
        if in_train(message):
            return update()
        metrics = {
            "num-examples": 1 + grid.partition(message),
            "accuracy": 0.1 * grid.partition(message),
        }
        return RecordDict({"metrics": MetricRecord(metrics)})

    grid = ScriptedGrid(4, behaviour, delay=lambda m: 0.1 if in_train(m) else 1.0)
    strategy = FedBuff(
        buffer_size=1, fraction_evaluate=1.0, evaluation=Evaluation(every=2), **virtual(4)
    )
    result = run(strategy, grid, num_versions=4)
    # (1·0 + 2·0.1 + 3·0.2 + 4·0.3) / 10
    assert result.evaluate_metrics_clientapp.keys() == {0, 2, 4}
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.2)


def test_a_federated_evaluation_waits_for_the_timeout_and_counts_who_has_answered():
    def behaviour(message):
        silent = not in_train(message) and grid.partition(message) == 1
        return None if silent else update()

    grid = ScriptedGrid(4, behaviour)
    strategy = FedBuff(
        buffer_size=1,
        fraction_evaluate=1.0,
        evaluate_metrics_aggr_fn=lambda records, key: MetricRecord({"replies": len(records)}),
        **virtual(4),
    )
    result = run(strategy, grid, num_versions=2, timeout=30.0)
    assert grid.time.now >= 30.0
    found = {version: dict(item) for version, item in result.evaluate_metrics_clientapp.items()}
    assert found == {version: {"replies": 3} for version in (0, 1, 2)}


# --- What travels ------------------------------------------------------------------------------


def test_train_config_carries_version_seed_and_the_decayed_rate():
    grid = ScriptedGrid(2)
    strategy = FedBuff(
        buffer_size=1, max_in_flight=1, training=Training(lr_decay=0.5), **virtual(2)
    )
    run(strategy, grid, num_versions=4, config={"lr": 0.8, "batch-size": 3})
    configs = [message.content["config"] for message in grid.sent if in_train(message)]
    assert [config["version"] for config in configs[:4]] == [0, 1, 2, 3]
    assert [config["lr"] for config in configs[:4]] == [0.8, 0.4, 0.2, 0.1]
    assert len({config["seed"] for config in configs}) == len(configs)
    assert all(config["batch-size"] == 3 for config in configs)


def test_decay_per_upload():
    grid = ScriptedGrid(2)
    strategy = FedBuff(
        buffer_size=4,
        max_in_flight=1,
        training=Training(lr_decay=0.25, lr_decay_per_upload=2),
        **virtual(2),
    )
    run(strategy, grid, num_versions=1, config={"lr": 1.0})
    configs = [message.content["config"] for message in grid.sent if in_train(message)]
    assert [config["lr"] for config in configs[:4]] == [1.0, 0.5, 0.25, 0.125]


def test_buffers_follow_the_weights_and_integers_the_last_upload():
    arrays = model_arrays([0.0, 0.0], mean=np.float32([10.0]), count=np.int64(5))
    values = iter([([2.0, 0.0], 4.0, 7), ([0.0, 2.0], 8.0, 9)])

    def behaviour(message):
        delta, mean, count = next(values)
        return update(delta, mean=np.float32([mean]), count=np.int64(count))

    grid = ScriptedGrid(2, behaviour)
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=2,
        max_in_flight=1,
        staleness_exponent=0.0,
        trainable=["w"],
        listeners=[recorder],
        **virtual(2),
    )
    result = run(strategy, grid, num_versions=1, arrays=arrays)
    assert result.arrays["w"].numpy().tolist() == [1.0, 1.0]
    assert result.arrays["mean"].numpy().tolist() == [6.0]  # the mean of what the two hold
    assert result.arrays["count"].numpy() == 9
    assert list(result.arrays) == ["w", "mean", "count"]
    assert [event.squared_norm for event in recorder.of("upload")] == [4.0, 4.0]


def test_calibration_arrays_travel_once_per_node_and_again_after_a_failure():
    batch = ArrayRecord({"inputs": Array(np.zeros(3, np.float32))})
    failed = []

    def behaviour(message):
        if grid.partition(message) == 1 and len(grid.sent) > 20 and not failed:
            failed.append(len(grid.sent))
            return Error(code=2, reason="restarted")
        return update()

    grid = ScriptedGrid(3, behaviour)
    strategy = FedPSA(
        sketch_fn=lambda arrays: [1.0, 0.0],
        buffer_size=1,
        max_in_flight=1,
        calibration_arrays=batch,
        **virtual(3),
    )
    run(strategy, grid, num_versions=40)
    carriers = [grid.partition(m) for m in grid.sent if "calibration" in m.content]
    assert sorted(carriers) == [0, 1, 1, 2]


def test_an_unusable_sketch_function_is_refused_before_the_first_message():
    grid = ScriptedGrid(1)
    with pytest.raises(ValueError, match="sketch_fn"):
        run(FedPSA(sketch_fn=lambda arrays: [[1.0]], **virtual(1)), grid)
    with pytest.raises(DivergedError, match="not finite"):
        run(FedPSA(sketch_fn=lambda arrays: [math.nan], **virtual(1)), grid)
    assert grid.sent == []


def test_a_version_is_sketched_while_clients_work_and_only_once():
    grid = ScriptedGrid(2, delay=5.0)
    sketched = []  # when, and whether a client was at work meanwhile

    def sketch_fn(arrays):
        sketched.append((grid.time.now, grid.outstanding_train > 0))
        return [1.0, 0.0]

    strategy = FedPSA(sketch_fn=sketch_fn, buffer_size=1, max_in_flight=1)
    run(strategy, grid, num_versions=3)
    assert len(sketched) == 3  # the versions 0, 1 and 2; nothing is compared with the last one
    assert [working for _, working in sketched] == [False, True, True]


def test_an_error_about_a_diverged_model_names_the_array_to_look_at():
    grid = ScriptedGrid(1)
    strategy = FedPSA(sketch_fn=lambda arrays: [math.nan], **virtual(1))
    arrays = model_arrays([1.0, -7e20], head=np.ones(3, np.float32), count=np.asarray(5))
    with pytest.raises(DivergedError, match=r"arrays are finite, the largest .* 7e\+20 in 'w'"):
        run(strategy, grid, arrays=arrays)
    arrays = model_arrays([1.0, 7.0], head=np.array([1.0, np.nan], np.float32))
    with pytest.raises(DivergedError, match=r"not finite are \['head'\]"):
        run(strategy, grid, arrays=arrays)


@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_a_version_that_diverged_ends_the_run_with_the_upload_that_needs_its_sketch(delay):
    """Not while waiting, or real time would decide whether a run reaches its deadline."""
    grid = ScriptedGrid(1, delay=delay)

    def sketch_fn(arrays):
        return [1.0 if arrays["w"].numpy()[0] == 0 else math.nan, 0.0]

    clock = virtual(1, ConstantLatency(value=10.0))
    settings = {"sketch_fn": sketch_fn, "buffer_size": 1, "max_in_flight": 1, **clock}
    result = run(FedPSA(**settings, limits=Limits(deadline=15.0)), grid)
    assert result.arrays["w"].numpy().tolist() == [1.0, 1.0]
    with pytest.raises(DivergedError, match="version 1"):
        run(FedPSA(**settings, limits=Limits(deadline=25.0)), grid)


def test_a_run_can_be_repeated_with_the_same_strategy_object():
    def go():
        grid = ScriptedGrid(4, lambda m: update([m.content["config"]["seed"] % 97, 0.0]))
        return run(strategy, grid, num_versions=5).arrays["w"].numpy().tobytes()

    strategy = FedPSA(sketch_fn=lambda arrays: [1.0, 0.0], buffer_size=2, **virtual(4))
    assert go() == go()


def test_start_is_flowers_interface():
    grid = ScriptedGrid(2, delay=0.0)
    grid.time = FakeTime()
    evaluate, calls = counting_evaluation()
    result = FedBuff(buffer_size=1, **virtual(2)).start(
        grid=grid,
        initial_arrays=model_arrays(),
        num_rounds=2,
        timeout=60.0,
        train_config=ConfigRecord({"lr": 0.1}),
        evaluate_fn=evaluate,
    )
    assert result.arrays["w"].numpy().tolist() == [2.0, 2.0]
    assert calls == [0, 1, 2]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"fraction_train": 0.0}, "fraction_train = 0.0"),
        ({"fraction_train": 1.5}, "fraction_train = 1.5"),
        ({"max_in_flight": 0}, "max_in_flight = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"clock": VirtualClock(ConstantLatency())}, "num_clients"),
    ],
)
def test_impossible_settings_are_refused_by_name(kwargs, text):
    with pytest.raises(ValueError, match=text):
        FedBuff(**kwargs)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (Training, "lr_decay", 0.0),
        (Limits, "deadline", math.nan),
        (Limits, "target_accuracy", 2.0),
        (Failures, "max_failures", 0),
        (Failures, "query_timeout", -1.0),
        (Evaluation, "every", 0),
    ],
)
def test_impossible_settings_of_a_group_are_refused_by_name(group, name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        group(**{name: value})


# --- Listeners ---------------------------------------------------------------------------------


def test_reading_the_rules_sketch_in_a_listener_changes_nothing():
    """At every event it is that of the model the rule holds, and asking for it leaves no trace."""

    def sketch_fn(arrays):
        return arrays["w"].numpy().astype(float).tolist()

    def go(listener):
        recorder = Recorder()
        grid = ScriptedGrid(
            4, lambda message: update([grid.partition(message) - 1.5, 1.0], sketch=[1.0, -0.5])
        )
        strategy = FedPSA(
            sketch_fn=sketch_fn,
            buffer_size=2,
            queue_size=4,
            max_in_flight=3,
            listeners=[recorder],
            **virtual(4),
        )
        strategy.listeners.append(lambda event: listener(event, strategy.rule))
        result = run(strategy, grid, num_versions=12, arrays=model_arrays([1.0, 2.0]))
        return result.arrays["w"].data, [vars(event) for event in recorder.of("aggregate")]

    def look(event, rule):
        assert rule.global_sketch == rule.model.astype(float).tolist(), event

    assert go(look) == go(lambda event, rule: None)


def test_who_gives_no_listener_sees_every_version_and_the_final_results_in_the_log(caplog):
    caplog.set_level("INFO", logger="flwr")
    clock = VirtualClock(ConstantLatency())
    grid = ScriptedGrid(3, delay=0.0)

    def go(**kwargs):
        caplog.clear()
        FedBuff(buffer_size=2, max_in_flight=2, clock=clock, num_clients=3, **kwargs).start(
            grid,
            model_arrays(),
            num_rounds=3,
            evaluate_fn=lambda version, arrays: MetricRecord({"accuracy": 0.25}),
        )
        return caplog.messages

    lines = go()
    assert any(line.startswith("[VERSION 2] 2 new uploads (mean staleness") for line in lines)
    assert any("evaluated by server: accuracy 0.25" in line for line in lines)
    assert "Final results:" in lines
    assert any("Global Arrays" in line for line in lines)
    assert not any("VERSION" in line or "Final results" in line for line in go(listeners=[]))


@pytest.mark.parametrize("query_timeout", [0.0, 5.0])
def test_with_the_wall_clock_nodes_are_queried_only_if_asked_for(query_timeout):
    grid = ScriptedGrid(3)
    run(FedBuff(failures=Failures(query_timeout=query_timeout)), grid, num_versions=1)
    queries = [m for m in grid.sent if m.metadata.message_type == MessageType.QUERY]
    assert len(queries) == (3 if query_timeout else 0)
