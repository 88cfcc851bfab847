"""Rules of other papers against sequences worked out by hand, and on the loop."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedpsa_strategy import FedBuff, UniformLatency
from fedpsa_strategy.methods.ace import ACEMethod
from fedpsa_strategy.methods.aced import ACEDMethod
from fedpsa_strategy.methods.area import AREAMethod
from fedpsa_strategy.methods.base import Given
from fedpsa_strategy.methods.fadas import FADASMethod
from fedpsa_strategy.methods.fedac import FedACMethod
from fedpsa_strategy.methods.rescaled import RescaledMethod
from fedpsa_strategy.methods.vectors import cosine_of
from fedpsa_strategy.server.callbacks import StalenessLimit
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.strategies import strategy_of
from support.grids import ScriptedGrid, model_arrays, update
from support.runs import recorded, virtual
from support.updates import ZERO, make_update


def started(method, num_clients=4, model=ZERO):
    rule = method.make_rule(Given(num_clients))
    rule.start(np.asarray(model, np.float32))
    return rule


def test_fadas_by_hand():
    """K = 2, β1 = β2 = ½, η = 0.4, ε negligible; per coordinate.

    Version 1: Δ = (2, 0): m = (1, 0), v = (2, 0), v^ = v; x = 0.4 · 1/√2.
    Version 2: Δ = (0, 4): m = (½, 2), v = (1, 8), v^ = (2, 8): x += 0.4 (½/√2, 2/√8).
    """
    rule = started(FADASMethod(buffer_size=2, beta1=0.5, beta2=0.5, adaptive_lr=0.4))
    assert rule.add(make_update([4, 0])) is None
    np.testing.assert_allclose(rule.add(make_update([0, 0])), [0.4 / math.sqrt(2), 0], rtol=1e-6)
    rule.add(make_update([0, 4]))
    second = rule.add(make_update([0, 4]))
    np.testing.assert_allclose(
        second, [0.4 * 1.5 / math.sqrt(2), 0.4 * 2 / math.sqrt(8)], rtol=1e-6
    )


def test_fadas_slows_down_for_very_stale_buffers():
    rate = started(FADASMethod(adaptive_lr=0.4, delay_threshold=2)).rate
    assert [rate(0), rate(2), rate(3), rate(8)] == [0.4, 0.4, 1 / 3, 1 / 8]
    divided = started(FADASMethod(adaptive_lr=0.4, delay_threshold=2, delay_law="divide")).rate
    assert [divided(2), divided(4)] == [0.4, 0.1]
    small = started(FADASMethod(delay_threshold=2)).rate  # min(0.001, 1/8)
    assert small(8) == 0.001


def test_ace_by_hand():
    """N = 4, η = 1: h is a quarter of the sum of all that is remembered."""
    rule = started(ACEMethod())
    assert rule.add(make_update([4, 0], client=0)).tolist() == [1.0, 0.0]  # h = (1, 0)
    assert rule.add(make_update([0, 8], client=1)).tolist() == [2.0, 2.0]  # h = (1, 2)
    # Client 0 again: h = ((0, 4) + (0, 8)) / 4 = (0, 3).
    assert rule.add(make_update([0, 4], client=0)).tolist() == [2.0, 5.0]
    assert rule.version_report["effective_number"] == 2.0


def versioned(delta, client, start, now):
    return replace(make_update(delta, client=client, staleness=now - start), version=start)


def test_aced_by_hand():
    """Limit 2: what was trained from a version more than two ago does not count."""
    rule = started(ACEDMethod(age_limit=2))
    assert rule.add(versioned([4, 0], 0, start=0, now=0)).tolist() == [4.0, 0.0]
    # A = {0, 1}: the mean of (4, 0) and (0, 8).
    assert rule.add(versioned([0, 8], 1, start=1, now=1)).tolist() == [6.0, 4.0]
    # Client 2 from version 2; 0 is 3 - 0 > 2 versions old: A = {1, 2}.
    assert rule.add(versioned([2, 2], 2, start=2, now=3)).tolist() == [7.0, 9.0]
    # Client 3 is itself too old, 1 is 4 - 1 > 2: A = {2}.
    assert rule.state_weights == [1 / 2]
    assert rule.add(versioned([9, 9], 3, start=0, now=4)).tolist() == [9.0, 11.0]
    assert rule.state_weights == [0.0]
    assert rule.version_report == {"weights": [0.0], "effective_number": 1.0}
    # Nobody is left: the model stays.
    assert rule.add(versioned([9, 9], 3, start=4, now=9)).tolist() == [9.0, 11.0]
    assert rule.state_weights == [0.0]
    # Client 0 comes back: as if it had never been there.
    assert rule.add(versioned([1, 1], 0, start=10, now=10)).tolist() == [10.0, 12.0]
    assert rule.state_weights == [1.0]
    assert rule.total.tolist() == [1.0, 1.0]


def test_area_by_hand():
    """N = 4, K = 2, x0 = (4, 4): x is the mean of the four last models."""
    rule = started(AREAMethod(buffer_size=2), model=[4, 4])
    assert rule.add(make_update([4, 0], client=0, start=(4, 4))) is None  # y_0 = (8, 4)
    # y_1 = (4, 12): x = ((8, 4) + (4, 12) + (4, 4) + (4, 4)) / 4.
    assert rule.add(make_update([0, 8], client=1, start=(4, 4))).tolist() == [5.0, 6.0]
    rule.add(make_update([-1, -2], client=0, start=(5, 6)))  # y_0 = (4, 4)
    # Client 0 once more: y_0 = (8, 8).
    assert rule.add(make_update([3, 2], client=0, start=(5, 6))).tolist() == [5.0, 7.0]


def test_fedac_by_hand():
    """cos = 1, 0 and -1 give 1, 0.1 and 0.1."""
    rule = started(FedACMethod(buffer_size=3), model=[2, 0])
    assert rule.add(make_update([12, 0], start=(1, 0), staleness=1)) is None
    assert rule.report["similarity"] == 1.0
    rule.add(make_update([0, 12], start=(0, 0), staleness=1))
    model = rule.add(make_update([-12, 0], start=(1, 0), staleness=1))
    # ((1, 0) · 12 + 0.1 (0, 12) + 0.1 (-12, 0)) / 1.2
    np.testing.assert_allclose(model, [2 + 9, 1], rtol=1e-6)
    # Not stale: no direction, the smallest weight, alike for all.
    for _ in range(3):
        model = rule.add(make_update([3, 3], start=model))
    np.testing.assert_allclose(model, [14, 4], rtol=1e-6)


def test_rescaled_by_hand():
    rule = started(RescaledMethod(buffer_size=2))

    def timed(delta, time):
        return replace(make_update(delta), response_time=time)

    rule.add(timed([4, 0], 10.0))
    # Mean time 20: weights 10/20 and 30/20, halved.
    assert rule.add(timed([0, 4], 30.0)).tolist() == [1.0, 3.0]
    rule.add(timed([2, 0], 20.0))
    # Mean of all four 30: 20/30 and 60/30, halved.
    np.testing.assert_allclose(rule.add(timed([0, 2], 60.0)), [1 + 2 / 3, 3 + 2], rtol=1e-6)
    instant = started(RescaledMethod(buffer_size=1))
    assert instant.add(timed([1, 2], 0.0)).tolist() == [1.0, 2.0]


def test_the_cosine_of_long_vectors():
    a = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
    b = np.roll(a, 1)
    assert cosine_of(a, a) == 1.0
    assert cosine_of(a, -a) == -1.0
    assert cosine_of(a, np.zeros_like(a)) == 0.0
    expected = np.dot(a.astype(float), b) / np.dot(a.astype(float), a)
    assert cosine_of(a, b) == pytest.approx(expected, abs=1e-12)


def behaviour(message):
    rng = np.random.default_rng(message.content["config"]["seed"])
    return update(rng.normal(size=2) - 0.1 * message.content["arrays"]["w"].numpy())


def test_rescaled_steps_know_how_long_a_task_took():
    clock = virtual(6, UniformLatency(seed=2))
    strategy = strategy_of(RescaledMethod)(buffer_size=2, max_in_flight=3, seed=5, **clock)
    recorder = recorded(strategy, ScriptedGrid(6, behaviour), num_versions=12)
    sent = {event.sequence: event.time for event in recorder.of("dispatch")}
    uploads = recorder.of("upload")
    times = [event.time - sent[event.sequence] for event in uploads]
    versions = recorder.of("aggregate")
    for number, version in enumerate(versions):
        so_far = times[: 2 * number + 2]
        mean = sum(so_far) / len(so_far)
        expected = [time / mean / 2 for time in so_far[-2:]]
        assert version.report["weights"] == pytest.approx(expected)


# --- A threshold on staleness ------------------------------------------------------------------


def test_stale_updates_are_ignored_and_are_nobodys_failure():
    def run_with(limit):
        grid = ScriptedGrid(6, behaviour)
        strategy = FedBuff(
            buffer_size=1,
            max_in_flight=5,
            callbacks=[StalenessLimit(limit)],
            failures=Failures(max_failures=1),
            **virtual(6, UniformLatency(low=1, high=50, seed=3)),
        )
        return recorded(strategy, grid, num_versions=30, arrays=model_arrays([1.0, 2.0]))

    recorder = run_with(2)
    rejected = recorder.of("reject")
    assert rejected
    assert {event.reason for event in rejected} == {"staler than allowed: 2 versions or more"}
    assert recorder.of("quarantine") == []
    assert max(event.staleness for event in recorder.of("upload")) == 1
    assert run_with(100).of("reject") == []
    with pytest.raises(ValueError, match="limit"):
        StalenessLimit(0)


# --- Number formats ----------------------------------------------------------------------------


def test_an_update_that_is_not_stale_has_no_direction_in_float16_either():
    """What a client is sent differs from x by rounding, which is no direction of the model."""
    grid = ScriptedGrid(2, lambda message: update([1e-3, 0.0], dtype=np.float16))
    strategy = strategy_of(FedACMethod)(buffer_size=1, max_in_flight=1, **virtual(2))
    recorder = recorded(strategy, grid, num_versions=6, arrays=model_arrays([1.0, 2.0], np.float16))
    similarities = [event.report["similarity"] for event in recorder.of("upload")]
    assert {event.staleness for event in recorder.of("upload")} == {0}
    assert similarities == [0.0] * 6
