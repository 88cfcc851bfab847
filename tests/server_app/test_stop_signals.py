"""Signals ask a run to stop, and reach whom they were for in the end."""

import signal
import threading
import time

import pytest

from server_app.stopping import StopSignals


class OldHandlerError(Exception):
    """What the handler does that was there before."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request):
    """A signal with a handler that tells its number."""

    def handler(received, _frame):
        raise OldHandlerError(received)

    before = signal.signal(request.param, handler)
    yield request.param
    assert signal.getsignal(request.param) is handler
    signal.signal(request.param, before)


def run(*steps, patience=None):
    """Take the steps in a block, and return whether a stop was requested."""
    with StopSignals(patience) as signals:
        for step in steps:
            step()
    return signals.requested()


def test_the_first_signal_waits_for_the_end_of_the_block(number):
    seen = []

    def block():
        with StopSignals() as signals:
            seen.append(signals.requested())
            signal.raise_signal(number)
            seen.append(signals.requested())

    with pytest.raises(OldHandlerError, match=str(int(number))):
        block()
    assert seen == [False, True]


def test_the_second_signal_does_not_wait(number):
    done = []
    send = lambda: signal.raise_signal(number)  # noqa: E731
    with pytest.raises(OldHandlerError):
        run(send, send, lambda: done.append("the rest"))
    assert not done


def test_who_is_interrupted_has_done_what_it_wanted_before_others_hear_of_it(number):
    seen = []

    def stubborn():
        try:
            threading.Event().wait()
        except SystemExit:
            seen.append("saved")
            raise

    with pytest.raises(OldHandlerError):
        run(lambda: signal.raise_signal(number), stubborn, patience=0.05)
    assert seen == ["saved"]


def test_who_waits_too_long_is_interrupted_where_it_waits(number):
    with pytest.raises(OldHandlerError):
        run(lambda: signal.raise_signal(number), threading.Event().wait, patience=0.05)


def test_a_signal_for_another_thread_reaches_who_waits_for_a_lock(number):
    lock = threading.Lock()

    def wait():
        threading.Thread(target=signal.raise_signal, args=(number,)).start()
        lock.acquire()  # nobody will ever release it

    lock.acquire()
    with pytest.raises(OldHandlerError):
        run(wait, patience=0.1)


def test_who_ends_in_time_hears_no_more_of_it(number):
    with pytest.raises(OldHandlerError):
        run(lambda: signal.raise_signal(number), patience=0.05)
    time.sleep(0.2)  # a timer that still ran would raise here


def test_an_error_of_the_block_goes_before_the_signal(number):
    with pytest.raises(ZeroDivisionError):
        run(lambda: signal.raise_signal(number), lambda: 1 / 0)


def test_where_nobody_handles_the_signal_the_program_exits_in_good_order():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            run(lambda: signal.raise_signal(signal.SIGTERM))
        assert caught.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(lambda: signal.raise_signal(signal.SIGHUP)) is False
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_other_threads_nothing_changes(number):
    handlers = []
    before = signal.getsignal(number)
    step = lambda: handlers.append(signal.getsignal(number))  # noqa: E731
    thread = threading.Thread(target=run, args=(step,))
    thread.start()
    thread.join()
    assert handlers == [before]
