"""What broken or dishonest clients can do: huge updates and forged sketches."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpsa_strategy import FedAvg, FedBuff, FedPSA, Probe, make_reply
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.callbacks import NormGuard
from fedpsa_strategy.server.callbacks.sketches import relative_error
from fedpsa_strategy.server.metrics import weighted_mean
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.wire.contract import MARK, mark
from fedpsa_strategy.wire.replies import TrainReply
from support.clients import model, trained_reply
from support.grids import ScriptedGrid, as_update, model_arrays, update
from support.runs import Recorder, in_train, recorded, run, virtual


def go(guard, huge=(300.0, 400.0), num_versions=30):
    def behaviour(message):
        return update(huge) if grid.partition(message) == 2 else update([0.6, 0.8])

    grid = ScriptedGrid(4, behaviour)
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=1,
        max_in_flight=1,
        staleness_exponent=0.0,
        callbacks=[] if guard is None else [guard],
        failures=Failures(pause=1e9),
        listeners=[recorder],
        **virtual(4),
    )
    return run(strategy, grid, num_versions=num_versions), recorder


def test_without_a_limit_a_huge_update_counts():
    result, recorder = go(None)
    assert np.linalg.norm(result.arrays["w"].numpy()) > 500
    assert not recorder.of("reject")


def test_an_absolute_limit_rejects():
    result, recorder = go(NormGuard(most=2.0))
    np.testing.assert_allclose(result.arrays["w"].numpy(), [18.0, 24.0], rtol=1e-5)
    assert {event.client for event in recorder.of("reject")} == {2}
    assert "norm 500 is above 2" in recorder.of("reject")[0].reason


def test_an_absolute_limit_clips():
    result, recorder = go(NormGuard(most=2.0, action="clip"))
    huge = sum(event.client == 2 for event in recorder.of("upload"))
    assert huge > 0
    expected = np.array([0.6, 0.8]) * (30 - huge) + np.array([1.2, 1.6]) * huge
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected, rtol=1e-5)
    assert {event.squared_norm for event in recorder.of("upload") if event.client == 2} == {4.0}


def test_a_multiple_of_the_median_rejects_from_the_first_version_on():
    _, recorder = go(NormGuard(ratio=10.0), num_versions=60)
    assert {event.client for event in recorder.of("reject")} == {2}
    assert 2 not in {event.client for event in recorder.of("upload")}


@pytest.mark.parametrize("kwargs", [{"most": -1.0}, {"ratio": float("nan")}, {"action": "shrug"}])
def test_impossible_limits_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        NormGuard(**kwargs)


# --- The ratio: who is judged by what, in sequences of norms -------------------------------------


class Fleet:
    """Clients whose norms a guard judges, left out after three rejections in a row."""

    def __init__(self, num_clients, ratio=5.0, model_norm=2.0):
        self.guard = NormGuard(ratio=ratio)
        self.guard.begin(
            SimpleNamespace(model=SimpleNamespace(norm=model_norm), clients=range(num_clients))
        )
        self.failures = dict.fromkeys(range(num_clients), 0)

    def accepts(self, client, norm):
        reply = TrainReply(
            delta=np.zeros(1, np.float32),
            states={},
            squared_norm=norm * norm,
            num_examples=1,
            metrics=MetricRecord(),
            num_bytes=0,
        )
        try:
            self.guard.check(SimpleNamespace(client=client), reply, reply)
        except InvalidReplyError:
            self.failures[client] += 1
            return False
        self.failures[client] = 0
        return True


orders = st.lists(st.integers(0, 9), min_size=1, max_size=200)


@settings(deadline=None, max_examples=300)
@given(order=orders, norm=st.floats(1e-6, 1e6), scale=st.floats(1e-6, 1e6), spread=orders)
def test_honest_norms_that_move_never_lock_anybody_out(order, norm, scale, spread):
    """All norms are within a factor of 4; then they jump by any factor, up or down."""
    fleet = Fleet(10)
    for jump in (1.0, scale):
        for client, step in zip(order, itertools.cycle(spread)):
            fleet.accepts(client, norm * jump * 4 ** (step / 9))
    # Whatever came before: when each was heard twice at the new level, all are accepted.
    for client in [*range(10)] * 2:
        fleet.accepts(client, norm * scale)
    assert all(fleet.accepts(client, norm * scale) for client in range(10))


@settings(deadline=None, max_examples=300)
@given(
    order=orders,
    attackers=st.sets(st.integers(0, 9), max_size=3),
    factor=st.floats(200.0, 1e6),
    drift=st.floats(0.98, 1.02),
)
def test_three_of_ten_neither_get_in_nor_lock_others_out(order, attackers, factor, drift):
    """In whatever order, also if they answer first and far more often than others."""
    fleet = Fleet(10)
    norm = 1.0
    for client in [*sorted(attackers), *order]:
        norm *= drift
        if client in attackers:
            assert not fleet.accepts(client, factor * norm)
        else:
            fleet.accepts(client, norm)
    for client in sorted(set(range(10)) - attackers) * 2:
        fleet.accepts(client, norm)
    honest = sorted(set(range(10)) - attackers)
    assert all(fleet.accepts(client, norm) for client in honest)


@settings(deadline=None, max_examples=300)
@given(order=orders, attackers=st.sets(st.integers(0, 9), max_size=3))
def test_tiny_updates_of_three_of_ten_lock_nobody_out(order, attackers):
    fleet = Fleet(10)
    for client in [*sorted(attackers), *order, *range(10)]:
        fleet.accepts(client, 0.0 if client in attackers else 1.0)
    assert all(fleet.accepts(client, 1.0) for client in range(10) if client not in attackers)


@pytest.mark.parametrize("num_clients", [1, 2, 3])
def test_with_few_clients_nobody_is_locked_out(num_clients):
    """Norms far beyond the model's, as of a regression on large numbers that starts from zero."""
    fleet = Fleet(num_clients, model_norm=0.0)
    for _ in range(3):
        for client in range(num_clients):
            fleet.accepts(client, 1e5)
    assert fleet.failures == dict.fromkeys(range(num_clients), 0)


