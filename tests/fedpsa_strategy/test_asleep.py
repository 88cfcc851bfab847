"""The virtual clock counts no real time: processes may be stopped for as long as they like."""

import numpy as np
import pytest
from flwr.app import Error, Message

from fedpsa_strategy import FedBuff, FedPSA
from fedpsa_strategy.server.awake import AwakeTime
from fedpsa_strategy.server.options import Failures
from support.grids import FakeTime, ScriptedGrid, update
from support.runs import Recorder, in_train, recorded, run, virtual

TIMEOUT = 100.0


class Flowers(ScriptedGrid):
    """Lets messages expire as a SuperLink does; nodes that were stopped are unknown for a while."""

    def __init__(self, num_nodes, behaviour, *, stops=(), unknown_for=0.0, **kwargs):
        super().__init__(num_nodes, behaviour, delay=lambda message: 3.0, **kwargs)
        self.stops = list(stops)  # after so many pulls, all processes stop for so many seconds
        self.unknown_for = unknown_for
        self.unknown_until = -1.0
        self.pulls = 0
        self.expires = {}

    def push_messages(self, messages):
        messages = list(messages)
        accepted = list(super().push_messages(messages))
        for message in messages:
            self.expires[message.metadata.message_id] = self.time.now + TIMEOUT
        return accepted

    def pull_messages(self, message_ids):
        self.pulls += 1
        if self.stops and self.pulls > self.stops[0][0]:
            seconds = self.stops.pop(0)[1]
            self.time.now += seconds
            self.unknown_until = self.time.now + self.unknown_for
            # Nodes go on where they were stopped.
            self.pending = {key: (at + seconds, m) for key, (at, m) in self.pending.items()}
        replies = []
        for key in list(message_ids):
            if key not in self.pending:
                continue
            message = self.pending[key][1]
            code = 3 if self.time.now > self.expires[key] else None
            if code is None and self.time.now < self.unknown_until:
                code = 5
            if code is None:
                replies += super().pull_messages([key])
                continue
            del self.pending[key]
            self.outstanding_train -= in_train(message)
            error = Message(Error(code=code, reason="Flower's own"), reply_to=message)
            error.metadata.__dict__["_src_node_id"] = 1
            replies.append(error)
        return replies


def client(message):
    seed = message.content["config"]["seed"] if in_train(message) else 0
    return update(np.random.default_rng(seed).normal(size=2).astype(np.float32))


def ended(grid, method=FedBuff, **kwargs):
    recorder = Recorder()
    own = {"sketch_fn": lambda arrays: [1.0, 0.0]} if method is FedPSA else {}
    strategy = method(buffer_size=3, max_in_flight=4, listeners=[recorder], **own, **virtual(8))
    result = run(strategy, grid, num_versions=12, timeout=TIMEOUT, **kwargs)
    uploads = [(event.sequence, event.client, event.time) for event in recorder.of("upload")]
    return result.arrays["w"].data, uploads, recorder


@pytest.mark.parametrize("method", [FedBuff, FedPSA])
@pytest.mark.parametrize("unknown_for", [0.0, 5.0])
@pytest.mark.parametrize("seconds", [30.0, TIMEOUT + 1, 50_000.0])
def test_a_stop_of_all_processes_changes_nothing(method, seconds, unknown_for):
    model, uploads, whole = ended(Flowers(8, client), method)
    grid = Flowers(8, client, stops=[(20, seconds), (60, seconds)], unknown_for=unknown_for)
    again = ended(grid, method)
    assert not grid.stops
    assert again[:2] == (model, uploads)
    assert not again[2].of("reject")
    assert not again[2].of("quarantine")
    assert len(again[2].of("dispatch")) == len(whole.of("dispatch"))
    if seconds > TIMEOUT:
        assert again[2].of("resend")


def test_a_node_that_is_silent_is_given_up_all_the_same():
    grid = Flowers(8, client)
    dead = min(grid.nodes)
    grid.delay = lambda m: 1e9 if m.metadata.dst_node_id == dead and in_train(m) else 3.0
    *_, recorder = ended(grid)
    assert recorder.of("reject")
    assert {event.client for event in recorder.of("reject")} == {0}
    # Once is Flower's lifetime over before the run's own patience; twice it never is.
    assert len(recorder.of("resend")) <= len(recorder.of("reject"))


def test_a_node_that_flower_calls_dead_is_a_failure():
    grid = Flowers(8, client)
    dead = min(grid.nodes)
    usual = grid.pull_messages

    def pull(message_ids):
        return [
            _unavailable(reply) if in_train(reply) and reply.metadata.src_node_id == dead else reply
            for reply in usual(message_ids)
        ]

    grid.pull_messages = pull
    *_, recorder = ended(grid)
    assert not recorder.of("resend")
    assert {event.client for event in recorder.of("reject")} == {0}


def _unavailable(reply):
    reply.metadata.__dict__["_src_node_id"] = 1
    reply._error = Error(code=5, reason="Node Unavailable")
    reply._content = None
    return reply


def test_a_client_that_claims_so_itself_is_a_failure():
    grid = Flowers(8, client)
    liar = min(grid.nodes)
    grid.behaviour = lambda m: (
        Error(code=3, reason="Message Unavailable")
        if m.metadata.dst_node_id == liar and in_train(m)
        else client(m)
    )
    *_, recorder = ended(grid)
    assert not recorder.of("resend")
    assert {event.client for event in recorder.of("reject")} == {0}


def test_with_the_wall_clock_late_is_late():
    grid = Flowers(8, client, stops=[(40, 5000.0)])
    strategy = FedBuff(buffer_size=3, max_in_flight=4, failures=Failures(max_failures=9))
    recorder = recorded(strategy, grid, num_versions=20, timeout=TIMEOUT)
    assert recorder.of("reject")
    assert not recorder.of("resend")


def test_time_asleep_hardly_counts():
    time, day = FakeTime(), FakeTime()
    awake = AwakeTime(time.monotonic, day.monotonic)
    for _ in range(10):
        time.sleep(5.0)
        day.sleep(5.0)
        awake()
    assert awake() == 50.0
    assert awake.woke == -np.inf
    time.sleep(10_000.0)  # stopped
    day.sleep(10_000.0)
    assert 50.0 < awake() <= 70.0
    assert awake.woke == awake()
    day.sleep(10_000.0)  # asleep: time itself stood still
    before = awake.woke
    time.sleep(1.0)
    assert awake() == before + 1.0
    assert awake.woke == awake()
    day.sleep(-3600.0)  # somebody sets the clock
    time.sleep(1.0)
    assert awake() == before + 2.0
