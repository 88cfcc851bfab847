"""The first of the two warm processes: it starts the other one again if it dies, and cleans up.

It imports nothing beyond the standard library, and ends with the SuperNode. That shows on the
lifeline: a pipe whose other end only the SuperNode has, so that it closes however that ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from types import CodeType
from typing import NoReturn

from fedpsa_strategy.node.front import DOWN, STARTING
from fedpsa_strategy.node.server import CANNOT, STALE, Wakeups, serve, set_state
from fedpsa_strategy.node.settings import NodeSettings, say

_LONGEST_PAUSE = 60.0


def keep(folder: Path, listener: socket.socket, lifeline: int) -> CodeType:
    """Keep a warm process running until the SuperNode ends, which makes `lifeline` readable.

    Returns only in the children of that process: the program to run there. Who wants to start a
    ClientApp connects to `listener`. The node's folder is removed in the end.
    """
    settings = NodeSettings.read(folder)
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    wakeups = Wakeups()

    def over(timeout: float | None = None) -> bool:
        """Wait until something happens, and return whether that is the end."""
        ready, _, _ = select.select([lifeline, wakeups.reader], [], [], timeout)
        wakeups.drain()
        return lifeline in ready or bool(asked)

    pause = 0.0
    while True:
        set_state(folder, STARTING)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            wakeups.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            return serve(folder, listener, lifeline, settings)
        while (code := _exit_code(pid)) is None:
            if over():
                os.kill(pid, signal.SIGKILL)
                _end(folder)
        if code == CANNOT:
            set_state(folder, DOWN)
            listener.close()
            while not over():
                pass
            _end(folder)
        if code != STALE:
            lasted = time.monotonic() - started
            pause = 0.0 if lasted > _LONGEST_PAUSE else min(_LONGEST_PAUSE, 2 * pause + 1)
            say(f"the warm process ended (exit code {code}); a new one starts in {pause:g} s")
            set_state(folder, DOWN)
            if over(pause):
                _end(folder)


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _end(folder: Path) -> NoReturn:
    # What the warm process has forked ends as Flower's processes do.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
