"""Messages to nodes as Ray tasks: Ray decides where they run, and runs them again if it must."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import ray
from flwr.app import Error, Message

from fedpsa_strategy.wire.error_codes import CLIENT_APP_CRASHED
from simulation.engines.cluster.machines import Resources, counted, num_slots
from simulation.engines.cluster.tasks import execute
from simulation.engines.local.pool import Job, Pool
from simulation.engines.local.worker import Setup
from simulation.errors import RunFailed

log = logging.getLogger("flwr")

_RETRIES = 3  # of a task whose process or machine is lost
_MOST_LOSSES = 10  # of one job, beyond Ray's own retries
_LOOK_SECONDS = 2.0  # between two looks at the size of the cluster
_WARN_SECONDS = 60.0


class RayPool(Pool):
    """Executes messages as Ray tasks on whatever machines the cluster has at the moment.

    For every job that the cluster can work on, one more waits there; `each` is what a job takes.
    Ray executes a task again whose process or machine is lost; a task is a pure function of its
    message, its state and the node's data, so that nobody notices.
    """

    def __init__(self, setup: Setup, each: Resources) -> None:
        super().__init__(setup)
        self._each = each
        self._execute: Any = ray.remote(execute).options(**each.options, max_retries=_RETRIES)
        self._shared = ray.put(replace(setup, node_configs={}))
        self._running: dict[Any, Job] = {}
        self._slots, self._looked, self._warned = 0, 0.0, 0.0

    def close(self) -> None:
        """End all tasks, whatever they are doing."""
        super().close()
        for task in self._running:
            ray.cancel(task, force=True)
        self._running.clear()

    def _dispatch(self) -> None:
        """Give the cluster as many jobs as it can work on, and as many to go on with."""
        room = 2 * self._num_slots()
        while len(self._running) < room and (job := self._claim_next()) is not None:
            node_config = dict(self._setup.node_configs[job.node_id])
            task = self._execute.remote(self._shared, node_config, job.message, self._state(job))
            self._running[task] = job

    def _num_slots(self) -> int:
        """Return how many jobs the cluster can work on; machines come and go."""
        now = time.monotonic()
        if not self._slots or now - self._looked > _LOOK_SECONDS:
            before, self._slots, self._looked = self._slots, num_slots(self._each), now
            if before and self._slots != before:
                log.warning(
                    "The cluster has room for %s at a time now, not %d",
                    counted(self._slots, "client"),
                    before,
                )
            if not self._slots and now - self._warned > _WARN_SECONDS:
                self._warned = now
                log.warning("No machine of the cluster has %s; waiting for one", self._each)
        return self._slots

    def _take_arrivals(self, timeout: float = 0.0) -> None:
        self._check_open()
        timeout = min(timeout, _LOOK_SECONDS)
        if not self._running:
            self._dispatch()
        tasks = list(self._running)
        if not tasks:
            time.sleep(timeout)
            return
        ready, _ = ray.wait(tasks, num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(tasks, num_returns=len(tasks), timeout=0)
        for task in ready:
            self._take(task)
        self._dispatch()

    def _take(self, task: Any) -> None:
        job = self._running.pop(task)
        try:
            reply, state = ray.get(task)
        except ray.exceptions.RayTaskError as error:
            reason = str(error).strip().splitlines()[-1]
            raise RunFailed(
                f"The client app {self._setup.app} cannot be executed: {reason}",
                log_tail=str(error),
            ) from None
        except ray.exceptions.WorkerCrashedError:
            reason = f"its process ended, in {_RETRIES + 1} attempts at this message"
            error_reply = Error(code=CLIENT_APP_CRASHED, reason=reason)
            reply, state = Message(error_reply, reply_to=job.message), None
        except ray.exceptions.RayError as error:
            self._lost(job, error)
            return
        self._finish(job, reply, state)

    def _lost(self, job: Job, error: Exception) -> None:
        """Do a job again that was lost more often than Ray itself tries it."""
        job.crashes += 1
        text = str(error).strip().splitlines()[0]
        if job.crashes >= _MOST_LOSSES:
            raise RunFailed(f"A task was lost {job.crashes} times: {text}", log_tail=str(error))
        log.warning("A task was lost and is done again: %s", text)
        self._busy_nodes.discard(job.node_id)
        self._pending.appendleft(job)
