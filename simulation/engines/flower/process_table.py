"""Find the processes of a launch, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import psutil

_PATIENCE = 10.0  # seconds after the first SIGKILL before giving up


@dataclass(frozen=True)
class Process:
    """One process; its handle differs from that of a later one with the same id."""

    handle: psutil.Process
    # What may change while it lives does not identify it.
    parent: int = field(compare=False)
    session: int = field(compare=False)
    zombie: bool = field(compare=False)

    @property
    def pid(self) -> int:
        """The id that the system gave it."""
        return int(self.handle.pid)


def list_processes() -> list[Process]:
    """Return every process that the system shows us."""
    found = []
    for handle in _handles():
        # It may end while we are looking.
        with contextlib.suppress(psutil.Error, ProcessLookupError), handle.oneshot():
            zombie = handle.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            found.append(Process(handle, handle.ppid(), _session(handle.pid), zombie))
    return found


def _handles() -> Iterator[psutil.Process]:
    # Not psutil.process_iter: it keeps handles, and takes a new process with an old id for the old.
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except PermissionError:  # a process of somebody else, on systems that keep this to themselves
        return 0


def pids_with_variable(variable: str, value: str) -> set[int]:
    """Return the processes that were started with this environment variable.

    Those whose variables the system does not show us are left out.
    """
    found = set()
    for handle in _handles():
        with contextlib.suppress(psutil.Error, OSError):
            if handle.environ().get(variable) == value:
                found.add(handle.pid)
    return found


def find_launched(
    variable: str,
    value: str,
    roots: Collection[int] = (),
    known: Collection[Process] = (),
) -> set[Process]:
    """Return the processes of a launch, those that ended and wait to be collected included.

    These are the processes that carry the variable, the roots (which the launch started itself,
    each the leader of its own session), those known from before (whose parents may have ended
    since), all that share a session with one of these, and all their descendants; never this
    process itself.
    """
    carriers = pids_with_variable(variable, value)
    table = list_processes()
    me = os.getpid()
    found = {p for p in table if p.pid in carriers or p.pid in roots or p in known}
    while True:
        pids = {p.pid for p in found} - {me}
        sessions = {p.session for p in found} | set(roots)
        sessions -= {p.session for p in table if p.pid == me}
        related = {p for p in table if p.parent in pids or p.session in sessions}
        if related <= found:
            return {p for p in found if p.pid != me}
        found |= related


def end_processes(
    find: Callable[[], set[Process]],
    *,
    grace: float,
    hurry: Callable[[], bool] = lambda: False,
) -> set[Process]:
    """Ask processes to end, then make them end, until none is found any more; return the survivors.

    Parameters
    ----------
    find : Callable[[], set[Process]]
        Called again and again: a process that is ending may still start others.
    grace : float
        Seconds between SIGTERM and SIGKILL.
    hurry : Callable[[], bool] (default: never)
        Cuts the grace time short as soon as it returns True.
    """
    kill_at = time.monotonic() + grace
    give_up_at = kill_at + _PATIENCE
    asked: set[Process] = set()
    while alive := {process for process in find() if not process.zombie}:
        now = time.monotonic()
        if now >= give_up_at:
            break
        if now >= kill_at or hurry():
            _send(signal.SIGKILL, alive)
        elif new := alive - asked:
            _send(signal.SIGTERM, new)
            # A stopped process only sees the request once it continues.
            _send(signal.SIGCONT, new)
            asked |= new
        time.sleep(0.05)
    return alive


def _send(number: int, processes: Iterable[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
