"""Signals that end programs become a wish to stop, which the run grants after its current step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

_NUMBERS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_DEAF_SECONDS = 0.5  # after which a main thread that has not heard of a signal is woken
_NOTICE = b"Stopping after the current step; a second signal does not wait for it.\n"


class StopSignals:
    """While the block runs, the first SIGINT, SIGTERM or SIGHUP only asks the run to stop.

    A second one, or the end of the patience (in seconds; None: no end), raises `SystemExit` where
    the run is. In any case the handler that was there before gets the signal after the block,
    so that the program ends as it would have; not earlier, because Flower's ends the process after
    5 s, and talks to the SuperLink first. Signals that are ignored stay ignored. In another thread
    than the main one nothing happens.

    Python's handlers run in the main thread, but a signal that another thread raised, as Flower's
    does when the SuperLink is gone, does not wake a main thread that waits for a lock: it may wait
    there for an answer that never comes. Whoever has not heard of a signal is therefore woken.
    """

    def __init__(self, patience: float | None = None) -> None:
        self.patience = patience
        self._received: int | None = None
        self._forced: SystemExit | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._pipe: int | None = None
        self._pipe_before = -1

    def requested(self) -> bool:
        """Return whether a signal has come."""
        return self._received is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
            if self._before and hasattr(signal, "pthread_kill"):
                self._listen()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self._restore()
        if self._received is None or error is not self._forced:
            return
        handler = self._before[self._received]
        if callable(handler):
            handler(self._received, None)
        elif error is None:  # the default would end the process on the spot, with its files open
            raise SystemExit(128 + self._received)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            self._forced = SystemExit(128 + number)
            raise self._forced
        self._received = number
        # Not logged: a signal may come in the middle of a log line.
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)
        if self.patience is not None:
            self._timer = threading.Timer(self.patience, os.kill, (os.getpid(), number))
            self._timer.daemon = True
            self._timer.start()

    def _listen(self) -> None:
        """Have a thread told of every signal, whichever thread it was given to."""
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        main = threading.get_ident()
        threading.Thread(target=self._wake, args=(reader, main), daemon=True).start()

    def _wake(self, reader: int, main: int) -> None:
        with open(reader, "rb", buffering=0) as signals:
            while number := signals.read(1):
                time.sleep(_DEAF_SECONDS)
                if self._received is None and number[0] in self._before:
                    signal.pthread_kill(main, number[0])

    def _restore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pipe is not None:
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe)
        for number, handler in self._before.items():
            signal.signal(number, handler)
