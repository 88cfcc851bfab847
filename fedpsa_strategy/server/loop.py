"""The asynchronous loop: one for all engines, clocks and rules."""

from __future__ import annotations

import heapq
import logging
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedpsa_strategy.errors import (
    AllClientsFailedError,
    ForgeryError,
    InvalidReplyError,
    NodesMissingError,
)
from fedpsa_strategy.server.clock import VirtualClock
from fedpsa_strategy.server.events import (
    Evaluated,
    NodeJoined,
    NodeLeft,
    RunEnded,
    RunStarted,
    Waiting,
)
from fedpsa_strategy.server.inbox import Inbox
from fedpsa_strategy.server.snapshot import restore_snapshot, take_snapshot
from fedpsa_strategy.wire.replies import error_text, read_metrics_reply
from fedpsa_strategy.wire.text import MAX_REASON, shown

if TYPE_CHECKING:
    from fedpsa_strategy.server.strategy import AsyncStrategy, Task

log = logging.getLogger("flwr")

STOP_REQUESTED = "a stop was requested"

# Polling a real grid costs a round trip: back off while nothing arrives, start anew when it does.
_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25
_NODE_REFRESH = 5.0  # seconds between looks at who is connected
_MOST_ASKED = 128  # replies asked for at a time, where others can wait
_STOP_CHECK = 0.5  # seconds between two questions whether to stop
_WAIT_NOTICE = 2.0  # seconds of silence after which listeners are told that the run is alive


@dataclass
class _Evaluation:
    """A federated evaluation whose replies are still coming in."""

    version: int
    uploads: int
    expires: float
    outstanding: dict[str, Message]  # what was sent, by id
    replies: list[Message] = field(default_factory=list)


