"""The warm process: it imports what ClientApps need, once, and forks a child for each of them.

It never computes anything: a process that has used two threads of OpenMP makes its children hang
in theirs, and one that has touched CUDA or gRPC cannot be forked either.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from fedpsa_strategy.files import write_atomically
from fedpsa_strategy.node.client import become
from fedpsa_strategy.node.front import READY, STATE
from fedpsa_strategy.node.preloaded import Preloaded
from fedpsa_strategy.node.settings import PRELOAD_VARIABLE, NodeSettings, say

STALE = 75
"""Exit code: what was imported is no longer what is installed."""
CANNOT = 76
"""Exit code: there is nothing to be gained by another attempt."""

_DEFAULT_PRELOAD = ["torch"]


class Wakeups:
    """A file descriptor, `reader`, that can be read after a child has ended or a signal came."""

    def __init__(self) -> None:
        self.reader, self._write = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def drain(self) -> None:
        """Forget what has come so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        """Undo everything; for forked processes."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.reader)
        os.close(self._write)


def set_state(folder: Path, state: str) -> None:
    """Tell those who want to start a ClientApp what to expect."""
    if folder.is_dir():  # it is gone with the SuperNode, and must not be made again
        with contextlib.suppress(OSError):
            write_atomically(folder / STATE, state)


def serve(folder: Path, listener: socket.socket, lifeline: int, settings: NodeSettings) -> CodeType:
    """Import the libraries and fork until the SuperNode ends; returns in the children alone."""
    # Where a script finds modules first. (-P and PYTHONSAFEPATH: nowhere.)
    sys.path[:1] = [] if sys.flags.safe_path else [str(Path(settings.script).parent)]
    stamp = _environment_stamp(settings)
    started = time.monotonic()
    libraries, known = _import_all(settings)
    listener.setblocking(False)
    wakeups = Wakeups()
    children: dict[int, socket.socket] = {}
    refusal = ""
    gc.collect()
    gc.freeze()  # what never changes is not looked through, and so stays shared with the children
    set_state(folder, READY)
    say(f"warm after {time.monotonic() - started:.1f} s{_names(settings, ' with ')}")
    while not (refusal and not children):
        ready, _, _ = select.select([listener.fileno(), lifeline, wakeups.reader], [], [])
        if lifeline in ready:
            os._exit(0)
        if wakeups.reader in ready:
            wakeups.drain()
            _reap(children)
        if listener.fileno() not in ready:
            continue
        try:
            connection, _ = listener.accept()
        except OSError:  # whoever it was has gone again
            continue
        if stamp != _environment_stamp(settings):
            refusal = "the Python environment has changed; a new warm process starts"
        try:
            pid = os.fork()
        except OSError as error:
            say(f"no child process: {error}")
            connection.close()
            continue
        if pid == 0:
            wakeups.close()
            listener.close()
            os.close(lifeline)
            for other in children.values():
                other.close()
            return become(connection, settings.script, libraries, known, refusal)
        children[pid] = connection
    os._exit(STALE)


def _import_all(settings: NodeSettings) -> tuple[Preloaded, set[str]]:
    """Import Flower and the libraries; return these, and the names that came with Flower."""
    libraries = Preloaded()
    name = settings.own_module
    try:
        import_module(name)
        known = {module.partition(".")[0] for module in sys.modules} - {"fedpsa_strategy"}
        for name in _wanted(settings):
            libraries.load(name)
    except Exception as error:
        say(
            f"ClientApps start the ordinary way: preloading {name} failed:"
            f" {type(error).__name__}: {error}"
        )
        os._exit(CANNOT)
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        say(
            "ClientApps start the ordinary way: a preloaded library runs threads, which a child"
            f" would not have ({names}); leave it out of {PRELOAD_VARIABLE}"
        )
        os._exit(CANNOT)
    return libraries, known


def _wanted(settings: NodeSettings) -> list[str]:
    if settings.preload is None:
        return [name for name in _DEFAULT_PRELOAD if find_spec(name) is not None]
    return settings.preload


def _names(settings: NodeSettings, before: str) -> str:
    names = ", ".join(_wanted(settings))
    return before + names if names else ""


def _environment_stamp(settings: NodeSettings) -> list[tuple[str, int]]:
    """Return what changes when a package is installed, upgraded or removed."""
    places = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    stamp = []
    for place in [settings.script, *places]:
        with contextlib.suppress(OSError):
            stamp.append((place, Path(place).stat().st_mtime_ns))
    return stamp


def _reap(children: dict[int, socket.socket]) -> None:
    """Collect children that have ended, and tell their exit codes to who waits for them."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as connection, contextlib.suppress(OSError):
            answer = {"exit": os.waitstatus_to_exitcode(status)}
            connection.sendall(json.dumps(answer).encode() + b"\n")
