"""Worker processes that execute the ClientApp, and what keeps them busy."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing import connection as connections
from typing import Any

from flwr.app import Error, Message

from fedpsa_strategy.wire.error_codes import CLIENT_APP_CRASHED
from simulation.engines.local.worker import EMPTY_STATE, Runner, Setup
from simulation.environment import python_path
from simulation.errors import RunFailed

log = logging.getLogger("flwr")

_MOST_CRASHES = 3  # of one job, or of workers that did not even start
_GRACE = 1.0  # seconds between the request to end and the end by force


@dataclass(eq=False)
class Job:
    """A message to a node, until its reply is there."""

    message: Message
    crashes: int = 0

    @property
    def node_id(self) -> int:
        """The node whose turn it is."""
        return self.message.metadata.dst_node_id

    @property
    def message_id(self) -> str:
        """The id under which its reply is asked for."""
        return self.message.metadata.message_id


class Pool(ABC):
    """Executes messages to nodes, and keeps their replies until they are collected.

    A node has one job at a time, because a job starts from the state in which the node's last one
    left it. A pool has no thread of its own: it takes in what has arrived when it is called.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pending: deque[Job] = deque()
        self._states: dict[int, bytes] = {}
        self._busy_nodes: set[int] = set()
        self._done: dict[str, Message] = {}
        self._has_news = False  # whether there are replies since the last `collect`
        self._closed = False

    def submit(self, message: Message) -> None:
        """Take a message to be executed as soon as there is room and the node is free."""
        self._check_open()
        self._pending.append(Job(message))
        self._dispatch()

    def collect(self, message_ids: Sequence[str]) -> list[Message]:
        """Return the replies to these messages that are there, each once.

        Messages that still wait for room are executed in the order of these ids from now on.
        """
        rank = {key: place for place, key in enumerate(message_ids)}
        last = len(rank)
        self._pending = deque(sorted(self._pending, key=lambda job: rank.get(job.message_id, last)))
        self._take_arrivals()
        self._has_news = False
        return [self._done.pop(key) for key in message_ids if key in self._done]

    def wait(self, timeout: float) -> bool:
        """Wait until there is a reply that was not there at the last `collect`."""
        give_up = time.monotonic() + timeout
        while True:
            self._take_arrivals(max(0.0, give_up - time.monotonic()))
            if self._has_news:
                return True
            if time.monotonic() >= give_up:
                return False

    def close(self) -> None:
        """End everything, whatever it is doing."""
        self._closed = True
        self._pending.clear()

    @abstractmethod
    def _dispatch(self) -> None:
        """Give out as many jobs as there is room for."""

    @abstractmethod
    def _take_arrivals(self, timeout: float = 0.0) -> None:
        """Take the results that are there, or come within a time, and give out jobs."""

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the grid is closed")

    def _next(self) -> Job | None:
        """Return the most urgent job whose node is free."""
        return next((job for job in self._pending if job.node_id not in self._busy_nodes), None)

    def _claim_next(self) -> Job | None:
        job = self._next()
        if job is not None:
            self._pending.remove(job)
            self._busy_nodes.add(job.node_id)
        return job

    def _state(self, job: Job) -> bytes:
        return self._states.get(job.node_id, EMPTY_STATE)

    def _finish(self, job: Job, reply: Message, state: bytes | None = None) -> None:
        """Take the reply to a job, and its node's state after it; None: unchanged."""
        if state is not None:
            self._states[job.node_id] = state
        self._done[job.message_id] = reply
        self._busy_nodes.discard(job.node_id)
        self._has_news = True


