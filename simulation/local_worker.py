"""What executes the ClientApp: in a worker process, or in the server's own.

As a program, it is a worker process. Its arguments are the numbers of three files: a socket, by
which it gets its tasks and sends what comes of them; a pipe, its bell, by which it tells the server
how much it has sent; and a pipe that only the server keeps open: no worker outlives its server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from simulation.local_channel import Channel
from simulation.local_internals import RUN_ID, SERVER_NODE_ID, act_as
from simulation.local_packing import Packed, pack, unpack

CLIENT_APP_RAISED = 2
"""Flower's error code for an exception in the ClientApp."""

# What may lie in the socket without the other end knowing; it holds four times as much.
QUIET_BYTES = 64 * 2**10
# Tasks that must be at hand for a reply to wait: one to go on with, while the server, which was
# told of the one before it, sends others; and one more, with which the reply is told.
_ENOUGH_TASKS = 2


@dataclass(frozen=True)
class Setup:
    """What a run needs to know to execute tasks.

    Parameters
    ----------
    app : str
        Where the ClientApp is, as ``module:attribute``.
    node_configs : Mapping[int, Mapping[str, Any]]
        The node config of every node, by its id.
    run_config : Mapping[str, Any]
        The run config.
    """

    app: str
    node_configs: Mapping[int, Mapping[str, Any]]
    run_config: Mapping[str, Any]


class Task(NamedTuple):
    """The first part of what the pool sends to a worker; new data follows.

    Big arrays are named by keys. A worker keeps the data of every key that it was sent, until it
    is told to forget it.
    """

    number: int
    node_id: int
    message: bytes
    message_keys: list[int]
    state: bytes
    state_keys: list[int]
    new: list[int]
    forget: list[int]
    patience: int  # so many replies may be told together


class Outcome(NamedTuple):
    """The first part of what a worker sends back; new data follows, one for each None.

    Big arrays that came with the task are named by the keys they came with.
    """

    number: int
    message: bytes
    message_keys: list[int | None]
    state: bytes | None  # None: unchanged
    state_keys: list[int | None]
    compile_seconds: float


EMPTY_STATE = pack(RecordDict())


class Runner:
    """Calls the ClientApp for one node or another.

    Parameters
    ----------
    setup : Setup
        What to call, and with which configs.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._app = load_app(setup.app)
        self.compiled = compile_seconds()  # as of the last message
        self._has_frozen = False

    def run(self, message: Packed, node_id: int, state: Packed) -> tuple[Message, Packed]:
        """Return the reply to a message, and the node's state after it.

        An exception in the ClientApp becomes an error reply, and leaves the state as it was.
        """
        instruction: Message = unpack(message)
        nothing_kept = state == EMPTY_STATE  # nearly always, and then nothing has to be packed
        context = Context(
            run_id=RUN_ID,
            node_id=node_id,
            node_config=dict(self._setup.node_configs[node_id]),
            state=RecordDict() if nothing_kept else unpack(state),
            run_config=dict(self._setup.run_config),
        )
        try:
            reply = self._app(message=instruction, context=context)
            if not isinstance(reply, Message):
                raise TypeError(f"the ClientApp returned a {type(reply).__name__}, not a Message")
            return reply, state if nothing_kept and not context.state else pack(context.state)
        except Exception:
            error = Error(code=CLIENT_APP_RAISED, reason=traceback.format_exc())
            return Message(error, reply_to=instruction), state
        finally:
            self._keep_what_compilers_leave()

    def _keep_what_compilers_leave(self) -> None:
        """Take what a compiler made out of the search for garbage: it stays as long as the process.

        There is so much of it that one look at all takes as long as twenty tasks of a small model.
        """
        if (seconds := compile_seconds()) > self.compiled:
            self.compiled = seconds
            gc.collect()
            gc.freeze()
            self._has_frozen = True

    def close(self) -> None:
        """Let garbage be looked for everywhere again."""
        if self._has_frozen:
            gc.unfreeze()


def run_as_node(
    runner: Runner, message: Packed, node_id: int, state: Packed
) -> tuple[Message, Packed]:
    """Execute a message in the server's own process, which is the node for as long as it takes."""
    act_as(node_id)
    try:
        return runner.run(message, node_id, state)
    finally:
        act_as(SERVER_NODE_ID)


def load_app(reference: str) -> ClientApp:
    """Import a ClientApp from where ``module:attribute`` says."""
    module, _, attribute = reference.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} is a {type(app).__name__}, not a ClientApp")
    return app


