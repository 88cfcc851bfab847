"""Worker processes that execute the ClientApp, and what keeps them busy."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

from flwr.app import Error, Message

from simulation.environment import training_environment
from simulation.errors import RunFailed
from simulation.local_channel import Channel
from simulation.local_packing import Packed, pack, unpack
from simulation.local_worker import (
    EMPTY_STATE,
    QUIET_BYTES,
    Outcome,
    Runner,
    Setup,
    Task,
    compile_seconds,
    run_as_node,
)

log = logging.getLogger("flwr")

CLIENT_APP_CRASHED = 8
"""Flower's error code for a ClientApp that took its process with it."""

_MOST_CRASHES = 3  # of one task, or of workers that did not even start
_MOST_WAITING = 2  # jobs of a single worker beside the one it works on
_SOCKET_BYTES = 4 * QUIET_BYTES
_HELD_BYTES = 64 * 2**20  # data of big arrays that a worker keeps in case they are needed again
_LONGEST_WAIT = 3600.0  # seconds of one system call, which has a limit
_GRACE = 1.0  # seconds between the request to end and the end by force


@dataclass(eq=False)
class Job:
    """A message to a node, until its reply is there."""

    number: int
    instruction: Message
    message: Packed
    state: Packed = EMPTY_STATE  # the node's, as of when the job was sent
    crashes: int = 0

    @property
    def node_id(self) -> int:
        """The node whose turn it is."""
        return self.instruction.metadata.dst_node_id

    @property
    def message_id(self) -> str:
        """The id under which its reply is asked for."""
        return self.instruction.metadata.message_id

    @property
    def buffers(self) -> tuple[bytes, ...]:
        """The data of all big arrays that a worker needs for it."""
        return self.message.buffers + self.state.buffers


