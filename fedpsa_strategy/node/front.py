"""What Flower starts in place of ``flwr-clientapp``: it hands the start over to the warm process.

The warm process forks a child that takes over the arguments, environment, working directory and
standard streams of this process. This one stays until the child has ended, passes signals on to
it, and ends with its exit code; if this process is killed, the child kills itself. Whatever keeps
the child from starting, the ordinary ``flwr-clientapp`` starts in place of this process.

A child waits for the word to run, and this process gives it only once it is committed: nothing is
ever started twice.
"""

from __future__ import annotations

# Every import here is paid for every message.
import json
import os
import signal
import socket
import sys
import time
from typing import IO, Any, NoReturn

PROTOCOL = 1
"""Changes with what the two sides say to each other."""

STATE = "state"
"""File in the node's folder that holds one of the following words."""
READY, STARTING, DOWN = "ready", "starting", "down"

PATIENCE = {READY: 5.0, STARTING: 30.0}
"""Seconds until a child must have started; imports take a while on a busy machine."""

RUN = 0
"""The byte that lets a child run; all others are numbers of signals."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)


class NotStartedError(Exception):
    """No child was started; the text says why."""


def main() -> NoReturn:
    """Start the child in the warm process, or else the ordinary way."""
    command = sys.argv[1:]
    folder = os.environ.pop("FEDPSA_NODE_FOLDER", "")
    os.environ.pop("FEDPSA_NODE_PYTHON", None)
    # This file was named .../bin/../front.py, with the entry of PATH that we are found by.
    found_by = os.path.dirname(os.path.dirname(__file__))
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([entry for entry in path if entry != found_by])
    try:
        connection, answers = hand_over(folder, command[1:])
    except (NotStartedError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        print(f"WARNING:   fedpsa-node: ordinary start of a ClientApp: {reason}", file=sys.stderr)
        sys.stderr.flush()
        os.execvp(command[0], command)
    sys.exit(stay(connection, answers))


def hand_over(folder: str, arguments: list[str]) -> tuple[socket.socket, IO[bytes]]:
    """Let the warm process start a child, and return the connection to it.

    Whatever this raises, NotStartedError, OSError or ValueError, there is no child and will be
    none.
    """
    if "--allow-runtime-dependency-installation" in arguments:
        raise NotStartedError("the app gets an environment of its own")
    try:
        with open(os.path.join(folder, STATE), encoding="utf-8") as file:
            state = file.read()
    except FileNotFoundError:
        state = DOWN
    if state not in PATIENCE:
        raise NotStartedError("the warm process is not running")
    deadline = time.monotonic() + PATIENCE[state]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE[state])
    answers = connection.makefile("rb")
    try:
        connection.connect(os.path.join(folder, "socket"))
        _send_request(connection, arguments)
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        answer = _read(answers)
    except TimeoutError:
        raise NotStartedError(f"no answer in {PATIENCE[state]:g} s") from None
    except ConnectionError as error:
        raise NotStartedError(f"the warm process is not running ({error})") from None
    if "started" not in answer:
        raise NotStartedError(answer.get("refused", "the warm process has died"))
    connection.settimeout(None)
    connection.sendall(bytes([RUN]))
    return connection, answers


def _send_request(connection: socket.socket, arguments: list[str]) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    request = json.dumps(
        {
            "protocol": PROTOCOL,
            "arguments": arguments,
            "environment": dict(os.environ),
            "umask": umask,
            "sent": time.time(),
        }
    ).encode()
    descriptors = [*map(_stream, range(3)), os.open(".", os.O_RDONLY)]
    connection.sendall(len(request).to_bytes(4, "big"))
    sent = socket.send_fds(connection, [request], descriptors)
    if sent < len(request):  # sending nothing fails too, if all was read and answered by now
        connection.sendall(request[sent:])
    os.close(descriptors[-1])


def _stream(number: int) -> int:
    """Return a standard stream's file descriptor, or that of nothing if it is closed."""
    try:
        os.fstat(number)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)
    return number


def _read(answers: IO[bytes]) -> dict[str, Any]:
    line = answers.readline()
    answer = json.loads(line) if line.endswith(b"\n") else {}
    return answer if isinstance(answer, dict) else {}


def stay(connection: socket.socket, answers: IO[bytes]) -> int:
    """Pass signals on until the child has ended, and return its exit code."""
    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: connection.send(bytes([number])))
    try:
        code = _read(answers).get("exit")
    except OSError:
        code = None
    if code is None:
        # The child has ended, or goes on by itself.
        print("WARNING:   fedpsa-node: the warm process died during a message", file=sys.stderr)
        return 1
    # The exit code of a process that a signal ended, as shells show it.
    return int(code) if code >= 0 else 128 - int(code)


if __name__ == "__main__":
    main()
