import logging

import pytest

from fedpsa_strategy.server.events import Waiting
from fedpsa_strategy.watch.curve import draw_curves
from fedpsa_strategy.watch.rate import rate_text
from fedpsa_strategy.watch.run_state import area_under_curve
from fedpsa_strategy.watch.status_line import Limits, StatusLine
from support.events import aggregated, evaluated, started, uploaded
from support.grids import FakeTime


def test_the_status_line_shows_what_happened_every_few_seconds(caplog):
    caplog.set_level(logging.INFO, "flwr")
    clock = FakeTime()
    status = StatusLine(3.0, True, Limits(versions=4), clock.monotonic)
    status(started())
    status(uploaded(8640.0, staleness=1, kappa=0.5, temperature=2.5))
    status(uploaded(8640.0, staleness=2, kappa=0.7, temperature=2.5))
    status(aggregated(8640.0, 1, 2, effective_number=1.5))
    clock.now = 4.0
    status(evaluated(8640.0, uploads=2, accuracy=0.625, loss=1.0))
    line = caplog.messages[-1]
    for part in (
        "day 0.100",
        "version 1",
        "uploads 2",
        "accuracy 62.5%",
        "temp 2.500",
        "κ 0.600",
        "staleness 1.500",
        "rejected 0",
        "0.5 uploads/s",
        "12s left",
    ):
        assert part in line
    lines = len(caplog.messages)
    status(uploaded(8650.0, staleness=1, kappa=0.5, temperature=2.5))
    assert len(caplog.messages) == lines  # not before the interval is over
    assert status.run.mean("staleness") == pytest.approx(4 / 3)
    assert status.run.mean("effective_number") == 1.5
    assert status.run.bytes_up == 300


def test_a_task_without_accuracy_shows_its_loss():
    status = StatusLine(3.0, True, monotonic=FakeTime().monotonic)
    assert "accuracy -" in status.line()
    for time, loss in ((0.0, 2.0), (60.0, 0.12345)):
        status(evaluated(time, version=0, uploads=0, loss=loss))
    assert "| loss 0.123 |" in status.line()
    assert status.run.losses == [(0.0, 2.0), (60.0, 0.12345)]
    assert status.run.curve == []


def test_waiting_is_visible_before_the_first_upload(caplog):
    caplog.set_level(logging.INFO, "flwr")
    clock = FakeTime()
    status = StatusLine(3.0, False, monotonic=clock.monotonic)
    clock.now = 5.0
    status(Waiting(time=0.0, reason="3 of 4 nodes connected"))
    assert caplog.messages == ["waiting: 3 of 4 nodes connected"]


def test_the_time_left_after_a_resume_is_that_of_what_is_left():
    clock = FakeTime()
    status = StatusLine(3.0, True, Limits(versions=100, time=1000.0), clock.monotonic)
    # An hour ago, in another process, of which half the events are lost.
    status.replay(
        [
            started(),
            uploaded(400.0),
            aggregated(400.0, 40, 1),
        ]
    )
    status(started(time=500.0, version=50, uploads=7, rejected=3))
    assert (status.run.version, status.run.uploads, status.run.rejected) == (50, 7, 3)
    assert status.seconds_left is None
    assert "? left" in status.line()
    clock.now = 10.0
    status(aggregated(550.0, 51, 9))
    # 10 s for a version of 50, and for 50 of 500 units of time, which end the run first.
    assert status.seconds_left == pytest.approx(90.0)
    assert "2min left" in status.line()
    status = StatusLine(3.0, True, Limits(versions=100, seconds=30.0), clock.monotonic)
    status(started(version=50))
    clock.now = 25.0
    assert status.seconds_left == 15.0


def test_area_under_the_curve():
    assert area_under_curve([(0.0, 0.0), (2.0, 1.0), (4.0, 1.0)]) == 3.0
    assert area_under_curve([(0.0, 0.5)]) is None


def test_the_picture_is_a_png_also_of_an_empty_run():
    for curve in ([], [(0.0, 0.1), (86_400.0, 0.9)]):
        for measure in ("accuracy", "loss"):
            picture = draw_curves({"": curve}, title="x", virtual=True, measure=measure)
            assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (None, "0.0 uploads/s"),
        (0.0, "0.0 uploads/s"),
        (151.62, "151.6 uploads/s"),
        (0.1, "0.1 uploads/s"),
        (0.0999, "6.0 uploads/min"),
        (1 / 60, "1.0 uploads/min"),
        (1 / 61, "59.0 uploads/h"),
        (1 / 7200, "0.5 uploads/h"),
    ],
)
def test_a_slow_rate_is_said_in_a_unit_that_can_be_read(per_second, text):
    assert rate_text(per_second) == text