class WorkerPool:
    """Executes messages in worker processes.

    While there is enough to do, a worker has its next jobs waiting beside the one it works on.
    A node has one job at a time, because a job starts from the state in which the node's last one
    left it. A worker that dies is replaced and its jobs are done again.

    What workers send is taken in whenever the pool is called and they have rung: without a thread
    of its own, which would ask for Python's lock all the time. Waiting jobs are what keeps a worker
    busy meanwhile, if they and the reply fit into its socket; else it waits until whoever owns the
    pool has time.

    Parameters
    ----------
    num_workers : int
        How many processes.
    setup : Setup
        What they execute.
    train_here : bool (default: False)
        Whether this process executes messages too, instead of waiting.
    """

    def __init__(self, num_workers: int, setup: Setup, *, train_here: bool = False) -> None:
        self._compiled = 0.0  # seconds, in all workers together
        self._own = Runner(setup) if train_here else None
        self._setup = setup
        self._pending: deque[Job] = deque()
        self._states: dict[int, Packed] = {}
        self._busy_nodes: set[int] = set()
        self._done: dict[str, Message | Packed] = {}
        self._news = 0  # replies since the last `collect`
        self._patience = 1  # how many replies were waited for last
        self._failed_starts = 0
        self._num_jobs = 0
        self._closed = False
        self._arrivals = selectors.DefaultSelector()
        self._workers: list[_WorkerProcess] = []
        for index in range(num_workers):
            self._workers.append(self._start(index))

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, those that took the places of dead ones included."""
        self._take_arrivals()
        return [worker.process.pid for worker in self._workers]

    @property
    def compile_seconds(self) -> float:
        """How long torch's compiler has worked, in all processes together."""
        return self._compiled + compile_seconds()

    def submit(self, message: Message) -> None:
        """Take a message to be executed as soon as a worker and the node are free."""
        self._num_jobs += 1
        self._pending.append(Job(self._num_jobs, message, pack(message)))
        self._check_open()
        self._dispatch()

    def collect(self, message_ids: Sequence[str]) -> list[Message]:
        """Return the replies to these messages that are there, each once.

        Messages that still wait for a worker are executed in the order of these ids from now on.
        """
        rank = {key: place for place, key in enumerate(message_ids)}
        last = len(rank)
        self._pending = deque(sorted(self._pending, key=lambda job: rank.get(job.message_id, last)))
        self._take_arrivals()
        self._news = 0
        found = [self._done.pop(key) for key in message_ids if key in self._done]
        return [reply if isinstance(reply, Message) else unpack(reply) for reply in found]

    def wait(self, timeout: float, replies: int = 1) -> bool:
        """Wait for so many replies that were not there at the last `collect`.

        For fewer when the workers are about to run out of jobs. A process that trains too does not
        wait while there is a job that no worker has.
        """
        self._patience = replies
        if self._own is not None and self._execute_next(self._own):
            return True
        give_up = time.monotonic() + timeout
        left = timeout
        while self._news < (1 if len(self._pending) < len(self._workers) else replies):
            self._take_arrivals(min(max(left, 0.0), _LONGEST_WAIT))
            left = give_up - time.monotonic()
            if left <= 0:
                break
        return self._news > 0

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._closed = True
        self._pending.clear()
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.end()
            worker.close()
        self._arrivals.close()
        if self._own is not None:
            self._own.close()

    def _execute_next(self, runner: Runner) -> bool:
        """Execute the most urgent job that no worker has in this process, if there is one."""
        self._take_arrivals()
        job = self._next_job()
        if job is None:
            return False
        self._claim(job)
        reply, self._states[job.node_id] = run_as_node(runner, job.message, job.node_id, job.state)
        self._finish(job, reply)
        self._dispatch()
        return True

    # --- Giving out work ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.jobs:
                self._send_next(worker)
        # Jobs that wait let a worker go on at once, also when this process is late. But they are
        # tied to that worker, even if another one is free earlier: so, unless there is no other,
        # only out of plenty. And they have to fit into the socket, because a worker that is busy
        # does not read.
        alone = len(self._workers) == 1 and self._own is None
        most, for_others = (_MOST_WAITING, 0) if alone else (1, len(self._workers))
        for waiting in range(most):
            for worker in self._workers:
                if len(self._pending) <= for_others:
                    return
                if len(worker.jobs) == 1 + waiting:
                    self._send_next(worker, QUIET_BYTES)

    def _send_next(self, worker: _WorkerProcess, most_bytes: float = math.inf) -> None:
        job = self._next_job()
        if job is not None and worker.bytes_to_send(job) <= most_bytes:
            self._claim(job)
            worker.send(job, self._patience)

    def _next_job(self) -> Job | None:
        """Return the most urgent job whose node is free, with the node's state."""
        for job in self._pending:
            if job.node_id not in self._busy_nodes:
                job.state = self._states.get(job.node_id, EMPTY_STATE)
                return job
        return None

    def _claim(self, job: Job) -> None:
        self._pending.remove(job)
        self._busy_nodes.add(job.node_id)

    def _finish(self, job: Job, reply: Message | Packed) -> None:
        self._done[job.message_id] = reply
        self._busy_nodes.discard(job.node_id)
        self._news += 1

    # --- What workers send ----------------------------------------------------------------------

    def _start(self, index: int) -> _WorkerProcess:
        worker = _WorkerProcess(index, self._setup)
        self._arrivals.register(worker.bell, selectors.EVENT_READ, worker)
        return worker

    def _take_arrivals(self, timeout: float = 0.0) -> None:
        """Take what workers have told of, or tell of within a time, and hand out jobs."""
        self._check_open()
        for key, _ in self._arrivals.select(timeout):
            worker: _WorkerProcess = key.data
            try:
                for _ in worker.told():
                    if worker.ready:
                        self._take_outcome(worker)
                    else:
                        self._take_greeting(worker)
            except (EOFError, OSError):
                worker.kill()
                self._replace(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the grid is closed")

    def _take_greeting(self, worker: _WorkerProcess) -> None:
        """Hear from a new worker that it is ready, or that the app cannot be loaded."""
        problem = worker.channel.receive()
        if problem:
            raise RunFailed(
                f"The client app {self._setup.app} cannot be loaded: {problem[0].decode()}"
            )
        worker.ready = True
        self._failed_starts = 0
        self._dispatch()

    def _take_outcome(self, worker: _WorkerProcess) -> None:
        job, outcome, reply, state = worker.receive()
        if outcome.compile_seconds > 0:
            log.info("Worker %d compiled for %.1f s", worker.index, outcome.compile_seconds)
        worker.jobs.popleft()
        self._compiled += outcome.compile_seconds
        if state is not None:
            self._states[job.node_id] = state
        self._finish(job, reply)
        self._dispatch()

    def _replace(self, worker: _WorkerProcess) -> None:
        """Put a new worker in the place of one that died."""
        end = worker.describe_end()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_CRASHES:
                raise RunFailed(f"Worker processes do not start: {end}.")
        log.warning("Worker %d %s and is replaced", worker.index, end)
        jobs = list(worker.jobs)
        if jobs:  # the first one was at work, the others only waited
            jobs[0].crashes += 1
            if jobs[0].crashes >= _MOST_CRASHES:
                job = jobs.pop(0)
                reason = f"the worker process {end}, in {job.crashes} attempts at this message"
                error = Error(code=CLIENT_APP_CRASHED, reason=reason)
                self._finish(job, Message(error, reply_to=job.instruction))
        self._busy_nodes -= {job.node_id for job in jobs}
        self._pending.extendleft(reversed(jobs))
        self._arrivals.unregister(worker.bell)
        worker.close()
        self._workers[worker.index] = self._start(worker.index)
        self._dispatch()


class _WorkerProcess:
    """The server's side of one worker."""

    def __init__(self, index: int, setup: Setup) -> None:
        self.index = index
        self.ready = False
        self.jobs: deque[Job] = deque()  # the first one is at work
        self._held: OrderedDict[int, bytes] = OrderedDict()  # by id, least recently used first
        self._held_bytes = 0
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self.bell, their_bell = map(os.fdopen, os.pipe(), "rw")
        their_lifeline, self._lifeline = map(os.fdopen, os.pipe(), "rw")
        root = str(Path(__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        files = (theirs.fileno(), their_bell.fileno(), their_lifeline.fileno())
        with theirs, their_bell, their_lifeline:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "simulation.local_worker", *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                env=training_environment() | {"PYTHONPATH": search},
                # Ctrl-C is for the server, which ends its workers itself; and a worker's own
                # children, such as compilers, can be ended together with it.
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self.channel.send([pickle.dumps(sys.path), pickle.dumps(asdict(setup))])

    def bytes_to_send(self, job: Job) -> int:
        """Return how much the worker would have to be sent for a job."""
        new = {id(data): len(data) for data in job.buffers if id(data) not in self._held}
        return len(job.message.payload) + len(job.state.payload) + sum(new.values())

    def send(self, job: Job, patience: int) -> None:
        """Send a job, with the data that the worker does not hold yet.

        Its reply may be told together with others, so many in all.
        """
        self.jobs.append(job)
        needed = {id(data): data for data in job.buffers}
        new = [key for key in needed if key not in self._held]
        # Entries of `_held` keep their data alive, so that no two of them have the same id.
        for key, data in needed.items():
            self._held[key] = data
            self._held.move_to_end(key)
        self._held_bytes += sum(len(needed[key]) for key in new)
        forget = []
        while self._held_bytes > _HELD_BYTES and (key := next(iter(self._held))) not in needed:
            self._held_bytes -= len(self._held.pop(key))
            forget.append(key)
        task = Task(
            number=job.number,
            node_id=job.node_id,
            message=job.message.payload,
            message_keys=[id(data) for data in job.message.buffers],
            state=job.state.payload,
            state_keys=[id(data) for data in job.state.buffers],
            new=new,
            forget=forget,
            patience=patience,
        )
        # One that died in the meantime is noticed where its replies are awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send([pickle.dumps(tuple(task)), *(needed[key] for key in new)])

    def told(self) -> Iterator[None]:
        """Yield once for everything that is to be received, as far as the bell tells.

        A bell that is gone tells of the worker's end. What it had sent until then is received, too:
        else the first of its jobs would not be the one that it died of.
        """
        told = os.read(self.bell.fileno(), 64)
        yield from repeat(None, sum(told)) if told else repeat(None)

    def receive(self) -> tuple[Job, Outcome, Packed, Packed | None]:
        """Receive what came of the first job: the reply, and the node's state if it changed."""
        first, *new = self.channel.receive()
        outcome = Outcome(*pickle.loads(first))
        job = self.jobs[0]
        assert outcome.number == job.number
        sent = {id(data): data for data in job.buffers}
        new_data = iter(new)

        def buffers(keys: list[int | None]) -> tuple[bytes, ...]:
            return tuple(next(new_data) if key is None else sent[key] for key in keys)

        reply = Packed(outcome.message, buffers(outcome.message_keys))
        if outcome.state is None:
            return job, outcome, reply, None
        return job, outcome, reply, Packed(outcome.state, buffers(outcome.state_keys))

    def ask_to_end(self) -> None:
        """Ask the process, and those it started, to end."""
        self._signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the end of a process that was asked to, but not for long."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process, and those it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Close our ends of what led to a process that has ended."""
        self.channel.close()
        self.bell.close()
        self._lifeline.close()

    def describe_end(self) -> str:
        """Say how the process ended."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def _signal(self, number: int) -> None:
        # Until we have collected its exit code, no other process group can have its number.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
