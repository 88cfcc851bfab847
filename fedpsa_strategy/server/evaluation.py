"""Evaluation of the global model, by the server and on clients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpsa_strategy.errors import ForgeryError
from fedpsa_strategy.server.events import Evaluated
from fedpsa_strategy.server.options import Evaluation
from fedpsa_strategy.server.run_state import RunState
from fedpsa_strategy.server.stop import Stop
from fedpsa_strategy.wire.text import MAX_REASON, shown

log = logging.getLogger("flwr")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class _Open:
    """A federated evaluation whose replies are still coming in."""

    version: int
    uploads: int
    expires: float
    outstanding: dict[str, Message]  # what was sent, by id
    replies: list[Message] = field(default_factory=list)


class Evaluations:
    """Evaluates when it is time to, and collects what clients answer.

    Parameters
    ----------
    strategy : Strategy
        Flower's hooks for federated evaluation.
    run : RunState
        The run.
    grid : Grid
        Where the nodes are.
    options : Evaluation
        When to evaluate.
    result : Result
        Where metrics are collected.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] or None
        Centralised evaluation.
    config : ConfigRecord
        Sent with evaluate messages.
    timeout : float
        Real seconds after which replies are no longer waited for.
    monotonic : Callable[[], float]
        Real time.
    """

    def __init__(
        self,
        strategy: Strategy,
        run: RunState,
        grid: Grid,
        options: Evaluation,
        result: Result,
        evaluate_fn: EvaluateFn | None,
        config: ConfigRecord,
        timeout: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._strategy = strategy
        self._run = run
        self._grid = grid
        self._options = options
        self._result = result
        self._evaluate_fn = evaluate_fn
        self._config = config
        self._timeout = timeout
        self._monotonic = monotonic
        self._next_time = options.interval or 0.0
        self._done: tuple[int, float] | None = None  # version and time of the last evaluation
        self._open: list[_Open] = []

    def evaluate(self, *, on_clients: bool = True) -> None:
        """Evaluate the current version, here and, if the strategy wants it, on clients."""
        run, result = self._run, self._result
        if self._evaluate_fn is not None:
            # Between two points of the time grid the model may not have moved.
            metrics = result.evaluate_metrics_serverapp.get(run.version)
            if metrics is None:
                metrics = self._evaluate_fn(run.version, run.arrays)
            if metrics is not None:
                result.evaluate_metrics_serverapp[run.version] = metrics
                self._emit(run.version, run.uploads, "server", metrics)
                accuracy = metrics.get("accuracy")
                run.accuracy = accuracy if isinstance(accuracy, float) else None
        moved = self._done is None or self._done[0] != run.version
        self._done = (run.version, run.clock.now)
        if not moved or not on_clients:
            return
        messages = list(
            self._strategy.configure_evaluate(run.version, run.arrays, self._config, self._grid)
        )
        if messages:
            accepted = set(self._grid.push_messages(messages))
            sent = {message.metadata.message_id: message for message in messages}
            outstanding = {key: message for key, message in sent.items() if key in accepted}
            expires = self._monotonic() + self._timeout
            self._open.append(_Open(run.version, run.uploads, expires, outstanding))

    def version_made(self) -> None:
        """Evaluate a new version, if it is one of those."""
        options = self._options
        if options.interval is None and self._run.version % options.every == 0:
            self.evaluate()

    def until(self, moment: float, stop: Stop) -> bool:
        """Evaluate at the times of the grid before `moment`; tell whether the run gets there."""
        clock, interval = self._run.clock, self._options.interval
        if interval is None:
            return True
        while self._next_time < moment:
            if not clock.advance(self._next_time, stop.limits.deadline):
                return False
            self._next_time += interval
            while self._next_time < clock.now:  # late is late: one for all that were missed
                self._next_time += interval
            self.evaluate()
            if stop.reason() is not None:
                return False
        return True

    def last(self, *, on_clients: bool) -> None:
        """Evaluate at the end of the run, unless that has just been done."""
        done = self._done
        if done is None or done[0] != self._run.version or not self._run.clock.stands_at(done[1]):
            self.evaluate(on_clients=on_clients)

    # --- Replies -------------------------------------------------------------------------------

    def outstanding(self) -> list[str]:
        """Return the ids of messages that are not answered."""
        return [key for item in self._open for key in item.outstanding]

    def arrive(self, message_id: str, reply: Message | ForgeryError | None) -> None:
        """Take a reply, if it is to one of these messages."""
        for item in self._open:
            if item.outstanding.pop(message_id, None) is None:
                continue
            if isinstance(reply, Message):
                item.replies.append(reply)
            elif reply is not None:
                text = shown(reply, MAX_REASON)
                log.warning("Evaluation of version %d: a reply is left out: %s", item.version, text)

    def repeat(self, message_id: str) -> list[str]:
        """Send a message again whose reply was lost; return its new id, if it was accepted."""
        for item in self._open:
            if (message := item.outstanding.pop(message_id, None)) is not None:
                metadata = message.metadata
                again = Message(
                    message.content, metadata.dst_node_id, metadata.message_type, ttl=metadata.ttl
                )
                accepted = list(self._grid.push_messages([again]))
                if accepted:
                    item.outstanding[again.metadata.message_id] = again
                return accepted
        return []

    def close(self) -> bool:
        """Combine evaluations that are complete, or out of time; tell whether any is open."""
        if not self._open:
            return False
        now, still_open = self._monotonic(), []
        for item in self._open:
            if item.outstanding and now < item.expires:
                still_open.append(item)
                continue
            metrics = self._strategy.aggregate_evaluate(item.version, item.replies)
            if metrics is not None:
                self._result.evaluate_metrics_clientapp[item.version] = metrics
                self._emit(item.version, item.uploads, "clients", metrics)
        self._open = still_open
        return bool(still_open)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return {"next_time": self._next_time, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._next_time = state["next_time"]
        self._done = tuple(state["done"]) if state["done"] else None

    def _emit(self, version: int, uploads: int, where: str, metrics: MetricRecord) -> None:
        self._run.emit(
            Evaluated(
                time=self._run.clock.now,
                version=version,
                uploads=uploads,
                where=where,
                metrics=dict(metrics),
            )
        )
