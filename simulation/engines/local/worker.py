"""What executes the ClientApp: in a worker process, or in the server's own.

As a program, it is a worker process. Its argument is the file descriptor of its end of a pipe, by
which it gets jobs and sends what comes of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpsa_strategy.wire.error_codes import CLIENT_APP_RAISED
from simulation.engines.local.internals import RUN_ID, SERVER_NODE_ID, act_as
from simulation.objects import adopt

EMPTY_STATE = pickle.dumps(RecordDict())
"""The state of a node that has kept nothing."""


@dataclass(frozen=True)
class Setup:
    """What is executed: a ClientApp, as ``module:attribute``, and its configs.

    Node configs are by the nodes' ids. `objects` are tasks and methods that no other process can
    import; see `simulation.objects`.
    """

    app: str
    node_configs: Mapping[int, Mapping[str, Any]]
    run_config: Mapping[str, Any]
    objects: Mapping[str, bytes] = field(default_factory=dict)


class Runner:
    """Calls the ClientApp for one node or another."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._app = load_app(setup.app)

    def run(self, message: Message, state: bytes) -> tuple[Message, bytes]:
        """Return the reply to a message, and the node's state after it, pickled.

        An exception in the ClientApp becomes an error reply, and leaves the state as it was.
        """
        try:
            return self.call(message, state)
        except Exception:
            act_as(message.metadata.dst_node_id)
            error = Error(code=CLIENT_APP_RAISED, reason=traceback.format_exc())
            return Message(error, reply_to=message), state
        finally:
            act_as(SERVER_NODE_ID)

    def call(self, message: Message, state: bytes) -> tuple[Message, bytes]:
        """Do the same, but let exceptions of the ClientApp through."""
        node_id = message.metadata.dst_node_id
        context = Context(
            run_id=RUN_ID,
            node_id=node_id,
            node_config=dict(self._setup.node_configs[node_id]),
            state=pickle.loads(state),
            run_config=dict(self._setup.run_config),
        )
        act_as(node_id)
        try:
            reply = self._app(message=message, context=context)
        finally:
            act_as(SERVER_NODE_ID)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned a {type(reply).__name__}, not a Message")
        return reply, pickle.dumps(context.state)


def load_app(reference: str) -> ClientApp:
    """Import a ClientApp from where ``module:attribute`` says."""
    module, _, attribute = reference.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} is a {type(app).__name__}, not a ClientApp")
    return app


def main(connection: Connection) -> None:
    """Be a worker: load the ClientApp, then execute one job after the other."""
    sys.path[:], setup = connection.recv()
    jobs: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_take_jobs, args=(connection, jobs), daemon=True).start()
    try:
        adopt(setup.objects)
        runner = Runner(setup)
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        message, state = jobs.get()
        reply, new_state = runner.run(message, state)
        connection.send((reply, None if new_state == state else new_state))


def _take_jobs(connection: Connection, jobs: queue.SimpleQueue[tuple[Message, bytes]]) -> None:
    """Take jobs in at any time, so that the server never waits; end this process with the server.

    The compilers and data loaders that the ClientApp may have started end with it.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(connection.recv())
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        main(Connection(int(sys.argv[1])))
