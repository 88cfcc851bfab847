"""Replies that Flower itself cannot decode: whose they are is found out, and nobody else pays."""

import itertools
from collections import Counter

import pytest
from flwr.app import Error, MetricRecord

from fedpsa_strategy import FedAvg, FedBuff, FedPSA
from fedpsa_strategy.server.options import Evaluation, Failures
from support.grids import DecodingGrid, Unreadable, update
from support.runs import Recorder, recorded, run, virtual


def go(bad=(), *, method=FedBuff, clock=True, bad_reply=Unreadable, num_versions=12, **kwargs):
    """Run with some nodes whose train replies cannot be decoded."""

    def behaviour(message):
        if grid.partition(message) in bad:
            return bad_reply()
        # What a client trains depends on its task alone.
        return update([message.content["config"]["seed"] % 7 - 3.0, 1.0])

    grid = DecodingGrid(6, behaviour, delay=kwargs.pop("delay", lambda message: 0.0))
    recorder = Recorder()
    settings = virtual(6) if clock else {}
    if method is not FedAvg:
        settings |= {"buffer_size": 2}
    if method is FedPSA:
        settings |= {"sketch_fn": lambda arrays: [1.0, 0.0], "queue_size": 4}
    strategy = method(
        max_in_flight=4,
        failures=kwargs.pop("failures", Failures(pause=1e9)),
        listeners=[recorder],
        **settings,
        **kwargs,
    )
    result = run(strategy, grid, num_versions=num_versions)
    return result, recorder, grid, strategy


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize("method", [FedBuff, FedPSA, FedAvg])
def test_the_node_is_found_refused_and_paused_and_nobody_else_is(method, clock):
    _, recorder, grid, strategy = go({2}, method=method, clock=clock)
    assert grid.raised > 0
    (rejection,) = recorder.of("reject")
    assert rejection.client == 2
    assert rejection.reason == (
        r"the reply cannot be decoded: ValueError: Value must be int or float, not None\x1b[31m"
    )
    assert [event.client for event in recorder.of("quarantine")] == [2]
    assert {event.client for event in recorder.of("upload")} == {0, 1, 3, 4, 5}
    assert strategy.state.version == 12
    assert len(strategy.state.in_flight) == strategy.state.clients.num_busy


def test_what_was_lost_is_sent_again_as_the_same_task():
    _, recorder, grid, _ = go({2})
    again = recorder.of("resend")
    assert again
    tasks = {event.sequence: event for event in recorder.of("dispatch")}
    configs = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            config = dict(message.content["config"])
            configs.setdefault(config["seed"], []).append((config, message.metadata.dst_node_id))
    assert any(len(sent) > 1 for sent in configs.values())
    assert all(sent.count(sent[0]) == len(sent) for sent in configs.values())
    for event in again:
        first = tasks[event.sequence]
        assert (event.client, event.version) == (first.client, first.version)
    sequences = [event.sequence for event in recorder.of("upload")]
    assert len(sequences) == len(set(sequences))


def test_a_node_that_has_two_tasks_may_lose_both_replies():
    seeds = {}

    def behaviour(message):
        seeds.setdefault(message.content["config"]["seed"], set()).add(message.metadata.message_id)
        if grid.partition(message) == 0 and len(seeds) > 20 and not grid.raised:
            return Unreadable()
        return update()

    def evaluate(version, arrays):
        grid.time.now += 9.0  # long enough for both to arrive
        return MetricRecord({"loss": 1.0})

    grid = DecodingGrid(4, behaviour, delay=lambda message: 4.0)
    recorder = Recorder()
    strategy = FedBuff(buffer_size=4, queued_per_node=1, fraction_train=1.0, listeners=[recorder])
    run(strategy, grid, num_versions=20, evaluate_fn=evaluate, timeout=1000.0)
    again = recorder.of("resend")
    assert max(Counter(event.node_id for event in again).values()) == 2
    assert sorted(len(messages) for messages in seeds.values() if len(messages) > 1) == [2] * len(
        again
    )
    in_flight = strategy.state.in_flight.values()
    done = {event.sequence for event in recorder.of("upload") + recorder.of("reject")}
    assert done | {task.sequence for task in in_flight} == set(range(strategy.state.sequence))
    tasks = Counter(task.client for task in in_flight)
    assert {client.index: client.tasks for client in strategy.state.clients} == {
        client: tasks[client] for client in range(4)
    }


