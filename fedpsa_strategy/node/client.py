"""A child of the warm process becomes what Flower wanted to start."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fedpsa_strategy.node.front import PROTOCOL, RUN
from fedpsa_strategy.node.preloaded import Preloaded
from fedpsa_strategy.node.settings import say

_REQUEST_SECONDS = 10.0


def become(
    connection: socket.socket,
    script: str,
    libraries: Preloaded,
    known: set[str],
    refusal: str = "",
) -> CodeType:
    """Take over from the process at the other end, and return the program that it wanted.

    That is `script`, the ordinary ``flwr-clientapp``. The `libraries` were imported before the
    fork; `known` are the modules that the script itself imports before any app. With a `refusal`,
    the text of why, the other end has to start the ordinary way.
    """
    try:
        request, descriptors = _receive(connection)
        if request["protocol"] != PROTOCOL:
            refusal = "the warm process is of another version of this library"
        if refusal:
            _answer(connection, {"refused": refusal})
            os._exit(0)
        _answer(connection, {"started": os.getpid()})
        # Whoever has waited too long has gone, and started the ordinary way.
        if connection.recv(1) != bytes([RUN]):
            os._exit(0)
    except (OSError, ValueError, LookupError, TypeError):
        os._exit(1)
    _take_over(request, descriptors)
    # Its only other sign of being what it is; the command line is that of the warm process.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(Path(script).name, encoding="utf-8")
    threading.Thread(target=_obey, args=[connection], name="fedpsa-node", daemon=True).start()
    _reseed()
    sys.argv = [script, *request["arguments"]]
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    libraries.hide(known)
    importlib.invalidate_caches()
    if os.environ.get("FLWR_LOG_LEVEL", "").upper() == "DEBUG":
        say(f"started in {time.time() - request['sent']:.3f} s as process {os.getpid()}")
    return compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(_REQUEST_SECONDS)
    length = int.from_bytes(_read_exactly(connection, 4), "big")
    first, descriptors, _, _ = socket.recv_fds(connection, min(length, 65536), 4)
    rest = _read_exactly(connection, length - len(first))
    return json.loads(first + rest), descriptors


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        chunk = connection.recv(length - len(found))
        if not chunk:
            raise ConnectionError("closed")
        found += chunk
    return bytes(found)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Get the standard streams, folder and environment of the process at the other end."""
    *streams, folder = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.fchdir(folder)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])


def _obey(connection: socket.socket) -> None:
    """Do to this process what is done to the one at the other end."""
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        while byte := connection.recv(1):
            os.kill(os.getpid(), byte[0])
    os.kill(os.getpid(), signal.SIGKILL)


def _reseed() -> None:
    """Give this process random numbers of its own; Python does so for its own generator alone."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
