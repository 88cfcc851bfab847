import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpsa_strategy import (
    ConstantLatency,
    LongTailLatency,
    UniformLatency,
    VirtualClock,
    WallClock,
)
from fedpsa_strategy.seeds import derive, uniform


def test_derived_numbers_are_the_same_everywhere():
    # Golden values: a change here would change every run anybody has published.
    assert derive(0, "task", 0) == 6409692001836293751
    assert derive(1, "sample", 2, 3) == 4426747183966548576


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**9))
def test_derived_numbers_lie_in_range(seed, counter):
    assert 0 <= derive(seed, "x", counter) < 2**63
    assert 0 <= uniform(seed, "x", counter) < 1


def test_uniform_latency_covers_its_interval_evenly():
    latency = UniformLatency(seed=3, low=10, high=13)
    draws = [latency(client, 0) for client in range(4000)]
    assert set(draws) == {10.0, 11.0, 12.0, 13.0}
    for value in set(draws):
        assert draws.count(value) == pytest.approx(1000, abs=120)  # 4 standard deviations


def test_long_tail_latency_has_most_mass_near_the_lower_end():
    latency = LongTailLatency(seed=1, low=10, high=500)
    draws = sorted(latency(client, 0) for client in range(4000))
    assert min(draws) >= 10
    assert max(draws) <= 500
    assert draws[2000] < 30 < 255  # the median of a uniform law would be 255
    assert draws[-20] > 150


def test_latency_per_client_stays_and_per_task_changes():
    fixed, changing = UniformLatency(seed=0), UniformLatency(seed=0, per="task")
    assert len({fixed(7, sequence) for sequence in range(50)}) == 1
    assert len({changing(7, sequence) for sequence in range(50)}) > 30


def test_constant_latency():
    assert ConstantLatency(value=3.5)(1, 2) == 3.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: UniformLatency(low=0, high=5),
        lambda: UniformLatency(low=9, high=5),
        lambda: LongTailLatency(shape=0.0),
        lambda: ConstantLatency(value=0.0),
        lambda: ConstantLatency(per="week"),
    ],
)
def test_impossible_latencies_are_refused(make):
    with pytest.raises(ValueError, match=r"must be|need"):
        make()


def test_virtual_clock_does_not_go_back():
    clock = VirtualClock(ConstantLatency())
    clock.advance(5.0)
    assert clock.now == 5.0
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(4.0)


def test_wall_clock_counts_from_its_start():
    times = iter([100.0, 200.0, 203.5])
    clock = WallClock(lambda: next(times))
    clock.start(at=10.0)
    assert clock.now == 13.5


def test_a_wall_clock_that_is_held_stands_still():
    times = iter([100.0, 200.0, 203.5])
    clock = WallClock(lambda: next(times))
    clock.hold(at=10.0)
    assert clock.now == clock.now == 10.0
    clock.start(at=10.0)
    assert clock.now == 13.5
