"""Collect: which replies are awaited, which have arrived, and which one takes effect next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from fedpsa_strategy.errors import ForgeryError
from fedpsa_strategy.server.awake import AwakeTime
from fedpsa_strategy.server.pull import MOST_ASKED, Puller
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.error_codes import (
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_UNAVAILABLE,
)

Reply = Message | ForgeryError | None  # None: it never came; an error: nobody can read it

_WAKING = 60.0  # seconds that nodes have to be heard of again after all processes were stopped


@dataclass
class Collected:
    """What a look at the grid brought.

    Parameters
    ----------
    progress : bool
        Whether anything came.
    lost : list[Task]
        Tasks whose replies were lost with one that cannot be read.
    expired : list[Task]
        Tasks that Flower gave up, while time stood still for the run.
    """

    progress: bool
    lost: list[Task] = field(default_factory=list)
    expired: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class _Question:
    """Messages that are no tasks, and what has come back."""

    expires: float
    done: Callable[[list[Reply]], None]
    outstanding: dict[str, Message] = field(default_factory=dict)  # by id
    replies: list[Reply] = field(default_factory=list)


class Inbox:
    """Collects the replies to train messages, and puts them into the order of their effect.

    Others may send messages too, with `ask`: those of a federated evaluation, for example.

    Parameters
    ----------
    run : RunState
        The run.
    grid : Grid
        Where replies come from.
    timeout : float
        Real seconds after which a reply is no longer waited for.
    awake : AwakeTime
        Real time in which replies could have come.
    """

    def __init__(
        self,
        run: RunState,
        grid: Grid,
        timeout: float,
        awake: AwakeTime,
    ) -> None:
        self._run = run
        self._grid = grid
        self._timeout = timeout
        self._awake = awake
        self._puller = Puller(grid)
        # Messages by id: what is not answered, with the time it was sent (in that order), and
        # those with a due time also in its order; what is answered; a heap of the order of effect.
        self._unanswered: dict[str, float] = {}
        self._unanswered_in_order: list[tuple[float, int, str]] = []
        self._arrived: dict[str, Reply] = {}
        self._queue: list[tuple[float, int, str]] = []
        self._num_arrived = 0
        self._last_reply = 0.0
        self._questions: list[_Question] = []

    def __len__(self) -> int:
        return len(self._unanswered)

    def begin(self) -> None:
        """Wait from now on."""
        self._last_reply = self._awake()

    def expect(self, task: Task, *, accepted: bool = True) -> None:
        """Wait for the reply to a task's message; one that was not accepted never comes."""
        self._unanswered[task.message_id] = self._awake()
        if task.due is not None:
            place = (task.due, task.sequence, task.message_id)
            heapq.heappush(self._queue, place)
            insort(self._unanswered_in_order, place)
        if not accepted:
            self._arrive(task.message_id, None)

    def expect_singly(self, task: Task) -> None:
        """Ask for the reply to this task by itself: it was sent again."""
        self._puller.watch(task.message_id)

    def ask(self, messages: list[Message], done: Callable[[list[Reply]], None]) -> None:
        """Send messages that are no tasks; `done` gets the replies that come before the timeout."""
        if messages:
            question = _Question(self._awake() + self._timeout, done)
            self._send(messages, question)
            self._questions.append(question)

    @property
    def asking(self) -> bool:
        """Whether such messages are not answered yet."""
        return bool(self._questions)

    def next_task(self) -> Task | None:
        """Return the task whose reply takes effect next, if that reply is here."""
        if not self._queue or self._queue[0][2] not in self._arrived:
            return None
        return self._run.in_flight[self._queue[0][2]]

    def take(self, task: Task) -> Reply:
        """Return the reply of the next task, which is waited for no longer."""
        heapq.heappop(self._queue)
        return self._arrived.pop(task.message_id)

    def collect(self, *, tasks: bool = True) -> Collected:
        """Pull what has arrived, with or without replies to tasks; give up what is late."""
        wanted = [key for question in self._questions for key in question.outstanding]
        if tasks:
            wanted = self._wanted() + wanted
        pulled = self._puller.pull(wanted)
        now = self._awake()
        replies: list[Message] = []
        expired: list[str] = []
        for reply in pulled.replies:
            if self._has_expired(reply, now):
                expired.append(reply.metadata.reply_to_message_id)
            else:
                replies.append(reply)
        if len(replies) > 1:
            replies.sort(key=self._sequence_of)
        for reply in replies:
            self._arrive(reply.metadata.reply_to_message_id, reply)
            self._last_reply = now
        for key, problem in pulled.unreadable.items():
            self._arrive(key, ForgeryError(problem))
            self._last_reply = now
        lost = self._lose(pulled.lost)
        again = self._lose(expired)
        while tasks and self._is_late(now):
            self._arrive(next(iter(self._unanswered)), None)
        self._close_questions(now)
        return Collected(bool(replies or pulled.unreadable or pulled.lost), lost, again)

    def _wanted(self) -> list[str]:
        """Return what to ask for, in the order in which replies will count.

        An engine of our own works on them in that order.
        """
        order = self._unanswered_in_order
        if not order:
            return list(self._unanswered)
        # Before one of them is given up, it must have been asked for.
        if len(order) > MOST_ASKED and not self._is_late(self._awake()):
            order = order[:MOST_ASKED]
        return [key for _, _, key in order]

    def _is_late(self, now: float) -> bool:
        """Tell whether the message that was sent first is given up."""
        if not self._unanswered:
            return False
        return self._is_given_up(next(iter(self._unanswered.values())), now)

    def _is_given_up(self, sent: float, now: float) -> bool:
        return now >= self._run.clock.gives_up(sent, self._last_reply, self._timeout)

    def _has_expired(self, reply: Message, now: float) -> bool:
        """Tell whether Flower gave up a message by real time, which does not count for the run.

        All processes may have been stopped, or the client waits for its turn on few processors.
        """
        key = reply.metadata.reply_to_message_id
        if not reply.has_error() or self._run.clock.real_time or key not in self._unanswered:
            return False
        if reply.metadata.src_node_id == self._run.in_flight[key].node_id:  # that is its own word
            return False
        if reply.error.code == NODE_UNAVAILABLE:
            return now < self._awake.woke + _WAKING
        unavailable = reply.error.code in (MESSAGE_UNAVAILABLE, REPLY_UNAVAILABLE)
        return unavailable and not self._is_given_up(self._unanswered[key], now)

    def _sequence_of(self, reply: Message) -> int:
        task = self._run.in_flight.get(reply.metadata.reply_to_message_id)
        return -1 if task is None else task.sequence

    def _arrive(self, message_id: str, reply: Reply) -> None:
        self._puller.forget(message_id)
        if self._unanswered.pop(message_id, None) is None:
            for question in self._questions:
                if question.outstanding.pop(message_id, None) is not None:
                    question.replies.append(reply)
            return
        self._arrived[message_id] = reply
        task = self._run.in_flight.get(message_id)
        if task is not None and task.due is not None:
            self._no_longer_in_order(task)
        else:  # first come, first served
            self._num_arrived += 1
            heapq.heappush(self._queue, (0.0, self._num_arrived, message_id))

    def _lose(self, keys: list[str]) -> list[Task]:
        """Forget messages whose replies were lost; return the tasks of the train messages."""
        tasks = []
        for key in keys:
            self._puller.forget(key)
            if self._unanswered.pop(key, None) is None:
                self._ask_again(key)
                continue
            task = self._run.in_flight[key]
            if task.due is not None:
                self._no_longer_in_order(task)
                self._queue.remove((task.due, task.sequence, key))
                heapq.heapify(self._queue)
            tasks.append(task)
        return tasks

    def _send(self, messages: list[Message], question: _Question) -> list[str]:
        """Send messages of a question; return the ids of those that were accepted."""
        accepted = set(self._grid.push_messages(messages))
        sent = {message.metadata.message_id: message for message in messages}
        new = {key: message for key, message in sent.items() if key in accepted}
        question.outstanding |= new
        return list(new)

    def _ask_again(self, message_id: str) -> None:
        """Send a message of a question again, whose reply was lost."""
        for question in self._questions:
            if (message := question.outstanding.pop(message_id, None)) is not None:
                metadata = message.metadata
                again = Message(
                    message.content, metadata.dst_node_id, metadata.message_type, ttl=metadata.ttl
                )
                for key in self._send([again], question):
                    self._puller.watch(key)

    def _close_questions(self, now: float) -> None:
        """Hand over the replies to questions that are complete, or out of time."""
        for question in list(self._questions):
            if not question.outstanding or now >= question.expires:
                self._questions.remove(question)
                question.done(question.replies)

    def _no_longer_in_order(self, task: Task) -> None:
        assert task.due is not None
        place = (task.due, task.sequence, task.message_id)
        del self._unanswered_in_order[bisect_left(self._unanswered_in_order, place)]
