"""A slot is never lost to one slow client."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from statistics import median

from flwr.app import Message

from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.events import Overdue
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.replies import TrainReply

log = logging.getLogger("flwr")

_WINDOW = 10  # the last response times of a client that are remembered
_FEWEST = 3  # response times from which on there is something to expect
_LEAST_DEVIATION = 0.1  # of the median: response times that are all alike are no promise


class Patience(Callback):
    """Learns response times, and gives the slots of clients that are overdue to others.

    A client is overdue when it takes longer than the others do, and longer than it usually does
    itself: longer than the median plus k median deviations, for the medians of all clients, and for
    the last ten response times of its own. Before three are known, the ceiling counts.

    Parameters
    ----------
    failures : Failures
        k, floor and ceiling.
    """

    saved = ("_times",)

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._times: dict[int, deque[float]] = {}  # by client
        self._of_fleet: float | None = None  # to be worked out again

    def begin(self, run: RunState) -> None:
        """Forget another run."""
        super().begin(run)
        self._times = {}
        self._of_fleet = None

    def read(self, task: Task, message: Message, reply: TrainReply) -> TrainReply:  # noqa: ARG002
        """Learn how long the client took, whatever becomes of its update.

        An error is no response time: it says nothing about how long training takes.
        """
        took = self.run.clock.now - self._begun(task)
        # A new deque: times from an older checkpoint come in lists.
        self._times[task.client] = deque([*self._times.get(task.client, ()), took], _WINDOW)
        self._of_fleet = None
        return reply

    def turn(self) -> None:
        """Give away the slots of those who are overdue."""
        run = self.run
        now = run.clock.now
        for task in run.in_flight.values():
            client = run.clients[task.client]
            waited = now - self._begun(task)
            if client.overdue or waited <= self._failures.overdue_floor:
                continue
            limit = self.limit(task.client)
            if waited <= limit:
                continue
            run.clients.give_slot_away(client)
            name = client.named(task.node_id)
            log.warning("Overdue: %s, after %.0f s: its slot goes to another one", name, waited)
            run.emit(Overdue(time=now, **task.about, waited=waited, limit=limit))

    def limit(self, client: int) -> float:
        """Return after how many seconds a client is overdue."""
        options = self._failures
        if self._of_fleet is None:
            known = self._times.values()
            enough = sum(map(len, known)) >= _FEWEST
            self._of_fleet = self._expected(map(median, known)) if enough else float("inf")
        limit, own = self._of_fleet, self._times.get(client, ())
        if len(own) >= _FEWEST:
            limit = max(limit, self._expected(own))
        return max(options.overdue_floor, min(limit, options.overdue_ceiling))

    def _begun(self, task: Task) -> float:
        """Return when the client could begin: a task may have waited at the node for another."""
        return max(task.made, self.run.clients[task.client].answered)

    def _expected(self, times: Iterable[float]) -> float:
        values = list(times)
        middle = median(values)
        deviation = median(abs(value - middle) for value in values)
        return middle + self._failures.overdue_factor * max(deviation, _LEAST_DEVIATION * middle)
