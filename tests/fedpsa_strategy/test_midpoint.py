"""Midpoint against sequences worked out by hand, against CA2FL, and on the loop."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpsa_strategy import ConstantLatency, Midpoint
from fedpsa_strategy.methods.base import Given
from fedpsa_strategy.methods.ca2fl import CA2FLMethod
from fedpsa_strategy.methods.midpoint import MidpointMethod
from fedpsa_strategy.methods.remembering import HalfMemory
from support.grids import ScriptedGrid, model_arrays, update
from support.runs import Recorder, run, virtual
from support.updates import ZERO, make_update

PLAIN = {"step_limit": 0.0, "buffer_size": 2, "fit_memory": False}


def started(num_clients=4, **own):
    rule = MidpointMethod(**{**PLAIN, **own}).make_rule(Given(num_clients))
    rule.start(ZERO)
    return rule


@pytest.mark.parametrize("memory", ["ram", "half"])
def test_midpoint_by_hand_over_three_versions(memory):
    """K = 2, θ = ½, p = 1, h over the clients seen; all numbers are exact in half precision too."""
    rule = started(memory=memory)
    assert rule.start_for(0).tolist() == [0.0, 0.0]
    # Version 1: nothing remembered: d = 0 + ((4, 0) + (0, 8)) / 2 = (2, 4).
    assert rule.add(make_update([4, 0], client=0)) is None
    # Within the buffer client 0 starts behind already: 0 - ½ (4, 0).
    assert rule.start_for(0).tolist() == [-2.0, 0.0]
    assert rule.add(make_update([0, 8], client=1)).tolist() == [2.0, 4.0]
    assert rule.start_for(0).tolist() == [0.0, 4.0]  # (2, 4) - ½ (4, 0)
    assert rule.start_for(1).tolist() == [2.0, 0.0]  # (2, 4) - ½ (0, 8)
    assert rule.start_for(2).tolist() == [2.0, 4.0]  # never seen
    # h = ((4, 0) + (0, 8)) / 2 = (2, 4): over the two that were seen.
    # Version 2: client 0: (8, 0) - (4, 0); client 2 new: (2, 2).
    # d = (2, 4) + ((4, 0) + (2, 2)) / 2 = (5, 5).
    rule.add(make_update([8, 0], client=0))
    assert rule.add(make_update([2, 2], client=2)).tolist() == [7.0, 9.0]
    # h = ((8, 0) + (0, 8) + (2, 2)) / 3; version 3: client 1 twice:
    # r = ((0, 2) - (0, 8)) + ((6, 0) - (0, 2)) = (6, -8);
    # d = (10/3 + 3, 10/3 - 4).
    rule.add(make_update([0, 2], client=1))
    model = rule.add(make_update([6, 0], client=1))
    np.testing.assert_allclose(model, [7 + 10 / 3 + 3, 9 + 10 / 3 - 4], rtol=1e-6)
    assert rule.start_for(1).tolist() == (model - np.float32([3, 0])).tolist()


@pytest.mark.parametrize("memory", ["ram", "half"])
def test_what_clients_repeat_is_fitted_by_hand(memory):
    """K = 2, θ = ½, p = 1: β is 0 in the first two versions, ½ in the third."""
    rule = started(memory=memory, fit_memory=True)
    rule.add(make_update([4, 0], client=0))
    assert rule.add(make_update([0, 8], client=1)).tolist() == [2.0, 4.0]
    assert rule.expected == 0.0  # nobody has been seen twice
    assert rule.start_for(0) is rule.model
    # Version 2 is the mean of its updates: (1, 3). Δ·h = 8 and 32, h·h = 16 and 64.
    rule.add(make_update([2, 2], client=0))
    assert rule.add(make_update([0, 4], client=1)).tolist() == [3.0, 7.0]
    assert rule.version_report["expected"] == 0.0
    assert rule.expected == 0.5
    assert rule.start_for(0).tolist() == [2.5, 6.5]  # (3, 7) - ½ ½ (2, 2)
    assert rule.start_for(1).tolist() == [3.0, 6.0]
    # Version 3: (3, 1) - ½ (2, 2) and (2, 2): d = ½ (1, 3) + (4, 2) / 2.
    rule.add(make_update([3, 1], client=0))
    assert rule.add(make_update([2, 2], client=2)).tolist() == [5.5, 9.5]
    assert rule.version_report["expected"] == 0.5
    assert rule.expected == 48 / 88


def test_what_clients_are_expected_to_repeat_is_between_nothing_and_all_of_it():
    def after(delta):
        rule = started(fit_memory=True, buffer_size=1)
        rule.add(make_update([1, 1], client=0))
        rule.add(make_update(delta, client=0))
        return rule.expected

    assert after([3, 3]) == 1.0
    assert after([-1, -1]) == 0.0
    assert after([1, -1]) == 0.0

    silent = started(fit_memory=True, buffer_size=1)
    for _ in range(3):
        silent.add(make_update([0, 0], client=0))
    assert silent.expected == 0.0


def test_the_step_falls_with_staleness():
    """c = 2: p = min(1, 2 / (1 + mean τ)), τ averaged over all uploads so far."""
    rule = started(step_limit=2.0)
    rule.add(make_update([4, 0], client=0, staleness=0))
    # mean τ = 1: p = 1.
    assert rule.add(make_update([0, 4], client=1, staleness=2)).tolist() == [2.0, 2.0]
    rule.add(make_update([4, 0], client=0, staleness=5))
    # mean τ = 14/4: p = 2 / 4.5; the residuals are 0: d = h = (2, 2).
    model = rule.add(make_update([0, 4], client=1, staleness=7))
    np.testing.assert_allclose(model, [2 + 2 * 2 / 4.5] * 2, rtol=1e-6)
    assert rule.version_report["step"] == pytest.approx(2 / 4.5)


def test_slow_momentum_by_hand():
    """p = ½, b = 2, w = 4: m <- m + (d - m)/4; x <- x + d/2 + 2m."""
    own = {"server_lr": 0.5, "momentum": 2.0, "momentum_window": 4, "buffer_size": 1}
    rule = started(**own)
    # d = (4, 0): m = (1, 0), x = (2, 0) + (2, 0).
    assert rule.add(make_update([4, 0], client=0)).tolist() == [4.0, 0.0]
    # h = (4, 0), residual (4, 8): d = (8, 8): m = (1 + 7/4, 2), x = (4, 0) + (4, 4) + (5.5, 4).
    assert rule.add(make_update([8, 8], client=0)).tolist() == [13.5, 8.0]


def test_the_shift_grows_as_updates_shrink(monkeypatch):
    monkeypatch.setattr("fedpsa_strategy.methods.midpoint._WINDOW", 2)
    rule = started(shift_grows=True)
    rule.add(make_update([2, 0], client=0))
    assert rule.start_for(0).tolist() == [0.0, 0.0]  # no reference yet
    rule.add(make_update([2, 0], client=1))  # M0 = 4
    assert rule.shift == 0.0
    rule.add(make_update([0, 0], client=1))  # M = 2: θ = ½ (1 - ½)
    assert rule.shift == 0.25
    np.testing.assert_allclose(rule.start_for(0), [2 - 0.25 * 2, 0])
    rule.add(make_update([4, 0], client=0))  # M = 8: never below 0
    assert rule.shift == 0.0


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), size=st.integers(1, 4))
def test_without_shift_and_limit_it_is_ca2fl_bit_for_bit(seed, size):
    rng = np.random.default_rng(seed)
    same = {"shift": 0.0, "step_limit": 0.0, "remembered_over": "all", "buffer_size": size}
    ours = MidpointMethod(**same, fit_memory=False).make_rule(Given(5))
    theirs = CA2FLMethod(buffer_size=size).make_rule(Given(5))
    start = rng.normal(size=7).astype(np.float32)
    ours.start(start)
    theirs.start(start)
    for _ in range(40):
        client = int(rng.integers(5))
        item = make_update(rng.normal(size=7), client=client, staleness=int(rng.integers(9)))
        a, b = ours.add(item), theirs.add(item)
        assert (a is None) == (b is None)
        assert ours.model.tobytes() == theirs.model.tobytes()
        assert ours.start_for(client) is ours.model


@pytest.mark.parametrize(
    "own",
    [{}, {"fit_memory": True}, {"momentum": 0.5}, {"shift_grows": True}, {"memory": "half"}],
)
def test_state_dict_round_trip_continues_bit_for_bit(own):
    rng = np.random.default_rng(0)
    items = [
        make_update(rng.normal(size=2), client=int(rng.integers(4)), staleness=i % 5)
        for i in range(160)
    ]
    straight, first = started(**own), started(**own)
    second = MidpointMethod(**{**PLAIN, **own}).make_rule(Given(4))
    for item in items:
        straight.add(item)
    for item in items[:111]:
        first.add(item)
    second.load_state_dict(first.state_dict())
    for item in items[111:]:
        second.add(item)
    assert straight.model.tobytes() == second.model.tobytes()
    for client in range(4):
        assert straight.start_for(client).tobytes() == second.start_for(client).tobytes()


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
def test_half_precision_keeps_eleven_bits_and_what_it_has_once_rounded(vector):
    memory = HalfMemory()
    memory[3] = vector
    once = memory[3]
    assert once.dtype == np.float32
    # The largest entry has 11 bits; all others are off by no more than it is.
    np.testing.assert_allclose(once, vector, rtol=0, atol=float(np.abs(vector).max()) * 2.0**-11)
    memory[3] = once
    assert memory[3].tobytes() == once.tobytes()


def test_half_precision_ends_near_full_precision_and_its_sum_does_not_drift():
    rng = np.random.default_rng(1)
    full, half = started(), started(memory="half")
    for _ in range(400):
        item = make_update(rng.normal(size=2), client=int(rng.integers(4)))
        full.add(item)
        half.add(item)
    np.testing.assert_allclose(half.total, sum(half.memory.values()), atol=1e-5)
    np.testing.assert_allclose(half.model, full.model, atol=0.2)


def test_every_update_is_against_the_start_that_was_sent():
    """Clients send whole models: Δ = ones only if the server subtracts the start it sent."""
    recorder, seen = Recorder(), []

    def behaviour(message):
        content = update(message.content["arrays"]["w"].numpy() + np.float32(1.0))
        del content["fedpsa"]
        return content

    class Noting(ScriptedGrid):
        def push_messages(self, messages):
            found = list(messages)
            seen.extend(m.content["arrays"]["w"].numpy() for m in found if "arrays" in m.content)
            return super().push_messages(found)

    strategy = Midpoint(
        buffer_size=2,
        step_limit=0.0,
        fit_memory=False,
        max_in_flight=2,
        listeners=[recorder],
        **virtual(3, ConstantLatency(1.0)),
    )
    result = run(strategy, Noting(3, behaviour), num_versions=6, arrays=model_arrays([0.0, 0.0]))
    assert all(event.squared_norm == pytest.approx(2.0) for event in recorder.of("upload"))
    # Every Δ is (1, 1): every version moves by one, and by ½ more when client 2 is new, whose
    # residual is its whole update.
    assert result.arrays["w"].numpy().tolist() == [6.5, 6.5]
    starts = {float(start[0]) for start in seen}
    assert len(starts) == 6
    assert {0.5, 2.0, 3.0} <= starts  # ½ behind 1, 2.5 and 3.5


def test_what_a_setting_does_not_do_is_said():
    assert MidpointMethod(shift=0.0).unread() == {
        "shift-grows": "shift is 0",
        "momentum-window": "momentum is 0",
    }
    assert MidpointMethod(momentum=1.5).unread() == {}
    with pytest.raises(ValueError, match="shift"):
        replace(MidpointMethod(), shift=1.5)
