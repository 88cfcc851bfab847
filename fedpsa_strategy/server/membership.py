"""Membership: waiting for nodes, asking who they are, noticing who comes and goes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from flwr.serverapp import Grid

from fedpsa_strategy.errors import AllClientsFailedError, NodesMissingError
from fedpsa_strategy.server.clients import Client
from fedpsa_strategy.server.events import NodeJoined, NodeLeft, Waiting
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.pace import NOTICE, Pace
from fedpsa_strategy.server.queries import Answer, Queries
from fedpsa_strategy.server.run_state import RunState

log = logging.getLogger("flwr")

_REFRESH = 5.0  # seconds between looks at who is connected


class Membership:
    """Knows who takes part.

    Parameters
    ----------
    run : RunState
        The run, whose `clients` are kept up to date.
    grid : Grid
        Where the nodes are.
    wanted : int
        How many nodes a run needs; exactly this many where the clock fixes them.
    failures : Failures
        How long to wait for nodes, and when to give them up.
    monotonic, sleep : Callable
        Real time.
    """

    def __init__(
        self,
        run: RunState,
        grid: Grid,
        wanted: int,
        failures: Failures,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._run = run
        self._grid = grid
        self._wanted = wanted
        self._failures = failures
        self._monotonic = monotonic
        self._sleep = sleep
        self._fixed = run.clock.fixed_nodes
        self._next_refresh = math.inf if self._fixed else 0.0
        self._queries = Queries(grid, failures.query_timeout, monotonic)

    def gather(self) -> None:
        """Wait for the nodes, and bring them into the order of their partitions."""
        failures = self._failures
        node_ids = self._wait_for_nodes()
        answers = self._query(
            node_ids, failures.node_timeout if self._fixed else failures.query_timeout
        )
        if self._fixed:
            _check_partitions(answers)
        # Nodes that did not tell their partition come last; their ids give them some order.
        known = sorted(
            answers.items(),
            key=lambda item: (item[1].partition is None, item[1].partition or 0, item[0]),
        )
        for node_id, answer in known:
            self._join(node_id, answer)

    def refresh(self) -> None:
        """Notice who came and who went."""
        self._next_refresh = self._monotonic() + _REFRESH
        run = self._run
        connected, known = set(self._grid.get_node_ids()), run.clients.node_ids
        new = sorted(connected - known - self._queries.nodes)
        if self._failures.query_timeout:  # who was here before is known
            self._queries.ask(node_id for node_id in new if not run.clients.knows(node_id))
            new = [node_id for node_id in new if run.clients.knows(node_id)]
        run.whole = False
        for node_id in sorted(known - connected):
            client = run.clients.leave(node_id)
            log.info("Left: %s", client.named(node_id))
            run.emit(NodeLeft(time=run.clock.now, node_id=node_id, client=client.index))
        for node_id in new:
            self._welcome(node_id, Answer())
        run.whole = True

    def look(self) -> None:
        """Refresh now and then, and take in those who have said who they are."""
        if self._monotonic() >= self._next_refresh:
            self.refresh()
        if not self._queries:
            return
        answers = self._queries.collect()
        self._run.whole = False
        for node_id, answer in sorted(answers.items()):
            self._welcome(node_id, answer)
        self._run.whole = True

    def check_alive(self) -> None:
        """End a run in which no client delivers; wait if no node is connected."""
        run = self._run
        clients = run.clients
        num_nodes = len(clients)
        most = self._failures.max_failures
        worn_out = run.rejected_in_a_row >= most * max(num_nodes, 1)
        # Where time moves with replies alone, every pause is for ever, whatever it is for.
        fewest = 0 if self._fixed else most
        if worn_out or (
            not run.in_flight
            and num_nodes
            and clients.num_left_out(run.clock.now, fewest) == num_nodes
        ):
            run.whole = False  # resuming would fail the same way
            reasons = "; ".join(f"{count}x {text}" for text, count in run.reasons.most_common(3))
            raise AllClientsFailedError(
                f"{run.rejected_in_a_row} replies in a row were unusable, from {num_nodes} "
                f"clients. Most frequent reasons: {reasons}"
            )
        if not run.in_flight and num_nodes == 0:
            self._wait_for_nodes()
            self._next_refresh = 0.0

    def _wait_for_nodes(self) -> set[int]:
        wanted, timeout = self._wanted, self._failures.node_timeout
        give_up = self._monotonic() + timeout
        next_notice = self._monotonic()
        while True:
            node_ids = set(self._grid.get_node_ids())
            if self._fixed and len(node_ids) > wanted:
                raise NodesMissingError(
                    f"{len(node_ids)} nodes are connected, but the run is set up for exactly "
                    f"{wanted}: make num-clients and the number of (simulated) nodes agree"
                )
            if len(node_ids) >= wanted:
                return node_ids
            if self._monotonic() >= give_up:
                raise NodesMissingError(
                    f"only {len(node_ids)} of {wanted} nodes connected within "
                    f"{timeout:g} s: start more SuperNodes (num-supernodes in a "
                    "simulation), ask for fewer clients, or raise node-timeout"
                )
            if self._monotonic() >= next_notice:
                next_notice = self._monotonic() + NOTICE
                self._notice(f"{len(node_ids)} of {wanted} nodes connected")
            self._sleep(0.2)

    def _query(self, node_ids: Iterable[int], limit: float) -> dict[int, Answer]:
        """Ask nodes for their partition and size; those that do not answer get an empty answer."""
        wanted = sorted(node_ids)
        if limit == 0:
            return {node_id: Answer() for node_id in wanted}
        queries, pace = Queries(self._grid, limit, self._monotonic), Pace(self._grid, self._sleep)
        queries.ask(wanted)
        answers: dict[int, Answer] = {}
        next_notice = self._monotonic() + NOTICE
        while len(answers) < len(wanted):
            new = queries.collect()
            answers |= new
            if new:
                pace.reset()
            if queries:
                pace.rest()
            if self._monotonic() >= next_notice:
                next_notice = self._monotonic() + NOTICE
                self._notice(f"{len(answers)} of {len(wanted)} nodes answered")
        return answers

    def _welcome(self, node_id: int, answer: Answer) -> None:
        client = self._join(node_id, answer)
        log.info("Joined: %s", client.named(node_id))

    def _join(self, node_id: int, answer: Answer) -> Client:
        run = self._run
        client = run.clients.join(node_id, answer.partition, answer.num_examples, answer.host)
        run.emit(
            NodeJoined(
                time=run.clock.now,
                node_id=node_id,
                client=client.index,
                partition=client.partition,
                num_examples=client.num_examples,
                host=client.host,
            )
        )
        return client

    def _notice(self, reason: str) -> None:
        self._run.emit(Waiting(time=self._run.clock.now, reason=reason))


def _check_partitions(answers: dict[int, Answer]) -> None:
    """Refuse a fixed set of nodes that is not known as a whole: runs must be repeatable."""
    for node_id, answer in answers.items():
        if answer.partition is None:
            raise NodesMissingError(
                f"node {node_id} did not answer the query for its partition-id, which the virtual "
                f"clock needs: {answer.problem}"
            )
    partitions = sorted(
        answer.partition for answer in answers.values() if answer.partition is not None
    )
    if partitions != list(range(len(answers))):
        raise NodesMissingError(
            f"the nodes' partition-ids are {partitions}, need each of 0..{len(answers) - 1} once"
        )