def test_norms_come_back_from_a_checkpoint():
    fleet = Fleet(10)
    for client in range(5):
        fleet.accepts(client, 1.0 + client)
    pairs = [[i, 1.0 + i] for i in range(5)]
    for state in (fleet.guard.state_dict(), {"norms": pairs}):  # and as it was once written
        again = NormGuard(ratio=5.0)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == fleet.guard.state_dict()
        assert list(map(list, again._norms.items())) == pairs  # the order says who is left out next


def fill(content, value):
    """Make an update one of equal entries."""
    content["arrays"] = ArrayRecord(
        {
            key: Array(np.full(array.shape, value, np.float32))
            for key, array in content["arrays"].items()
        }
    )
    content[MARK] = ConfigRecord(mark())  # with the checksum of what it made it would lie


def test_an_outlier_in_the_first_replies_neither_counts_nor_ends_the_run():
    """One of ten sends entries of ±1000 in its first reply; the others train honestly."""
    start = model()
    huge = [True]

    def behaviour(message):
        content = trained_reply(message).content
        if grid.partition(message) == 1 and huge:
            huge.clear()
            fill(content, 1000.0)
        return content

    grid = ScriptedGrid(10, behaviour)
    probe = Probe.gaussian(start, (5,), num_classes=3, size=16)
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(model()),
        buffer_size=2,
        max_in_flight=4,
        callbacks=[NormGuard(ratio=5.0)],
        **virtual(10),
    )
    recorder = recorded(strategy, grid, num_versions=8, arrays=ArrayRecord(start.state_dict()))
    assert [event.client for event in recorder.of("reject")] == [1]
    assert strategy.state.model.norm < 10


