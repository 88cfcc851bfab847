"""A grid whose nodes do what a script says, in time that the test controls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from fedpsa_strategy.wire.contract import MARK, STATES, mark

Behaviour = Callable[[Message], RecordDict | Error | None]


class FakeTime:
    """Real time as the loop sees it: sleeping makes it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RealTime:
    """For `start()`, which knows no other."""

    sleep = staticmethod(time.sleep)

    @property
    def now(self) -> float:
        return time.monotonic()


class ScriptedGrid(Grid):
    """Nodes answer with `behaviour(message)` after `delay(message)` seconds of fake time.

    By default with an update of ones; a number is the delay of all.
    """

    def __init__(
        self,
        num_nodes: int,
        behaviour: Behaviour | None = None,
        *,
        time: FakeTime | None = None,
        delay: Callable[[Message], float] | float = 0.01,
        partition_of: Callable[[int], int | None] | None = None,
    ) -> None:
        self.time = time or FakeTime()
        self.nodes = [1000 + 7 * ((num_nodes - i) % num_nodes) for i in range(num_nodes)]
        self.behaviour = behaviour or (lambda message: update())
        self.delay = delay if callable(delay) else lambda message: delay
        self.partition_of = partition_of or (lambda node: sorted(self.nodes).index(node))
        self.ids = itertools.count()
        self.pending: dict[str, tuple[float, Message]] = {}
        self.sent: list[Message] = []
        self.outstanding_train = 0
        self.most_outstanding = 0
        self.refuse_push: Callable[[Message], bool] = lambda message: False

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError("an asynchronous strategy must not wait for everybody")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        accepted = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self.ids)}"
            self.sent.append(message)
            if self.refuse_push(message):
                continue
            accepted.append(message.metadata.message_id)
            self.pending[message.metadata.message_id] = (
                self.time.now + self.delay(message),
                message,
            )
            if message.metadata.message_type == MessageType.TRAIN:
                self.outstanding_train += 1
                self.most_outstanding = max(self.most_outstanding, self.outstanding_train)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            if message_id not in self.pending or self.pending[message_id][0] > self.time.now:
                continue
            message = self.pending.pop(message_id)[1]
            if message.metadata.message_type == MessageType.TRAIN:
                self.outstanding_train -= 1
            if message.metadata.message_type == MessageType.QUERY:
                answer = self._about(message.metadata.dst_node_id)
            else:
                answer = self.behaviour(message)
            if answer is not None:
                replies.append(Message(answer, reply_to=message))
        return replies

    def _about(self, node: int) -> RecordDict | Error | None:
        partition = self.partition_of(node)
        if partition is None:
            return Error(code=2, reason="no query function")
        metrics = MetricRecord({"partition-id": partition, "num-examples": 10})
        return RecordDict({"metrics": metrics})

    def partition(self, message: Message) -> int:
        return sorted(self.nodes).index(message.metadata.dst_node_id)


class Stopped(BaseException):
    """What a grid says when the run has been ended elsewhere."""


class Ending(ScriptedGrid):
    """Ends the run after some pulls of train replies; `None`: never."""

    def __init__(self, *args, pulls: int | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.pulls = pulls

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self.pulls is not None and self.outstanding_train:
            if self.pulls == 0:
                raise Stopped
            self.pulls -= 1
        return super().pull_messages(message_ids)


class Unreadable(RecordDict):
    """A reply that Flower cannot decode, such as one with a metric without a value."""


class DecodingGrid(ScriptedGrid):
    """A grid that does what Flower's does with replies that it cannot decode.

    What a pull finds is deleted, then decoded: if one reply is `Unreadable`, all are lost. Asked
    for a message that it does not know any more, it answers with an error.
    """

    def __init__(self, *args, unreadable_query=lambda node: False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.unreadable_query = unreadable_query
        self.known: dict[str, Message] = {}
        self.pulls: list[list[str]] = []
        self.raised = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        accepted = list(super().push_messages(messages))
        self.known |= {message.metadata.message_id: message for message in messages}
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        message_ids = list(message_ids)
        self.pulls.append(message_ids)
        gone = [key for key in message_ids if key not in self.pending]
        replies = list(super().pull_messages(message_ids))
        if any(reply.has_content() and isinstance(reply.content, Unreadable) for reply in replies):
            self.raised += 1
            raise ValueError("Value must be int or float, not None\x1b[31m")
        unavailable = Error(code=3, reason="Error: Message Unavailable")
        return replies + [Message(unavailable, reply_to=self.known[key]) for key in gone]

    def _about(self, node: int) -> RecordDict | Error | None:
        return Unreadable() if self.unreadable_query(node) else super()._about(node)


def model_arrays(values=(0.0, 0.0), dtype=np.float32, **more) -> ArrayRecord:
    arrays = {"w": Array(np.asarray(values, dtype))}
    return ArrayRecord(arrays | {key: Array(np.asarray(value)) for key, value in more.items()})


def update(
    values=(1.0, 1.0), *, num_examples=10, dtype=np.float32, sketch=(1.0, 0.0), head=None, **more
) -> RecordDict:
    """Return a reply with the updates of w and head, and `more` as values of untrained arrays."""
    metrics = MetricRecord({"num-examples": num_examples, "train-loss": 0.5})
    if sketch is not None:
        metrics["sketch"] = [float(value) for value in sketch]
    deltas = {"w": np.asarray(values, dtype)} | ({} if head is None else {"head": head})
    return as_update(deltas, more, metrics)


def as_update(deltas, states, metrics) -> RecordDict:
    """Return the records of a reply that is marked as an update."""
    records = {"arrays": ArrayRecord({key: Array(np.asarray(d)) for key, d in deltas.items()})}
    if states:
        records[STATES] = ArrayRecord({key: Array(np.asarray(v)) for key, v in states.items()})
    return RecordDict({**records, "metrics": metrics, MARK: ConfigRecord(mark())})


def statistics(rng, **changes):
    values = {
        "centroids": rng.normal(size=(2, 1)).astype(np.float32),
        "features": rng.normal(size=(2, 1)).astype(np.float32),
        "class-counts": np.array([3, 2]),
        "variance": np.asarray(0.5, np.float32),
    }
    return ArrayRecord({key: Array(np.asarray(v)) for key, v in (values | changes).items()})


class FlowersGrid(ScriptedGrid):
    """Also does what Flower's synchronous strategies ask for."""

    def send_and_receive(self, messages, *, timeout=None):
        ids = list(self.push_messages(messages))
        self.time.sleep(0.1)
        return list(self.pull_messages(ids))
