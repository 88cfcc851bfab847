"""Evaluation of the global model, by the server and on clients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.callbacks.stop import STOP_REQUESTED
from fedpsa_strategy.server.events import Evaluated
from fedpsa_strategy.server.hooks import FlowerHooks
from fedpsa_strategy.server.inbox import Inbox, Reply
from fedpsa_strategy.wire.text import MAX_REASON, shown

log = logging.getLogger("flwr")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Evaluations(Callback):
    """Evaluates the first version, then when it is time to, and at the end.

    Parameters
    ----------
    strategy : FlowerHooks
        Says when to evaluate, and which clients; combines what they answer.
    grid : Grid
        Where the nodes are.
    inbox : Inbox
        Sends messages to them, and collects the replies.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] or None
        Centralised evaluation.
    config : ConfigRecord
        Sent with evaluate messages.
    ends : Callable[[], str | None]
        Tells why the run ends, if it does.
    """

    saved = ("_next_time", "_done")

    def __init__(
        self,
        strategy: FlowerHooks,
        grid: Grid,
        inbox: Inbox,
        evaluate_fn: EvaluateFn | None,
        config: ConfigRecord,
        ends: Callable[[], str | None],
    ) -> None:
        self._strategy = strategy
        self._grid = grid
        self._inbox = inbox
        self._evaluate_fn = evaluate_fn
        self._config = config
        self._run_ends = ends
        self._next_time = strategy.evaluation.interval or 0.0
        self._done: tuple[int, float] | None = None  # version and time of the last evaluation

    def started(self) -> None:
        """Evaluate the first version; a resumed run has done so."""
        if self._done is None:
            self.evaluate()

    def published(self) -> None:
        """Evaluate a new version, if it is one of those."""
        options = self._strategy.evaluation
        if options.interval is None and self.run.version % options.every == 0:
            self.evaluate()

    def until(self, moment: float) -> bool:
        """Evaluate at the times of the grid before `moment`; tell whether the run gets there."""
        clock, interval = self.run.clock, self._strategy.evaluation.interval
        if interval is None:
            return True
        while self._next_time < moment:
            if not clock.advance(self._next_time, self._strategy.limits.deadline):
                return False
            following = self._next_time + interval
            while following < clock.now:  # late is late: one for all that were missed
                following += interval
            self.evaluate()
            self._next_time = following
            if self._run_ends() is not None:
                return False
        return True

    def ended(self, reason: str) -> None:
        """Evaluate at the end of the run, unless that has just been done."""
        done = self._done
        if done is None or done[0] != self.run.version or not self.run.clock.stands_at(done[1]):
            # After a stop nobody waits for clients.
            self.evaluate(on_clients=reason != STOP_REQUESTED)

    def evaluate(self, *, on_clients: bool = True) -> None:
        """Evaluate the current version, here and, if the strategy wants it, on clients.

        What takes long, or may end the run, comes before anything is noted down: a run that is
        interrupted there does all of it again when it is resumed.
        """
        run, history = self.run, self.run.result.evaluate_metrics_serverapp
        metrics = None
        if self._evaluate_fn is not None:
            # Between two points of the time grid the model may not have moved.
            metrics = history.get(run.version)
            if metrics is None:
                metrics = self._evaluate_fn(run.version, run.arrays)
        moved = self._done is None or self._done[0] != run.version
        if moved and on_clients:
            messages = self._strategy.configure_evaluate(
                run.version, run.arrays, self._config, self._grid
            )
            self._inbox.ask(list(messages), partial(self._combine, run.version, run.uploads))
        if metrics is not None:
            history[run.version] = metrics
            self._emit(run.version, run.uploads, "server", metrics)
            accuracy = metrics.get("accuracy")
            run.accuracy = accuracy if isinstance(accuracy, int | float) else None
        self._done = (run.version, run.clock.now)

    def _combine(self, version: int, uploads: int, replies: list[Reply]) -> None:
        """Combine what clients answered about a version, made after so many uploads."""
        messages = []
        for reply in replies:
            if isinstance(reply, Message):
                messages.append(reply)
            elif reply is not None:
                text = shown(reply, MAX_REASON)
                log.warning("Evaluation of version %d: a reply is left out: %s", version, text)
        metrics = self._strategy.aggregate_evaluate(version, messages)
        if metrics is not None:
            self.run.result.evaluate_metrics_clientapp[version] = metrics
            self._emit(version, uploads, "clients", metrics)

    def _emit(self, version: int, uploads: int, where: str, metrics: MetricRecord) -> None:
        run = self.run
        run.emit(
            Evaluated(
                time=run.clock.now,
                version=version,
                uploads=uploads,
                where=where,
                metrics=dict(metrics),
            )
        )