# --- Huge but finite updates ---------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1e17, 1e12, 1e5])
def test_a_huge_finite_update_never_ends_a_run(entries):
    """Without any limit that a user sets; the last one is short enough to be tried out."""

    class Overflowing(nn.Module):
        """Its outputs are not finite long before its weights are not."""

        def __init__(self):
            super().__init__()
            self.layers = model()

        def forward(self, x):
            return self.layers(x).exp()

    start = Overflowing()
    probe = Probe.gaussian(start, (5,), num_classes=3, size=16)

    def behaviour(message):
        local = Overflowing()
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())
        content = make_reply(message, local, num_examples=8).content
        if grid.partition(message) == 1:
            fill(content, entries)
        return content

    grid = ScriptedGrid(4, behaviour)
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(Overflowing()), buffer_size=2, max_in_flight=2, **virtual(4)
    )
    recorder = recorded(strategy, grid, num_versions=3, arrays=ArrayRecord(start.state_dict()))
    assert {event.client for event in recorder.of("reject")} == {1}
    assert 1 not in {event.client for event in recorder.of("upload")}
    expected = "no training takes" if entries > 1e6 else "the sketch of its start is not finite"
    assert expected in recorder.of("reject")[0].reason


def test_a_half_precision_model_stays_within_its_numbers():
    grid = ScriptedGrid(
        4,
        lambda message: update(
            [65000.0, 0.0] if grid.partition(message) == 1 else [1.0, 1.0], dtype=np.float16
        ),
    )
    recorder = Recorder()
    strategy = FedBuff(buffer_size=2, max_in_flight=2, listeners=[recorder], **virtual(4))
    arrays = model_arrays([600.0, 0.0], dtype=np.float16)
    result = run(strategy, grid, num_versions=10, arrays=arrays)
    assert {event.client for event in recorder.of("reject")} == {1}
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_one_clients_amount_of_data_does_not_take_over_fedavg():
    def behaviour(message):
        bad = grid.partition(message) == 1
        return update([-1.0, -1.0], num_examples=1e300) if bad else update([1.0, 1.0])

    grid = ScriptedGrid(4, behaviour)
    recorder = Recorder()
    strategy = FedAvg(fraction_train=1.0, listeners=[recorder], **virtual(4))
    result = run(strategy, grid, num_versions=5)
    assert result.arrays["w"].numpy().tolist() == [5.0, 5.0]
    assert {event.client for event in recorder.of("reject")} == {1}


@pytest.mark.parametrize("told", [10, 10**18])
def test_the_limit_on_data_is_the_fleets_whatever_a_node_told_at_the_start(told):
    class Telling(ScriptedGrid):
        def _about(self, node):
            answer = super()._about(node)
            if self.partition_of(node) == 1:
                answer["metrics"]["num-examples"] = told
            return answer

    def behaviour(message):
        return update(num_examples=10**18 if grid.partition(message) == 1 else 10)

    grid = Telling(4, behaviour)
    strategy = FedAvg(fraction_train=1.0, **virtual(4))
    recorder = recorded(strategy, grid, num_versions=3)
    assert {event.client for event in recorder.of("reject")} == {1}


# --- Forged sketches ---------------------------------------------------------------------------


def forged_run(scale=1.0, num_versions=20, **kwargs):
    start = model()
    probe = Probe.gaussian(start, (5,), num_classes=3, size=16)
    server = probe.sketch_fn(model())

    def behaviour(message):
        content: RecordDict = trained_reply(message).content
        if grid.partition(message) == 1:
            # The greedy forger answers with the sketch of the model it was given: κ close to 1.
            sketch = server(message.content["arrays"])
            content["metrics"]["sketch"] = [value * scale for value in sketch]
        return content

    grid = ScriptedGrid(4, behaviour)
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(model()),
        buffer_size=2,
        max_in_flight=2,
        failures=Failures(pause=1e9),
        **virtual(4),
        **kwargs,
    )
    arrays = ArrayRecord(start.state_dict())
    return recorded(strategy, grid, num_versions=num_versions, arrays=arrays, config=probe.config())