class WorkerPool(Pool):
    """Executes messages in worker processes, in this process, or both.

    While there is enough to do, a worker has its next job waiting beside the one it works on. A
    worker that dies is replaced and its jobs are done again.

    Parameters
    ----------
    num_workers : int
        How many processes; with 0, this process executes messages itself.
    setup : Setup
        What they execute.
    train_here : bool (default: False)
        Whether this process executes messages too, beside the workers.
    """

    def __init__(self, num_workers: int, setup: Setup, *, train_here: bool = False) -> None:
        super().__init__(setup)
        self._runner = Runner(setup) if train_here or not num_workers else None
        self._failed_starts = 0
        self._workers = [_Worker(index, setup) for index in range(num_workers)]

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, those that took the places of dead ones included."""
        self._take_arrivals()
        return [worker.process.pid for worker in self._workers]

    def collect(self, message_ids: Sequence[str]) -> list[Message]:
        """Return the replies that are there; if none is, first execute a message here, if any."""
        replies = super().collect(message_ids)
        if not replies and self._runner is not None:
            self._execute_next(self._runner)
            replies = super().collect(message_ids)
        return replies

    def wait(self, timeout: float) -> bool:
        """Wait for a reply, unless there is a message to execute here."""
        if self._runner is not None and self._next() is not None:
            return True
        return super().wait(timeout)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        super().close()
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        for worker in self._workers:
            worker.end()

    # --- Giving out work ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give every worker a job, and a spare one if enough are left for the others."""
        for worker in self._workers:
            if worker.ready and not worker.jobs:
                self._send_next(worker)
        others = len(self._workers) - 1 + (self._runner is not None)
        for worker in self._workers:
            if len(worker.jobs) == 1 and len(self._pending) > others:
                self._send_next(worker)

    def _send_next(self, worker: _Worker) -> None:
        job = self._claim_next()
        if job is not None:
            worker.send(job, self._state(job))

    def _execute_next(self, runner: Runner) -> None:
        job = self._claim_next()
        if job is None:
            return
        # A copy, as on the way to a worker: a ClientApp that writes into its message must not
        # write into the server's memory.
        message = pickle.loads(pickle.dumps(job.message))
        self._finish(job, *runner.run(message, self._state(job)))
        self._dispatch()

    # --- What workers send ----------------------------------------------------------------------

    def _take_arrivals(self, timeout: float = 0.0) -> None:
        self._check_open()
        by_connection: dict[Any, _Worker] = {each.connection: each for each in self._workers}
        for connection in connections.wait(by_connection, timeout):
            worker = by_connection[connection]
            try:
                arrived = worker.connection.recv()
            except (EOFError, OSError):
                worker.signal(signal.SIGKILL)
                self._replace(worker)
                continue
            if worker.ready:
                self._take_outcome(worker, *arrived)
            else:
                self._take_greeting(worker, arrived)

    def _take_greeting(self, worker: _Worker, problem: str) -> None:
        """Hear from a new worker that it is ready, or that the app cannot be loaded."""
        if problem:
            raise RunFailed(f"The client app {self._setup.app} cannot be loaded: {problem}")
        worker.ready = True
        self._failed_starts = 0
        self._dispatch()

    def _take_outcome(self, worker: _Worker, reply: Message, state: bytes | None) -> None:
        self._finish(worker.jobs.popleft(), reply, state)
        self._dispatch()

    def _replace(self, worker: _Worker) -> None:
        """Put a new worker in the place of one that died."""
        end = worker.end()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_CRASHES:
                raise RunFailed(f"Worker processes do not start: {end}.")
        log.warning("Worker %d %s and is replaced", worker.index, end)
        jobs = list(worker.jobs)
        self._busy_nodes -= {job.node_id for job in jobs}
        if jobs:  # the first one was at work, the other only waited
            jobs[0].crashes += 1
            if jobs[0].crashes >= _MOST_CRASHES:
                job = jobs.pop(0)
                reason = f"the worker process {end}, in {job.crashes} attempts at this message"
                error = Error(code=CLIENT_APP_CRASHED, reason=reason)
                self._finish(job, Message(error, reply_to=job.message))
        self._pending.extendleft(reversed(jobs))
        self._workers[worker.index] = _Worker(worker.index, self._setup)
        self._dispatch()


class _Worker:
    """The server's side of one worker process.

    Not a `multiprocessing.Process`: that would import the main script of whoever uses the pool once
    more, get Ctrl-C together with the server, and could not be ended together with the compilers
    and data loaders that it has started.
    """

    def __init__(self, index: int, setup: Setup) -> None:
        self.index = index
        self.ready = False
        self.jobs: deque[Job] = deque()  # the first one is at work
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "simulation.engines.local.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": python_path()},
                start_new_session=True,
            )
        self._send((sys.path, setup))

    def send(self, job: Job, state: bytes) -> None:
        """Send a job, with the state of its node."""
        self.jobs.append(job)
        self._send((job.message, state))

    def _send(self, value: object) -> None:
        # A worker that died in the meantime is noticed where its replies are awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(value)

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to those it has started."""
        # Until we have collected its exit code, no other process group can have its number.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def end(self) -> str:
        """Wait for the end of a process that was told to end, but not for long, and say how."""
        try:
            code = self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            code = self.process.wait()
        self.connection.close()
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
