"""Run the app on this machine without Flower's engines: a grid that executes the ClientApp itself.

Nothing is serialised that need not be and nothing is polled for, so that clients do little else
than train. The results are those of Flower's engines, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedpsa_strategy.errors import FedPSAError
from server_app.app import run_settings
from server_app.settings import Settings, SettingsError
from server_app.stopping import StopSignals
from simulation.environment import ConfigValue
from simulation.errors import LaunchFailed, RunFailed
from simulation.local_internals import SERVER_NODE_ID, act_as, give_id
from simulation.local_packing import Packed, pack
from simulation.local_pool import WorkerPool
from simulation.local_worker import EMPTY_STATE, Runner, Setup, compile_seconds, run_as_node
from simulation.submit import STOP_REQUEST

log = logging.getLogger("flwr")

CLIENT_APP = "client_app.app:app"

_FIRST_NODE_ID = 1000


class LocalGrid(Grid):
    """Virtual nodes on this machine; node number i holds partition i.

    Use it as a context manager, or call `close()`.

    Parameters
    ----------
    num_nodes : int
        How many nodes.
    run_config : Mapping[str, bool | int | float | str]
        The run config that the ClientApp sees.
    workers : int
        Processes that execute the ClientApp; 0 executes it in this process, one message each time
        that replies are pulled.
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
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}, but must be at least 1")
        if workers < 0:
            raise ValueError(f"workers is {workers}, but must be at least 0")
        act_as(SERVER_NODE_ID)
        node_configs = {
            _FIRST_NODE_ID + index: {"partition-id": index, "num-partitions": num_nodes}
            for index in range(num_nodes)
        }
        setup = Setup(app, node_configs, dict(run_config))
        self._node_ids = set(node_configs)
        self._message_ids = map(str, itertools.count(1))
        self._run: Run | None = None
        self._executor: WorkerPool | InProcess = (
            WorkerPool(min(workers, num_nodes), setup, train_here=train_here)
            if workers
            else InProcess(setup)
        )

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; a worker that died is replaced by another."""
        return list(self._executor.worker_pids)

    @property
    def compile_seconds(self) -> float:
        """How long torch's compiler has worked, in all processes together."""
        return self._executor.compile_seconds

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
                self._executor.submit(message)
                accepted.append(message.metadata.message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that are there, each once.

        The order of the ids counts: messages that wait for a worker are executed in this order.
        """
        replies = self._executor.collect(list(message_ids))
        for reply in replies:
            give_id(reply, next(self._message_ids))
        return replies

    def wait(self, timeout: float, replies: int = 1) -> bool:
        """Wait until replies arrive that were not there at the last pull.

        Parameters
        ----------
        timeout : float
            Seconds after which to give up.
        replies : int (default: 1)
            How many, as long as there is enough to do for the workers without them.

        Returns
        -------
        bool
            Whether there is one.
        """
        return self._executor.wait(timeout, replies)

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
                self.wait(left)
        return replies

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._executor.close()

    def __enter__(self) -> LocalGrid:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class InProcess:
    """Executes messages where it is asked for their replies, for use with a debugger.

    Parameters
    ----------
    setup : Setup
        What to execute.
    """

    worker_pids: tuple[int, ...] = ()

    def __init__(self, setup: Setup) -> None:
        self._runner = Runner(setup)
        self._states: dict[int, Packed] = {}
        self._messages: dict[str, Message] = {}

    @property
    def compile_seconds(self) -> float:
        """How long torch's compiler has worked."""
        return compile_seconds()

    def submit(self, message: Message) -> None:
        """Keep a message until its reply is asked for."""
        self._messages[message.metadata.message_id] = message

    def collect(self, message_ids: Sequence[str]) -> list[Message]:
        """Execute the first of these messages that was not executed yet."""
        message_id = next((key for key in message_ids if key in self._messages), None)
        if message_id is None:
            return []
        message = self._messages.pop(message_id)
        node_id = message.metadata.dst_node_id
        # Packed like on the way to a worker, else a ClientApp that writes into its message would
        # write into the server's memory.
        state = self._states.get(node_id, EMPTY_STATE)
        reply, self._states[node_id] = run_as_node(self._runner, pack(message), node_id, state)
        return [reply]

    def wait(self, timeout: float, replies: int = 1) -> bool:  # noqa: ARG002
        """Return at once if there is a message to execute."""
        if not self._messages:
            time.sleep(timeout)
        return bool(self._messages)

    def close(self) -> None:
        """Drop what was not executed."""
        self._messages.clear()
        self._runner.close()


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_locally(
    run_config: Mapping[str, ConfigValue],
    *,
    workers: int,
    train_here: bool = False,
    stream: bool = True,
) -> dict[str, Any]:
    """Run the app on this machine, and leave nothing running.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        What to change of the app's default run config.
    workers : int
        Processes that train; 0 trains in this one. The results do not depend on it.
    train_here : bool (default: False)
        Whether this process trains as well, beside the workers, so that none only waits. A
        ClientApp that takes its process down then ends the run.
    stream : bool (default: True)
        Whether to show the run's log; warnings are always shown.

    Returns
    -------
    dict[str, Any]
        The summary of the run, which is also in its folder.

    Raises
    ------
    LaunchFailed
        If the run config cannot be used.
    RunFailed
        If the run did not complete; the text says why.
    KeyboardInterrupt
        After Ctrl-C, when the run has saved a checkpoint and its results so far, and all workers
        have ended. SIGTERM and SIGHUP do the same with `SystemExit`.
    """
    try:
        settings = Settings.from_run_config(run_config)
    except SettingsError as error:
        raise LaunchFailed(str(error)) from error
    if settings.run_dir:
        (Path(settings.run_dir) / STOP_REQUEST).unlink(missing_ok=True)
    with log_level(logging.INFO if stream else logging.WARNING), StopSignals() as signals:
        summary = _run(settings, workers, train_here, signals.requested)
    if summary["status"] != "completed":
        raise RunFailed(f"The run was {summary['status']}.", summary=summary)
    return summary


def _run(
    settings: Settings, workers: int, train_here: bool, stop_fn: Callable[[], bool]
) -> dict[str, Any]:
    if settings.step == "compiled":
        log.info("Every worker compiles the training step first: up to a minute, less if cached.")
    try:
        with LocalGrid(
            settings.num_clients, settings.to_run_config(), workers=workers, train_here=train_here
        ) as grid:
            return run_settings(grid, settings, stop_fn)
    except RunFailed:
        raise
    except Exception as error:
        # Errors of these kinds explain themselves; of others the reader wants to know the place.
        if not isinstance(error, FedPSAError | ValueError | OSError):
            log.error("%s", traceback.format_exc())
        raise RunFailed(f"The run failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def log_level(level: int) -> Iterator[None]:
    """Show no less important lines of the run's log, for as long as the ``with`` block runs."""
    before = log.level
    log.setLevel(max(level, before))
    try:
        yield
    finally:
        log.setLevel(before)