class AsyncLoop:
    """Runs a strategy on a grid.

    Parameters
    ----------
    strategy : AsyncStrategy
        Decides what is sent and what becomes of replies; holds the run's state.
    grid : Grid
        Where the nodes are.
    num_versions : int
        Versions to make.
    timeout : float
        Real seconds after which a reply is no longer waited for. With the virtual clock they count
        from the last reply of any client: simulated clients take turns on few processors.
    train_config, evaluate_config : ConfigRecord
        Sent with the messages.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
        Centralised evaluation.
    monotonic, sleep : Callable
        Real time, for waiting; the run's own time is the strategy's clock.
    perf_counter : Callable
        Real time, for how long the strategy takes.
    """

    def __init__(
        self,
        strategy: AsyncStrategy,
        grid: Grid,
        *,
        num_versions: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        perf_counter: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.strategy = strategy
        self.grid = grid
        self.num_versions = num_versions
        self.timeout = timeout
        self.train_config = train_config
        self.evaluate_config = evaluate_config
        self.evaluate_fn = evaluate_fn
        self.monotonic = monotonic
        self.sleep = sleep
        self.perf_counter = perf_counter
        # A grid in this process can tell when something arrives; others have to be polled.
        self._wait = getattr(grid, "wait", None)
        self._rest = self._wait or sleep
        self._inbox = Inbox(grid)
        self.result = Result(arrays=strategy.state.arrays)
        # Train messages by id. What is not answered yet, with the time to give up (in that order),
        # and with the virtual clock also in the order in which the replies will count; what is
        # answered (None: it never came; an error: nobody can read it); and a heap of the order in
        # which replies count.
        self._unanswered: dict[str, float] = {}
        self._unanswered_in_order: list[tuple[float, int, str]] = []
        self._arrived: dict[str, Message | ForgeryError | None] = {}
        self._queue: list[tuple[float, int, str]] = []
        self._num_arrived = 0
        self._evaluations: list[_Evaluation] = []
        self._pause = _FIRST_PAUSE
        self._silent_since = 0.0
        self._last_reply = 0.0
        self._next_refresh = 0.0
        self._next_evaluation = strategy.evaluate_interval or 0.0
        self._evaluated: tuple[int, float] | None = None  # version and time of the last evaluation
        self._accuracy: float | None = None
        self._next_stop_check = 0.0
        self._consistent = True  # whether the state is whole, so that it can be saved
        self._server_seconds = 0.0  # spent on aggregation, before an interruption too

    def run(self) -> Result:
        """Run to the end and return Flower's result."""
        strategy, state, clock = self.strategy, self.strategy.state, self.strategy.clock
        saved = strategy.resume_from
        tasks = [] if saved is None else self._load_state_dict(saved)
        start_time = 0.0 if saved is None else saved["time"]
        clock.hold(start_time)  # waiting for nodes does not count as run time
        self._gather_nodes()
        clock.start(start_time)
        self._started = self._silent_since = self._last_reply = self.monotonic()
        strategy.emit(
            RunStarted(
                time=clock.now,
                num_clients=len(state.clients),
                max_in_flight=strategy.concurrency,
                num_parameters=state.layout.size,
                version=state.version,
                uploads=state.uploads,
                rejected=state.rejected,
            )
        )
        if saved is None:
            self._evaluate()
        else:
            self._send(strategy.resume_messages(tasks, self.train_config))
        if strategy.checkpointer is not None:
            strategy.checkpointer.begin(state.version)
        try:
            while (reason := self._stop_reason()) is None:
                self._refresh_nodes()
                self._dispatch()
                self._check_alive()
                self._poll()
                with self._changing():
                    self._process_next()
                self._save_checkpoint(only_if_due=True)
        except BaseException:  # a signal, or a grid that says the run is over
            self._save_checkpoint()
            raise
        stopped = reason == STOP_REQUESTED
        if stopped:  # nobody waits for clients any more
            self._save_checkpoint()
        # The last point of a curve over virtual time is the end; real time has moved on already.
        if self._evaluated != (state.version, clock.now if clock.virtual else self._evaluated_at):
            self._evaluate(on_clients=not stopped)
        if not stopped:
            self._finish_evaluations()
        log.info("The run ends: %s", reason)
        strategy.emit(
            RunEnded(
                time=clock.now,
                version=state.version,
                uploads=state.uploads,
                rejected=state.rejected,
                reason=reason,
                server_seconds=self._server_seconds,
            )
        )
        self.result.arrays = state.arrays
        return self.result

    @property
    def _evaluated_at(self) -> float | None:
        return None if self._evaluated is None else self._evaluated[1]

    # --- Checkpoints ---------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark a change of the state that must not be seen, and saved, half done.

        Outside of these, an exception leaves a state that can be saved. What a grid does is always
        outside: that is where a run waits, and where it learns that it has been ended.
        """
        self._consistent = False
        yield
        self._consistent = True  # not after an exception

    def _save_checkpoint(self, *, only_if_due: bool = False) -> None:
        strategy, state = self.strategy, self.strategy.state
        checkpointer = strategy.checkpointer
        # In the middle of a step the state is neither before nor after it: the last one counts.
        if checkpointer is None or not self._consistent:
            return
        if not only_if_due or checkpointer.due(state.version):
            checkpointer.save(state.sequence, state.version, self._state_dict())

    def _state_dict(self) -> dict[str, Any]:
        histories = (
            self.result.train_metrics_clientapp,
            self.result.evaluate_metrics_clientapp,
            self.result.evaluate_metrics_serverapp,
        )
        return take_snapshot(self.strategy) | {
            "histories": [
                [[version, dict(metrics)] for version, metrics in history.items()]
                for history in histories
            ],
            "next_evaluation": self._next_evaluation,
            "evaluated": self._evaluated,
            "accuracy": self._accuracy,
            "server_seconds": self._server_seconds,
        }

    def _load_state_dict(self, saved: dict[str, Any]) -> list[Task]:
        tasks = restore_snapshot(self.strategy, saved)
        train, on_clients, on_server = (
            {version: MetricRecord(metrics) for version, metrics in history}
            for history in saved["histories"]
        )
        self.result = Result(self.strategy.state.arrays, train, on_clients, on_server)
        self._next_evaluation = saved["next_evaluation"]
        self._evaluated = tuple(saved["evaluated"]) if saved["evaluated"] else None
        self._accuracy = saved["accuracy"]
        self._server_seconds = saved.get("server_seconds", 0.0)
        return tasks

    # --- Nodes ---------------------------------------------------------------------------------

    def _gather_nodes(self) -> None:
        """Wait for the nodes, and bring them into the order of their partitions."""
        strategy = self.strategy
        wanted = strategy.num_clients if strategy.clock.virtual else strategy.min_available_nodes
        assert wanted is not None
        node_ids = self._wait_for_nodes(wanted, exactly=strategy.clock.virtual)
        answers = self._query(node_ids)
        if strategy.clock.virtual:
            _check_partitions(answers)
        # Nodes that did not tell their partition come last; their ids give them some order.
        known = sorted(
            answers.items(),
            key=lambda item: (item[1].partition is None, item[1].partition or 0, item[0]),
        )
        for node_id, answer in known:
            self._join(node_id, answer)

    def _wait_for_nodes(self, wanted: int, *, exactly: bool) -> set[int]:
        give_up = self.monotonic() + self.strategy.node_timeout
        next_notice = self.monotonic()
        while True:
            node_ids = set(self.grid.get_node_ids())
            if exactly and len(node_ids) > wanted:
                raise NodesMissingError(
                    f"{len(node_ids)} nodes are connected, but the run is set up for exactly "
                    f"{wanted}: make num-clients and the number of (simulated) nodes agree"
                )
            if len(node_ids) >= wanted:
                return node_ids
            if self.monotonic() >= give_up:
                raise NodesMissingError(
                    f"only {len(node_ids)} of {wanted} nodes connected within "
                    f"{self.strategy.node_timeout:g} s: start more SuperNodes (num-supernodes in a "
                    "simulation), ask for fewer clients, or raise node-timeout"
                )
            if self.monotonic() >= next_notice:
                next_notice = self.monotonic() + _WAIT_NOTICE
                self._notice(f"{len(node_ids)} of {wanted} nodes connected")
            self.sleep(0.2)

    def _query(self, node_ids: Iterable[int]) -> dict[int, _Answer]:
        """Ask nodes for their partition and size; those that do not answer get an empty answer."""
        virtual = self.strategy.clock.virtual
        limit = self.strategy.node_timeout if virtual else self.strategy.query_timeout
        answers = {node_id: _Answer(problem="no answer") for node_id in node_ids}
        if limit == 0:
            return answers
        messages = [_query_message(node_id, limit) for node_id in sorted(answers)]
        pushed = set(self.grid.push_messages(messages))
        waiting = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in messages
            if message.metadata.message_id in pushed
        }
        give_up = self.monotonic() + limit
        pause, next_notice = _FIRST_PAUSE, self.monotonic() + _WAIT_NOTICE
        turn = deque(waiting)
        while waiting and self.monotonic() < give_up:
            # Some at a time, in turn: asking for all would cost their number squared.
            asked = [turn.popleft() for _ in range(min(_MOST_ASKED, len(turn)))]
            pulled = self._inbox.pull(asked)
            for reply in pulled.replies:
                node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node_id is not None:
                    answers[node_id] = _read_answer(reply)
            for key, problem in pulled.unreadable.items():
                answers[waiting.pop(key)] = _Answer(problem=shown(problem, MAX_REASON))
            again = [_query_message(waiting.pop(key), limit) for key in pulled.lost]
            repeated = self._push_again(again)
            for message in again:
                if (message_id := message.metadata.message_id) in repeated:
                    waiting[message_id] = message.metadata.dst_node_id
                    turn.append(message_id)
            for key in asked:
                if key not in waiting:
                    self._inbox.forget(key)
            turn.extend(key for key in asked if key in waiting)
            progress = pulled.replies or pulled.unreadable or pulled.lost
            pause = _FIRST_PAUSE if progress else min(2 * pause, _LONGEST_PAUSE)
            if waiting:
                self._rest(pause)
            if self.monotonic() >= next_notice:
                next_notice = self.monotonic() + _WAIT_NOTICE
                self._notice(f"{len(answers) - len(waiting)} of {len(answers)} nodes answered")
        return answers

    def _join(self, node_id: int, answer: _Answer) -> None:
        client = self.strategy.state.clients.join(
            node_id, answer.partition, answer.num_examples, answer.host
        )
        self.strategy.emit(
            NodeJoined(
                time=self.strategy.clock.now,
                node_id=node_id,
                client=client.index,
                partition=client.partition,
                num_examples=client.num_examples,
                host=client.host,
            )
        )

    def _refresh_nodes(self) -> None:
        """Notice who came and who went; with the virtual clock the nodes are fixed."""
        if self.strategy.clock.virtual or self.monotonic() < self._next_refresh:
            return
        self._next_refresh = self.monotonic() + _NODE_REFRESH
        clients = self.strategy.state.clients
        connected, known = set(self.grid.get_node_ids()), clients.node_ids
        with self._changing():
            for node_id in sorted(known - connected):
                client = clients.leave(node_id)
                log.info("Left: %s", client.named(node_id))
                self.strategy.emit(
                    NodeLeft(time=self.strategy.clock.now, node_id=node_id, client=client.index)
                )
            for node_id in sorted(connected - known):
                log.info("Node %d joined", node_id)
                self._join(node_id, _Answer())

    # --- Messages ------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Fill the free slots."""
        strategy, state = self.strategy, self.strategy.state
        if state.clients.num_busy >= strategy.concurrency:
            return
        with self._changing():
            messages = list(
                strategy.configure_train(
                    state.version + 1, state.arrays, self.train_config, self.grid
                )
            )
        self._send(messages)

    def _send(self, messages: list[Message]) -> None:
        """Push train messages and wait for their replies from now on."""
        if not messages:
            return
        strategy = self.strategy
        accepted = set(self.grid.push_messages(messages))
        expires = self.monotonic() + self.timeout
        with self._changing():
            for task in strategy.confirm_sent(messages):
                self._unanswered[task.message_id] = expires
                if task.due is not None:
                    place = (task.due, task.sequence, task.message_id)
                    heapq.heappush(self._queue, place)
                    insort(self._unanswered_in_order, place)
                if task.message_id not in accepted:
                    self._arrive(task.message_id, None)
            for task, _ in list(strategy.state.prepared.values()):
                strategy.reject(task, "the message could not be sent")

    def _poll(self) -> None:
        """Collect what has arrived, or sleep a little; not needed while a reply is at hand."""
        if self._ready_task() is not None:
            return
        # In the order in which they will count: an engine of our own works on them in that order.
        order = self._unanswered_in_order
        # But before one of them is given up, it must have been asked for.
        asked = order if self._is_late(self.monotonic()) else order[:_MOST_ASKED]
        wanted = [key for _, _, key in asked] or list(self._unanswered)
        wanted += [key for evaluation in self._evaluations for key in evaluation.outstanding]
        progress = self._collect(wanted)
        now = self.monotonic()
        while self._is_late(now):
            self._arrive(next(iter(self._unanswered)), None)
        self._close_evaluations(now)
        if progress or self._ready_task() is not None:
            self._pause, self._silent_since = _FIRST_PAUSE, now
            return
        if now - self._silent_since >= _WAIT_NOTICE:
            self._silent_since = now
            self._notice(f"{len(self._unanswered)} clients at work")
        with self._server_time():
            self.strategy.prepare()
        if self._wait is not None:
            self._wait(_LONGEST_PAUSE)
            return
        self.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _collect(self, wanted: list[str]) -> bool:
        """Pull replies and note them; tell whether anything came."""
        pulled = self._inbox.pull(wanted)
        now = self.monotonic()
        for reply in sorted(pulled.replies, key=self._sequence_of):
            self._arrive(reply.metadata.reply_to_message_id, reply)
            self._last_reply = now
        for key, problem in pulled.unreadable.items():
            self._arrive(key, ForgeryError(problem))
            self._last_reply = now
        if pulled.lost:
            self._send_again(pulled.lost)
        return bool(pulled.replies or pulled.unreadable or pulled.lost)

    def _send_again(self, lost: list[str]) -> None:
        """Send messages again whose replies were lost with one that cannot be read.

        A task keeps its number, its seed and its due time: with the virtual clock the run ends in
        the same bits as if nothing had been lost.
        """
        log.warning("%d replies were lost with one that cannot be read: sent again", len(lost))
        tasks = []
        for key in lost:
            self._inbox.forget(key)
            for evaluation in self._evaluations:
                if (message := evaluation.outstanding.pop(key, None)) is not None:
                    metadata = message.metadata
                    again = Message(
                        message.content,
                        metadata.dst_node_id,
                        metadata.message_type,
                        ttl=self.strategy.message_ttl,
                    )
                    if self._push_again([again]):
                        evaluation.outstanding[again.metadata.message_id] = again
            if self._unanswered.pop(key, None) is not None:
                task = self.strategy.state.in_flight[key]
                tasks.append(task)
                if task.due is not None:
                    place = (task.due, task.sequence, key)
                    del self._unanswered_in_order[bisect_left(self._unanswered_in_order, place)]
                    self._queue.remove(place)
                    heapq.heapify(self._queue)
        with self._changing():
            messages = self.strategy.repeat_messages(tasks, self.train_config)
        self._send(messages)
        for task in tasks:
            self._inbox.watch(task.message_id)

    def _push_again(self, messages: list[Message]) -> list[str]:
        """Push messages whose replies are pulled singly; return the ids of those accepted."""
        accepted = list(self.grid.push_messages(messages)) if messages else []
        for message_id in accepted:
            self._inbox.watch(message_id)
        return accepted

    def _is_late(self, now: float) -> bool:
        """Tell whether the message that was sent first is given up."""
        if not self._unanswered:
            return False
        expires = next(iter(self._unanswered.values()))
        if isinstance(self.strategy.clock, VirtualClock):
            expires = max(expires, self._last_reply + self.timeout)
        return now >= expires

    def _sequence_of(self, reply: Message) -> int:
        task = self.strategy.state.in_flight.get(reply.metadata.reply_to_message_id)
        return -1 if task is None else task.sequence

    def _arrive(self, message_id: str, reply: Message | ForgeryError | None) -> None:
        self._inbox.forget(message_id)
        for evaluation in self._evaluations:
            if evaluation.outstanding.pop(message_id, None) is not None:
                if isinstance(reply, Message):
                    evaluation.replies.append(reply)
                elif reply is not None:
                    log.warning(
                        "Evaluation of version %d: a reply is left out: %s",
                        evaluation.version,
                        shown(reply, MAX_REASON),
                    )
                return
        if self._unanswered.pop(message_id, None) is None:
            return
        self._arrived[message_id] = reply
        task = self.strategy.state.in_flight.get(message_id)
        if task is not None and task.due is not None:
            place = (task.due, task.sequence, message_id)
            del self._unanswered_in_order[bisect_left(self._unanswered_in_order, place)]
        else:  # first come, first served
            self._num_arrived += 1
            heapq.heappush(self._queue, (0.0, self._num_arrived, message_id))

    def _ready_task(self) -> Task | None:
        """Return the task whose reply takes effect next, if that reply is here."""
        if not self._queue or self._queue[0][2] not in self._arrived:
            return None
        return self.strategy.state.in_flight[self._queue[0][2]]

    @contextmanager
    def _server_time(self) -> Iterator[None]:
        started = self.perf_counter()
        yield
        self._server_seconds += self.perf_counter() - started

    def _process_next(self) -> None:
        """Let the next reply take effect, if it is here."""
        strategy, state, clock = self.strategy, self.strategy.state, self.strategy.clock
        task = self._ready_task()
        if isinstance(clock, VirtualClock):
            if task is None or task.due is None:
                return
            if self._evaluate_until(task.due) or self._stop_before(task.due):
                return
            clock.advance(task.due)
        elif self._evaluate_until(clock.now) or task is None:
            return
        assert task is not None
        heapq.heappop(self._queue)
        reply = self._arrived.pop(task.message_id)
        version = state.version
        if reply is None:
            strategy.reject(task, f"no reply within {self.timeout:g} s")
        elif isinstance(reply, ForgeryError):
            strategy.reject(task, str(reply), quarantine=True)
        else:
            with self._server_time():
                strategy.aggregate_train(version + 1, [reply])
        if state.version == version:
            return
        if state.version_metrics is not None:
            self.result.train_metrics_clientapp[state.version] = state.version_metrics
        if strategy.evaluate_interval is None and state.version % strategy.evaluate_every == 0:
            self._evaluate()

    # --- Evaluation ----------------------------------------------------------------------------

    def _evaluate_until(self, moment: float) -> bool:
        """Evaluate on the grid of times that lie before `moment`; True if that ends the run."""
        strategy, clock = self.strategy, self.strategy.clock
        if strategy.evaluate_interval is None:
            return False
        while self._next_evaluation < moment:
            if self._stop_before(self._next_evaluation):
                return True
            if isinstance(clock, VirtualClock):
                clock.advance(self._next_evaluation)
                self._next_evaluation += strategy.evaluate_interval
            else:  # late is late: one evaluation for all that were missed
                while self._next_evaluation < moment:
                    self._next_evaluation += strategy.evaluate_interval
            self._evaluate()
            if self._stop_reason() is not None:
                return True
        return False

    def _evaluate(self, *, on_clients: bool = True) -> None:
        """Evaluate the current version, here and, if the strategy wants it, on clients."""
        strategy, state = self.strategy, self.strategy.state
        if self.evaluate_fn is not None:
            # Between two points of the time grid the model may not have moved.
            metrics = self.result.evaluate_metrics_serverapp.get(state.version)
            if metrics is None:
                metrics = self.evaluate_fn(state.version, state.arrays)
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[state.version] = metrics
                self._emit_evaluated(state.version, state.uploads, "server", metrics)
                accuracy = metrics.get("accuracy")
                self._accuracy = accuracy if isinstance(accuracy, float) else None
        moved = self._evaluated is None or self._evaluated[0] != state.version
        self._evaluated = (state.version, strategy.clock.now)
        if not moved or not on_clients:
            return
        messages = list(
            strategy.configure_evaluate(
                state.version, state.arrays, self.evaluate_config, self.grid
            )
        )
        if messages:
            accepted = set(self.grid.push_messages(messages))
            sent = {message.metadata.message_id: message for message in messages}
            outstanding = {key: message for key, message in sent.items() if key in accepted}
            expires = self.monotonic() + self.timeout
            self._evaluations.append(
                _Evaluation(state.version, state.uploads, expires, outstanding)
            )

    def _close_evaluations(self, now: float) -> None:
        """Combine federated evaluations that are complete, or out of time."""
        still_open = []
        for evaluation in self._evaluations:
            if evaluation.outstanding and now < evaluation.expires:
                still_open.append(evaluation)
                continue
            metrics = self.strategy.aggregate_evaluate(evaluation.version, evaluation.replies)
            if metrics is not None:
                self.result.evaluate_metrics_clientapp[evaluation.version] = metrics
                self._emit_evaluated(evaluation.version, evaluation.uploads, "clients", metrics)
        self._evaluations = still_open

    def _finish_evaluations(self) -> None:
        """Wait for federated evaluations at the end of a run."""
        pause = _FIRST_PAUSE
        while self._evaluations:
            outstanding = [key for item in self._evaluations for key in item.outstanding]
            progress = self._collect(outstanding)
            self._close_evaluations(self.monotonic())
            if self._evaluations:
                pause = _FIRST_PAUSE if progress else min(2 * pause, _LONGEST_PAUSE)
                self._rest(pause)

    def _emit_evaluated(
        self, version: int, uploads: int, where: str, metrics: MetricRecord
    ) -> None:
        self.strategy.emit(
            Evaluated(
                time=self.strategy.clock.now,
                version=version,
                uploads=uploads,
                where=where,
                metrics=dict(metrics),
            )
        )

    # --- The end -------------------------------------------------------------------------------

    def _stop_reason(self) -> str | None:
        strategy, state = self.strategy, self.strategy.state
        if state.version >= self.num_versions:
            return f"{self.num_versions} versions are made"
        if strategy.deadline is not None and strategy.clock.now >= strategy.deadline:
            return f"the deadline {strategy.deadline:g} is reached"
        target = strategy.target_accuracy
        if target is not None and self._accuracy is not None and self._accuracy >= target:
            return f"accuracy {self._accuracy:.4f} reaches the target {target:g}"
        if strategy.stop_fn is not None and self.monotonic() >= self._next_stop_check:
            self._next_stop_check = self.monotonic() + _STOP_CHECK
            if strategy.stop_fn():
                return STOP_REQUESTED
        limit = strategy.time_limit
        if limit is not None and self.monotonic() - self._started >= limit:
            return f"the time limit of {limit:g} s is reached"
        return None

    def _stop_before(self, moment: float) -> bool:
        """With the virtual clock: stop at the deadline if it comes before `moment`."""
        clock, deadline = self.strategy.clock, self.strategy.deadline
        if deadline is None or moment <= deadline or not isinstance(clock, VirtualClock):
            return False
        clock.advance(deadline)
        return True

    def _check_alive(self) -> None:
        """End a run that cannot go on, with a text that says why."""
        strategy, state = self.strategy, self.strategy.state
        num_nodes = len(state.clients)
        worn_out = state.rejected_in_a_row >= strategy.max_failures * max(num_nodes, 1)
        if worn_out or (not state.in_flight and num_nodes and self._all_paused()):
            self._consistent = False  # who goes on from here would end here again
            reasons = "; ".join(f"{count}x {text}" for text, count in state.reasons.most_common(3))
            raise AllClientsFailedError(
                f"{state.rejected_in_a_row} replies in a row were unusable, from {num_nodes} "
                f"clients. Most frequent reasons: {reasons}"
            )
        if not state.in_flight and num_nodes == 0:
            self._wait_for_nodes(strategy.min_available_nodes, exactly=False)
            self._next_refresh = 0.0

    def _all_paused(self) -> bool:
        clients = self.strategy.state.clients
        return clients.num_paused(self.strategy.clock.now) == len(clients)

    def _notice(self, reason: str) -> None:
        self.strategy.emit(Waiting(time=self.strategy.clock.now, reason=reason))


@dataclass(frozen=True)
class _Answer:
    """What a node says about itself."""

    partition: int | None = None
    num_examples: int | None = None
    host: str = ""
    problem: str = ""


def _query_message(node_id: int, limit: float) -> Message:
    return Message(RecordDict(), node_id, MessageType.QUERY, ttl=max(limit, 1.0))


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
    """With the virtual clock every node has to be known, for runs that can be repeated."""
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