def test_with_the_virtual_clock_the_losses_do_not_show():
    """The same bits, whatever is lost when, also as in a run in which nothing is lost at all."""
    settings = {"num_versions": 30, "failures": Failures(max_failures=1, pause=300.0)}
    plain = go({2}, bad_reply=lambda: Error(code=2, reason="it broke"), **settings)
    number = itertools.count()
    lossy = [
        go({2}, **settings),
        go({2}, delay=lambda message: next(number) * 7 % 5 / 10, **settings),
    ]
    assert not plain[1].of("resend")
    assert 0 < len(lossy[0][1].of("resend")) != len(lossy[1][1].of("resend")) > 0

    def kept(recorder):
        events = [vars(event) for event in recorder if event.kind in ("upload", "reject")]
        return [{key: event[key] for key in event if key != "reason"} for event in events]

    assert len(plain[1].of("reject")) > 2
    for result, recorder, _, _ in lossy:
        assert result.arrays["w"].data == plain[0].arrays["w"].data
        assert kept(recorder) == kept(plain[1])


def test_polling_costs_no_more_when_all_is_well_and_goes_back_to_that():
    _, _, grid, _ = go()
    assert grid.raised == 0
    assert all(len(set(pull)) == len(pull) for pull in grid.pulls)
    first = len(grid.pulls)
    _, _, grid, _ = go({2})
    assert len(grid.pulls) < first + 40
    assert len(grid.pulls[-1]) > 1


def test_most_of_the_nodes_may_be_like_that():
    _, recorder, _, strategy = go({1, 2, 3, 4}, num_versions=6)
    assert {event.client for event in recorder.of("reject")} == {1, 2, 3, 4}
    assert len(recorder.of("reject")) == 4
    assert strategy.state.version == 6


def test_a_node_whose_answer_to_the_query_cannot_be_decoded_has_told_nothing():
    grid = DecodingGrid(4, unreadable_query=lambda node: node == grid.nodes[1])
    strategy = FedBuff(
        buffer_size=2, max_in_flight=2, min_available_nodes=4, failures=Failures(query_timeout=60.0)
    )
    recorder = recorded(strategy, grid, num_versions=4)
    joined = {event.node_id: event.partition for event in recorder.of("join")}
    assert joined.pop(grid.nodes[1]) is None
    assert None not in joined.values()
    assert len(joined) == 3
    assert not recorder.of("reject")


def test_evaluate_replies_that_cannot_be_decoded_are_left_out():
    def behaviour(message):
        if message.metadata.message_type == "evaluate" and grid.partition(message) == 1:
            return Unreadable()
        return update()

    grid = DecodingGrid(4, behaviour, delay=0.0)
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=2,
        max_in_flight=2,
        fraction_evaluate=1.0,
        evaluate_metrics_aggr_fn=lambda records, key: MetricRecord({"replies": len(records)}),
        evaluation=Evaluation(every=2),
        listeners=[recorder],
        **virtual(4),
    )
    result = run(strategy, grid, num_versions=4)
    assert grid.raised > 0
    # Those that were lost with it are asked for again.
    found = {version: dict(item) for version, item in result.evaluate_metrics_clientapp.items()}
    assert found == {version: {"replies": 3} for version in (0, 2, 4)}
    assert not recorder.of("reject")
    assert {event.where for event in recorder.of("evaluate")} == {"clients"}


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt, ConnectionError])
def test_a_grid_that_is_gone_still_ends_the_run(error):
    class Gone(DecodingGrid):
        def pull_messages(self, message_ids):
            if self.outstanding_train:
                raise error("gone")
            return super().pull_messages(message_ids)

    with pytest.raises(error, match="gone"):
        run(FedBuff(max_in_flight=2, **virtual(4)), Gone(4))
