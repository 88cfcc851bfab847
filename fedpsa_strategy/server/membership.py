"""Membership: waiting for nodes, asking who they are, noticing who comes and goes."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedpsa_strategy.errors import AllClientsFailedError, InvalidReplyError, NodesMissingError
from fedpsa_strategy.server.events import NodeJoined, NodeLeft, Waiting
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.pace import NOTICE, Pace
from fedpsa_strategy.server.pull import MOST_ASKED, Puller
from fedpsa_strategy.server.run_state import RunState
from fedpsa_strategy.wire.replies import error_text, read_metrics_reply
from fedpsa_strategy.wire.text import MAX_REASON, shown

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
        How many nodes a run needs; exactly so many where the clock fixes them.
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
        self.next_refresh = math.inf if self._fixed else 0.0

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
        self.next_refresh = self._monotonic() + _REFRESH
        run = self._run
        connected, known = set(self._grid.get_node_ids()), run.clients.node_ids
        run.whole = False
        for node_id in sorted(known - connected):
            client = run.clients.leave(node_id)
            log.info("Left: %s", client.named(node_id))
            run.emit(NodeLeft(time=run.clock.now, node_id=node_id, client=client.index))
        for node_id in sorted(connected - known):
            log.info("Node %d joined", node_id)
            self._join(node_id, _Answer())
        run.whole = True

    def check_alive(self) -> None:
        """End a run in which no client delivers; wait if nobody is connected."""
        run = self._run
        clients = run.clients
        num_nodes = len(clients)
        worn_out = run.rejected_in_a_row >= self._failures.max_failures * max(num_nodes, 1)
        if worn_out or (
            not run.in_flight
            and num_nodes
            and clients.num_failing(run.clock.now, self._failures.max_failures) == num_nodes
        ):
            run.whole = False  # resuming would fail the same way
            reasons = "; ".join(f"{count}x {text}" for text, count in run.reasons.most_common(3))
            raise AllClientsFailedError(
                f"{run.rejected_in_a_row} replies in a row were unusable, from {num_nodes} "
                f"clients. Most frequent reasons: {reasons}"
            )
        if not run.in_flight and num_nodes == 0:
            self._wait_for_nodes()
            self.next_refresh = 0.0

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

    def _query(self, node_ids: Iterable[int], limit: float) -> dict[int, _Answer]:
        """Ask nodes for their partition and size; those that do not answer get an empty answer."""
        answers = {node_id: _Answer(problem="no answer") for node_id in node_ids}
        if limit == 0:
            return answers
        puller, pace = Puller(self._grid), Pace(self._grid, self._sleep)
        waiting = self._ask(sorted(answers), limit)
        turn = deque(waiting)
        give_up = self._monotonic() + limit
        next_notice = self._monotonic() + NOTICE
        while waiting and self._monotonic() < give_up:
            # Some at a time, in turn: asking for all would cost their number squared.
            asked = [turn.popleft() for _ in range(min(MOST_ASKED, len(turn)))]
            pulled = puller.pull(asked)
            for reply in pulled.replies:
                node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node_id is not None:
                    answers[node_id] = _read_answer(reply)
            for key, problem in pulled.unreadable.items():
                answers[waiting.pop(key)] = _Answer(problem=shown(problem, MAX_REASON))
            again = self._ask([waiting.pop(key) for key in pulled.lost], limit)
            for key in again:
                puller.watch(key)
            for key in asked:
                if key not in waiting:
                    puller.forget(key)
            turn.extend(again)
            turn.extend(key for key in asked if key in waiting)
            waiting |= again
            if pulled.replies or pulled.unreadable or pulled.lost:
                pace.reset()
            if waiting:
                pace.rest()
            if self._monotonic() >= next_notice:
                next_notice = self._monotonic() + NOTICE
                self._notice(f"{len(answers) - len(waiting)} of {len(answers)} nodes answered")
        return answers

    def _ask(self, node_ids: Iterable[int], limit: float) -> dict[str, int]:
        """Send queries; return the nodes by the ids of those that were accepted."""
        messages = [
            Message(RecordDict(), node_id, MessageType.QUERY, ttl=max(limit, 1.0))
            for node_id in node_ids
        ]
        accepted = set(self._grid.push_messages(messages)) if messages else set()
        sent = {message.metadata.message_id: message for message in messages}
        return {key: sent[key].metadata.dst_node_id for key in sent if key in accepted}

    def _join(self, node_id: int, answer: _Answer) -> None:
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

    def _notice(self, reason: str) -> None:
        self._run.emit(Waiting(time=self._run.clock.now, reason=reason))


@dataclass(frozen=True)
class _Answer:
    """What a node says about itself."""

    partition: int | None = None
    num_examples: int | None = None
    host: str = ""
    problem: str = ""


def _read_answer(reply: Message) -> _Answer:
    if reply.has_error():
        return _Answer(problem=error_text(reply))
    try:
        content = read_metrics_reply(reply)
    except InvalidReplyError as error:
        return _Answer(problem=str(error))
    metrics = next(iter(content.metric_records.values()))
    partition, num_examples = metrics.get("partition-id"), metrics.get("num-examples")
    return _Answer(
        partition=partition if isinstance(partition, int) and partition >= 0 else None,
        num_examples=num_examples if isinstance(num_examples, int) and num_examples > 0 else None,
        host=_read_host(content),
        problem="" if isinstance(partition, int) else "it told no partition-id",
    )


def _read_host(content: RecordDict) -> str:
    """Return the name of its machine that a node told, safe to show; empty if it told none."""
    host = content.config_records.get("node", ConfigRecord()).get("host-name")
    return shown(host) if isinstance(host, str) else ""


def _check_partitions(answers: dict[int, _Answer]) -> None:
    """Where the nodes are fixed everybody has to be known, for runs that can be repeated."""
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
