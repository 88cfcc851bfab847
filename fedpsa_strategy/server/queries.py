"""Asking nodes who they are: their partition, how much data they have, and where they run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.pull import MOST_ASKED, Puller
from fedpsa_strategy.wire.replies import error_text, read_metrics_reply
from fedpsa_strategy.wire.text import MAX_REASON, shown


@dataclass(frozen=True)
class Answer:
    """What a node says about itself."""

    partition: int | None = None
    num_examples: int | None = None
    host: str = ""
    problem: str = ""


@dataclass(frozen=True)
class _Asked:
    node_id: int
    expires: float


class Queries:
    """Asks nodes, and collects what they answer.

    Parameters
    ----------
    grid : Grid
        Where the nodes are.
    limit : float
        How many seconds a node has to answer.
    monotonic : Callable[[], float]
        Real time.
    """

    def __init__(self, grid: Grid, limit: float, monotonic: Callable[[], float]) -> None:
        self._grid = grid
        self._limit = limit
        self._monotonic = monotonic
        self._puller = Puller(grid)
        self._waiting: dict[str, _Asked] = {}  # by message id
        self._turn: deque[str] = deque()
        self._refused: list[int] = []  # nodes to which no message could be sent

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    @property
    def nodes(self) -> set[int]:
        """The nodes that have not answered yet."""
        return {asked.node_id for asked in self._waiting.values()}

    def ask(self, node_ids: Iterable[int]) -> None:
        """Send queries."""
        expires = self._monotonic() + self._limit
        self._send([_Asked(node_id, expires) for node_id in node_ids])

    def collect(self) -> dict[int, Answer]:
        """Return the answers that have come; one without content from who does not answer."""
        answers = {node_id: Answer(problem="no answer") for node_id in self._refused}
        self._refused = []
        # Some at a time, in turn: asking for all would cost their number squared.
        looked = [self._turn.popleft() for _ in range(min(MOST_ASKED, len(self._turn)))]
        pulled = self._puller.pull(looked)
        for reply in pulled.replies:
            asked = self._waiting.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                answers[asked.node_id] = _read(reply)
        for key, problem in pulled.unreadable.items():
            answers[self._waiting.pop(key).node_id] = Answer(problem=shown(problem, MAX_REASON))
        for key in self._send([self._waiting.pop(key) for key in pulled.lost]):
            self._puller.watch(key)
        now = self._monotonic()
        for key in looked:
            if key in self._waiting and now >= self._waiting[key].expires:
                answers[self._waiting.pop(key).node_id] = Answer(problem="no answer")
            if key in self._waiting:
                self._turn.append(key)
            else:
                self._puller.forget(key)
        return answers

    def _send(self, asked: list[_Asked]) -> list[str]:
        """Send queries; return the ids of those that were accepted."""
        messages = {
            item.node_id: Message(
                RecordDict(), item.node_id, MessageType.QUERY, ttl=max(self._limit, 1.0)
            )
            for item in asked
        }
        accepted = set(self._grid.push_messages([*messages.values()])) if messages else set()
        sent = []
        for item in asked:
            key = messages[item.node_id].metadata.message_id
            if key in accepted:
                self._waiting[key] = item
                self._turn.append(key)
                sent.append(key)
            else:
                self._refused.append(item.node_id)
        return sent


def _read(reply: Message) -> Answer:
    if reply.has_error():
        return Answer(problem=error_text(reply))
    try:
        content = read_metrics_reply(reply)
    except InvalidReplyError as error:
        return Answer(problem=str(error))
    metrics = next(iter(content.metric_records.values()))
    partition, num_examples = metrics.get("partition-id"), metrics.get("num-examples")
    return Answer(
        partition=partition if isinstance(partition, int) and partition >= 0 else None,
        num_examples=num_examples if isinstance(num_examples, int) and num_examples > 0 else None,
        host=_read_host(content),
        problem="" if isinstance(partition, int) else "it told no partition-id",
    )


def _read_host(content: RecordDict) -> str:
    """Return the name of its machine that a node told, safe to show; empty if it told none."""
    host = content.config_records.get("node", ConfigRecord()).get("host-name")
    return shown(host) if isinstance(host, str) else ""