def test_a_forger_is_caught_and_left_out_at_once():
    recorder = forged_run(audit_fraction=1.0)
    (rejection,) = recorder.of("reject")
    assert rejection.client == 1
    assert "sketch is not that of the model" in rejection.reason
    assert [event.client for event in recorder.of("quarantine")] == [1]
    assert 1 not in {event.client for event in recorder.of("upload")}


@pytest.mark.parametrize("scale", [1e155, 1e20])
def test_a_sketch_of_absurd_length_is_refused_with_and_without_audit(scale):
    for fraction in (0.0, 1.0):
        recorder = forged_run(scale=scale, num_versions=4, audit_fraction=fraction)
        assert {event.client for event in recorder.of("reject")} == {1}
        assert 1 not in {event.client for event in recorder.of("upload")}


@pytest.mark.parametrize("scale", [1e-300, 1e9])
def test_an_audit_compares_lengths_too(scale):
    recorder = forged_run(scale=scale, num_versions=4, audit_fraction=1.0)
    (rejection,) = recorder.of("reject")
    assert "sketch is not that of the model" in rejection.reason


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(st.lists(finite, min_size=3, max_size=3), st.lists(finite, min_size=3, max_size=3))
def test_sketches_are_compared_without_overflow(claimed, expected):
    error = relative_error(np.array(claimed), np.array(expected))
    assert 0 <= error <= 2.0000001
    if claimed == expected:
        assert error == 0
    elif max(map(abs, claimed)) > 4 * max(map(abs, expected)):
        assert error > 0.5


def test_a_forger_is_caught_sooner_or_later_by_a_partial_audit():
    recorder = forged_run(audit_fraction=0.3)
    assert [event.client for event in recorder.of("quarantine")] == [1]


def test_without_audit_a_forger_goes_unnoticed():
    recorder = forged_run()
    assert 1 in {event.client for event in recorder.of("upload")}
    assert not recorder.of("reject")


def test_an_update_that_a_deep_model_multiplies_is_refused():
    """60 times the weights, in 25 layers: arrays and norm are finite, the outputs are not."""
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.ReLU())]
    deep = nn.Sequential(*layers, nn.Linear(8, 3))
    probe = Probe.gaussian(deep, shape=(8,), num_classes=3)

    def behaviour(message):
        factor = np.float32(60 if grid.partition(message) == 0 else 1e-3)
        deltas = {key: factor * a.numpy() for key, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 10, "sketch": [1.0] * 16})
        return as_update(deltas, {}, metrics)

    grid = ScriptedGrid(5, behaviour)
    strategy = FedPSA(buffer_size=2, sketch_fn=probe.sketch_fn(deep), max_in_flight=3, **virtual(5))
    recorder = recorded(strategy, grid, num_versions=8, arrays=ArrayRecord(deep.state_dict()))
    assert {event.client for event in recorder.of("reject")} == {0}
    assert all("sketch of" in event.reason for event in recorder.of("reject"))


@pytest.mark.parametrize("odd", [-39, 1e300, [1.0, 2.0]])
def test_nobody_takes_over_the_evaluation_on_clients(odd):
    def behaviour(message):
        if in_train(message):
            return update()
        bad = grid.partition(message) == 4
        metrics = {"num-examples": odd if bad else 10, "accuracy": 1.0 if bad else 0.5}
        return RecordDict({"metrics": MetricRecord(metrics)})

    grid = ScriptedGrid(5, behaviour)
    strategy = FedBuff(fraction_evaluate=1.0, listeners=[], **virtual(5))
    result = run(strategy, grid, num_versions=1)
    assert all(
        metrics["accuracy"] == pytest.approx(0.5, abs=0.1)
        for metrics in result.evaluate_metrics_clientapp.values()
    )


def test_a_metric_that_is_a_list_for_some_has_no_mean():
    records = [
        RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 2.0, "accuracy": value})})
        for value in (0.5, [1.0])
    ]
    assert dict(weighted_mean(records, "num-examples")) == {"loss": 2.0}
