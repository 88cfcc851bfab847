"""What executes the ClientApp: in a worker process, or in the server's own.

As a program, it is a worker process. Its arguments are the numbers of two files: a socket, through
which it gets its tasks, and a pipe that only the server keeps open: no worker outlives its server.
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
        self._compiled = compile_seconds()
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
            self._keep_what_compilers_leave()
            return reply, state if nothing_kept and not context.state else pack(context.state)
        except Exception:
            error = Error(code=CLIENT_APP_RAISED, reason=traceback.format_exc())
            return Message(error, reply_to=instruction), state

    def _keep_what_compilers_leave(self) -> None:
        """Take what a compiler made out of the search for garbage: it stays as long as the process.

        There is so much of it that one look at all takes as long as twenty tasks of a small model.
        """
        if (seconds := compile_seconds()) > self._compiled:
            self._compiled = seconds
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
    """The worker's side of the socket."""

    def __init__(self, channel: Channel, runner: Runner) -> None:
        self._channel = channel
        self._runner = runner
        self._held: dict[int, bytes] = {}
        self._compiled = 0.0

    def run(self, task: Task, new: list[bytes]) -> None:
        """Execute a task and send what comes of it."""
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
        before, self._compiled = self._compiled, compile_seconds()
        outcome = Outcome(
            number=task.number,
            message=packed.payload,
            message_keys=[known.get(id(data)) for data in packed.buffers],
            state=None if unchanged else new_state.payload,
            state_keys=[known.get(id(data)) for data in states],
            compile_seconds=self._compiled - before,
        )
        new_data = [data for data in (*packed.buffers, *states) if id(data) not in known]
        self._channel.send([pickle.dumps(tuple(outcome)), *new_data])


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


def main(file_descriptor: int, lifeline: int) -> None:
    """Be a worker: load the ClientApp, then execute one task after the other."""
    threading.Thread(target=_end_with_server, args=(lifeline,), daemon=True).start()
    channel = Channel(socket.socket(fileno=file_descriptor))
    sys.path[:], setup = map(pickle.loads, channel.receive())
    try:
        runner = Runner(Setup(**setup))
    except Exception as error:
        traceback.print_exc()
        channel.send([f"{type(error).__name__}: {error}".encode()])
        return
    channel.send([])
    worker = _Worker(channel, runner)
    while True:
        task, *new = channel.receive()
        worker.run(Task(*pickle.loads(task)), new)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        main(*map(int, sys.argv[1:]))