def compile_seconds() -> float:
    """Return how long torch's compiler has worked in this process."""
    seconds = 0.0
    # Looked up, not imported: whoever compiles nothing need not wait for the import.
    sensitivity: Any = sys.modules.get("fedpsa_strategy.compiled_sensitivity")
    if sensitivity is not None:
        seconds += sensitivity.compile_seconds()
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        # What its compile_times() reports, without going through a hundred other durations.
        seconds += sum(dynamo.compilation_time_metrics.get("_compile.compile_inner", ()))
    return seconds


class _Worker:
    """The worker's side of the socket.

    The server sleeps until it hears the bell. To be woken for every reply costs both of them: on a
    virtual machine the processor that wakes another one may even have to make room for it. So a
    worker that has enough to do tells of several replies at once.
    """

    def __init__(self, channel: Channel, bell: int, runner: Runner) -> None:
        self._channel = channel
        self._bell = bell
        self._runner = runner
        self._waiting: deque[list[bytes]] = deque()
        self._held: dict[int, bytes] = {}
        self._compiled = 0.0
        self._untold = self._untold_bytes = 0

    def serve(self) -> None:
        """Execute one task after the other, for ever."""
        while True:
            if not self._waiting:
                self._waiting.append(self._channel.receive())
            first, *new = self._waiting.popleft()
            task = Task(*pickle.loads(first))
            strings = self._execute(task, new)
            while self._channel.has_arrived:
                self._waiting.append(self._channel.receive())
            self.send(strings, task.patience)

    def send(self, strings: list[bytes], patience: int = 1) -> None:
        """Send a list, and ring unless so many others may come with it and there is time."""
        self._untold += 1
        self._untold_bytes += sum(map(len, strings))
        fits = self._untold_bytes <= QUIET_BYTES
        if not fits:  # the server has to read while it is sent
            self._ring()
        self._channel.send(strings)
        if fits and (self._untold >= patience or len(self._waiting) < _ENOUGH_TASKS):
            self._ring()

    def _ring(self) -> None:
        os.write(self._bell, bytes([self._untold]))
        self._untold = self._untold_bytes = 0

    def _execute(self, task: Task, new: list[bytes]) -> list[bytes]:
        """Return what comes of a task, ready to be sent."""
        for key in task.forget:
            del self._held[key]
        self._held.update(zip(task.new, new, strict=True))
        message = Packed(task.message, tuple(self._held[key] for key in task.message_keys))
        state = Packed(task.state, tuple(self._held[key] for key in task.state_keys))
        act_as(task.node_id)
        reply, new_state = self._runner.run(message, task.node_id, state)

        known = {id(self._held[key]): key for key in (*task.message_keys, *task.state_keys)}
        packed = pack(reply)
        unchanged = new_state.same_as(state)
        states = () if unchanged else new_state.buffers
        before, self._compiled = self._compiled, self._runner.compiled
        outcome = Outcome(
            number=task.number,
            message=packed.payload,
            message_keys=[known.get(id(data)) for data in packed.buffers],
            state=None if unchanged else new_state.payload,
            state_keys=[known.get(id(data)) for data in states],
            compile_seconds=self._compiled - before,
        )
        new_data = [data for data in (*packed.buffers, *states) if id(data) not in known]
        return [pickle.dumps(tuple(outcome)), *new_data]


def _end_with_server(lifeline: int) -> None:
    """Wait for the end of the server, which never writes here, and end too: whatever is going on.

    The thread that waits sleeps all the time. One that also took in the next tasks would ask for
    Python's lock again and again while another thread trains.
    """
    os.read(lifeline, 1)
    _end()


def _end() -> None:
    """End this process, and with it compilers that it may have started."""
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(file_descriptor: int, bell: int, lifeline: int) -> None:
    """Be a worker: load the ClientApp, then execute one task after the other."""
    threading.Thread(target=_end_with_server, args=(lifeline,), daemon=True).start()
    channel = Channel(socket.socket(fileno=file_descriptor))
    sys.path[:], setup = map(pickle.loads, channel.receive())
    try:
        runner = Runner(Setup(**setup))
    except Exception as error:
        traceback.print_exc()
        channel.send([f"{type(error).__name__}: {error}".encode()])
        os.write(bell, b"\1")
        return
    worker = _Worker(channel, bell, runner)
    worker.send([])
    worker.serve()


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        main(*map(int, sys.argv[1:]))
