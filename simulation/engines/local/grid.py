"""Grids that execute the ClientApp themselves.

Nothing is polled for, so that clients do little else than train. The results are those of Flower's
engines, bit for bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from simulation.engines.local.internals import SERVER_NODE_ID, Run, act_as, give_id
from simulation.engines.local.pool import Pool, WorkerPool
from simulation.engines.local.worker import Setup
from simulation.environment import ConfigValue
from simulation.objects import given

CLIENT_APP = "client_app.app:app"

_FIRST_NODE_ID = 1000


class VirtualNodes(Grid):
    """Virtual nodes, with a pool that executes their messages; node number i holds partition i.

    The ClientApp is named ``module:attribute``. Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        num_nodes: int,
        run_config: Mapping[str, ConfigValue],
        app: str,
        make_pool: Callable[[Setup], Pool],
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}, but must be at least 1")
        act_as(SERVER_NODE_ID)
        node_configs = {
            _FIRST_NODE_ID + index: {"partition-id": index, "num-partitions": num_nodes}
            for index in range(num_nodes)
        }
        self._node_ids = set(node_configs)
        self._message_ids = map(str, itertools.count(1))
        self._run: Run | None = None
        objects = given(run_config.values())
        self._pool = make_pool(Setup(app, node_configs, dict(run_config), objects))

    def set_run(self, run: Run) -> None:
        """Set the run, which nothing here depends on."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that was set."""
        if self._run is None:
            raise RuntimeError("this grid has no run: set_run() was not called")
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as `Message` itself does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return set(self._node_ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Give messages to their nodes; those to unknown nodes are not accepted."""
        accepted = []
        for message in messages:
            give_id(message, next(self._message_ids))
            if message.metadata.dst_node_id in self._node_ids:
                self._pool.submit(message)
                accepted.append(message.metadata.message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that are there, each once.

        The order of the ids counts: messages that wait for a worker are executed in this order.
        """
        replies = self._pool.collect(list(message_ids))
        for reply in replies:
            give_id(reply, next(self._message_ids))
        return replies

    def wait(self, timeout: float) -> bool:
        """Wait until a reply arrives that was not there at the last pull, or the time has passed.

        Tell whether there is one, or a message that the next pull will execute in this process.
        """
        return self._pool.wait(timeout)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies to all of them."""
        give_up = None if timeout is None else time.monotonic() + timeout
        waiting = list(self.push_messages(messages))
        replies: list[Message] = []
        while waiting:
            pulled = list(self.pull_messages(waiting))
            answered = {reply.metadata.reply_to_message_id for reply in pulled}
            waiting = [key for key in waiting if key not in answered]
            replies += pulled
            left = 1.0 if give_up is None else give_up - time.monotonic()
            if not waiting or left <= 0:
                break
            if not pulled:
                self.wait(min(left, 1.0))
        return replies

    def close(self) -> None:
        """End all work, whatever it is doing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalGrid(VirtualNodes):
    """Virtual nodes on this machine.

    Parameters
    ----------
    num_nodes, run_config
        See `VirtualNodes`.
    workers : int
        Processes that execute the ClientApp; 0 executes it in this process, one message each time
        that replies are pulled: for debuggers.
    app : str (default: "client_app.app:app")
        The ClientApp, as ``module:attribute``.
    train_here : bool (default: False)
        Whether this process executes it as well, beside the workers, instead of waiting for them.
    """

    def __init__(
        self,
        num_nodes: int,
        run_config: Mapping[str, ConfigValue],
        *,
        workers: int,
        app: str = CLIENT_APP,
        train_here: bool = False,
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers is {workers}, but must be at least 0")

        def make_pool(setup: Setup) -> Pool:
            self._workers = WorkerPool(min(workers, num_nodes), setup, train_here=train_here)
            return self._workers

        super().__init__(num_nodes, run_config, app, make_pool)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; a worker that died is replaced by another."""
        return self._workers.worker_pids
