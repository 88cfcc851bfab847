"""Child processes that never outlive the launcher that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from simulation.engines.flower.guard import start_guard
from simulation.engines.flower.process_table import Process, end_processes, find_launched
from simulation.environment import TOKEN_VARIABLE

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Child:
    """A process of a `ProcessGroup`; its log gets all that it and its own children print."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    _read: int = field(default=0, repr=False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        return self.process.wait(timeout)

    def new_lines(self) -> list[str]:
        """Return the complete lines that were printed since the last call."""
        # Asked before reading: what a process that has ended printed is then all there.
        ended = not self.running
        with self.log_path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        end = len(text) if ended else text.rfind(b"\n") + 1
        self._read += end
        complete = text[:end].decode("utf-8", errors="replace")
        return complete.removesuffix("\n").split("\n") if complete else []

    def follow(self, timeout: float | None = None) -> Iterator[str]:
        """Yield lines as they are printed, until the process ends or the time has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            ended = not self.running
            yield from self.new_lines()
            if ended or (deadline is not None and time.monotonic() >= deadline):
                return
            time.sleep(0.1)

    def trim_log(self, limit: int = 64 * 2**20) -> None:
        """Start the log over when it has grown beyond the limit (in bytes).

        A SuperLink writes a line for every request, and a ServerApp may send fifty a second.
        """
        if self.log_path.stat().st_size > limit:
            os.truncate(self.log_path, 0)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that were printed."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


class ProcessGroup:
    """The processes of one launch, all ended when the ``with`` block is left.

    That holds for a normal end, an exception, SIGINT, SIGTERM and SIGHUP, and, through a guard
    process, for a launcher that is killed. It holds for grandchildren that left their process
    group too: on Linux all are known by an environment variable, and orphans become children of
    this process; elsewhere by their process group and their parents.

    While the block runs, SIGTERM and SIGHUP raise `SystemExit` (with the exit code a shell would
    show), unless the caller handles or ignores them. Signals during the clean-up itself only make
    it faster.

    Parameters
    ----------
    log_dir : Path
        Folder for the output of the processes.
    environment : Mapping[str, str]
        Their environment variables, among them the launch's `TOKEN_VARIABLE`.
    grace : float (default: 1.0)
        Seconds between SIGTERM and SIGKILL; may be changed later.
    folder : Path | None (default: None)
        A folder that the guard removes when the launcher is killed.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        environment: Mapping[str, str],
        grace: float = 1.0,
        folder: Path | None = None,
    ) -> None:
        self.log_dir = log_dir
        self.environment = dict(environment)
        self.token = self.environment[TOKEN_VARIABLE]
        self.grace = grace
        self.children: list[Child] = []
        self._folder = folder
        self._seen: set[Process] = set()
        self._hurry = threading.Event()
        self._guard: subprocess.Popen[bytes] | None = None
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> ProcessGroup:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as restore:
            restore.enter_context(_orphans_come_to_us())
            restore.enter_context(exit_on_signals())
            self._guard = start_guard(self.token, self._folder)
            self._restore = restore.pop_all()
        return self

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a command, looked up in the group's own ``PATH``, in a session of its own."""
        log_path = self.log_dir / f"{name}.log"
        log_path.unlink(missing_ok=True)
        # Appending, so that `Child.trim_log` can cut the file.
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        child = Child(name, process, log_path)
        self.children.append(child)
        return child

    def alive(self) -> set[Process]:
        """Return all living processes of the launch, descendants included."""
        roots = {child.pid for child in self.children}
        found = find_launched(TOKEN_VARIABLE, self.token, roots, self._seen)
        self._seen |= found
        # A process that ended stays in the table until its parent asks for its exit code, and
        # that parent is us for our children and for orphans.
        for child in self.children:
            child.process.poll()
        for process in found:
            if process.zombie and process.parent == os.getpid() and process.pid not in roots:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        return {process for process in found if not process.zombie}

    def __exit__(self, *_: object) -> None:
        with self._restore, _signal_handlers(self._set_hurry):
            survivors = end_processes(self.alive, grace=self.grace, hurry=self._hurry.is_set)
            self.alive()  # collects the exit codes of the last ones
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait()
        if survivors:
            pids = ", ".join(str(process.pid) for process in survivors)
            print(f"These processes could not be ended: {pids}", file=sys.stderr)

    def _set_hurry(self, _number: int, _frame: FrameType | None) -> None:
        self._hurry.set()


def exit_on_signals() -> contextlib.AbstractContextManager[None]:
    """Have SIGTERM and SIGHUP raise `SystemExit`, unless the caller handles or ignores them."""
    return _signal_handlers(_raise_exit, keep=(signal.SIGINT,))


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signal_handlers(handler: Any, keep: Sequence[signal.Signals] = ()) -> Iterator[None]:
    """Handle the signals that end programs, apart from those the caller already cares about."""
    previous: dict[signal.Signals, Any] = {}
    # Python delivers signals to the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            current = signal.getsignal(number)
            # An ignored SIGHUP, say, is intended: it was started with nohup.
            ours = current in (signal.SIG_DFL, signal.default_int_handler, _raise_exit)
            if number not in keep and ours:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


@contextlib.contextmanager
def _orphans_come_to_us() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent ends (Linux)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
