"""Find the processes of a launch, wherever they have gone, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").exists()


@dataclass(frozen=True)
class Process:
    """One process; the start time tells it from a later one with the same id."""

    pid: int
    started: int
    # What may change while it lives is no part of what it is.
    parent: int = field(compare=False)
    session: int = field(compare=False)
    zombie: bool = field(compare=False)


def list_processes() -> list[Process]:
    """Return every process that the system shows us."""
    return _list_from_proc() if HAS_PROC else _list_from_ps()


def _list_from_proc() -> list[Process]:
    processes = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            text = (_PROC / entry.name / "stat").read_text(errors="replace")
        except OSError:  # it ended while we were looking
            continue
        # The name, in parentheses, may itself contain spaces and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        processes.append(
            Process(
                pid=int(entry.name),
                started=int(fields[19]),
                parent=int(fields[1]),
                session=int(fields[3]),
                zombie=fields[0] in "ZX",
            )
        )
    return processes


def _list_from_ps() -> list[Process]:
    # Not every ps knows sessions; the process group is the next best thing.
    output = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, check=False
    ).stdout
    processes = []
    for line in output.splitlines():
        pid, parent, group, state = line.split(maxsplit=3)
        processes.append(Process(int(pid), 0, int(parent), int(group), state.startswith("Z")))
    return processes


def pids_with_variable(variable: str, value: str) -> set[int]:
    """Return the processes that were started with this environment variable.

    Only Linux shows other processes' variables; elsewhere the answer is empty.
    """
    if not HAS_PROC:
        return set()
    wanted = f"{variable}={value}".encode()
    found = set()
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (_PROC / entry.name / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def find_launched(
    variable: str,
    value: str,
    roots: Collection[int] = (),
    known: Collection[Process] = (),
) -> set[Process]:
    """Return the processes of a launch, those that ended and wait to be collected included.

    These are the processes that carry the variable, the roots, the known ones, all that share
    a session with one of these, and all their descendants; never this process itself.

    Parameters
    ----------
    variable, value : str
        The environment variable that the launch gave to its processes.
    roots : Collection[int] (default: ())
        Processes that the launch started itself, each the leader of its own session.
    known : Collection[Process] (default: ())
        Processes that were found before, whose parents may have ended since.
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
    patience: float = 10.0,
) -> set[Process]:
    """Ask processes to end, then make them end, until none is found any more.

    Parameters
    ----------
    find : Callable[[], set[Process]]
        Called again and again: a process that is ending may still start others.
    grace : float
        Seconds between SIGTERM and SIGKILL.
    hurry : Callable[[], bool] (default: never)
        Cuts the grace time short as soon as it returns True.
    patience : float (default: 10.0)
        Seconds after the first SIGKILL before giving up.

    Returns
    -------
    set[Process]
        The survivors: empty unless the system does not let us end them.
    """
    kill_at = time.monotonic() + grace
    give_up_at = kill_at + patience
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
