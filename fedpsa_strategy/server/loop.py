"""The asynchronous loop, one for all engines, clocks and rules: dispatch, collect, apply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedpsa_strategy.errors import ForgeryError
from fedpsa_strategy.server.awake import AwakeTime
from fedpsa_strategy.server.callbacks.base import hooks
from fedpsa_strategy.server.callbacks.evaluation import EvaluateFn, Evaluations
from fedpsa_strategy.server.callbacks.stop import STOP_REQUESTED, ShouldStop, Stop
from fedpsa_strategy.server.events import RunEnded, RunStarted, Waiting
from fedpsa_strategy.server.hooks import FlowerHooks
from fedpsa_strategy.server.inbox import Inbox
from fedpsa_strategy.server.membership import Membership
from fedpsa_strategy.server.pace import NOTICE, Pace
from fedpsa_strategy.server.run_state import Task

log = logging.getLogger("flwr")

_AGAIN = 1.0  # seconds after which a task that expired is looked for again
_TURN = 0.5  # seconds between two looks around


class AsyncLoop:
    """Runs a strategy on a grid.

    Parameters
    ----------
    strategy : FlowerHooks
        Decides what is sent and what becomes of replies; its run has begun.
    grid : Grid
        Where the nodes are.
    num_versions : int
        Versions to make.
    timeout : float
        Real seconds after which a reply is no longer waited for (see `Clock.gives_up`).
    train_config, evaluate_config : ConfigRecord
        Sent with the messages.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
        Centralised evaluation.
    should_stop : Callable[[int, Result], bool] | None
        Asked after each version.
    monotonic, sleep : Callable
        Real time, for waiting; the run's own time is the strategy's clock.
    perf_counter : Callable
        Real time, for how long the strategy takes.
    """

    def __init__(
        self,
        strategy: FlowerHooks,
        grid: Grid,
        *,
        num_versions: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        should_stop: ShouldStop | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        perf_counter: Callable[[], float] = time.perf_counter,
    ) -> None:
        run = strategy.state
        self._strategy = strategy
        self._run = run
        self._grid = grid
        self._timeout = timeout
        self._train_config = train_config
        self._monotonic = monotonic
        self._perf_counter = perf_counter
        self._membership = Membership(
            run, grid, strategy.num_nodes_wanted, strategy.failures, monotonic, sleep
        )
        self._inbox = Inbox(run, grid, timeout, AwakeTime(monotonic, time.time))
        self._pace = Pace(grid, sleep)
        stop = Stop(strategy.limits, num_versions, monotonic, should_stop)
        evaluations = Evaluations(
            strategy, grid, self._inbox, evaluate_fn, evaluate_config, self._end_reason
        )
        for callback in (stop, evaluations, strategy.checkpointer):
            callback.begin(run)
        self._callbacks = [stop, evaluations, *strategy.callbacks, strategy.checkpointer]
        # Those of every step; the others may be called where they do nothing.
        self._until = hooks(self._callbacks, "until")
        self._stepped = hooks(self._callbacks, "stepped")
        self._ends = hooks(self._callbacks, "ends")
        self._next_turn = 0.0
        self._silent_since = 0.0

    def run(self) -> Result:
        """Run to the end and return Flower's result."""
        run = self._run
        self._begin()
        try:
            while (reason := self._end_reason()) is None:
                self._look_around()
                self._dispatch()
                if run.rejected_in_a_row or not run.in_flight:
                    self._membership.check_alive()
                self._apply(self._inbox.next_task() or self._collect())
                self._publish()
                for stepped in self._stepped:
                    stepped()
        except BaseException:  # a signal, or a grid that says the run is over
            self._interrupt()
            raise
        self._end(reason)
        return run.result

    def _begin(self) -> None:
        """Wait for the nodes, and begin or resume."""
        strategy, run = self._strategy, self._run
        run.clock.hold()
        tasks = strategy.checkpointer.restore(self._callbacks)
        self._membership.gather()
        run.clock.start(run.clock.now)
        self._inbox.begin()
        self._silent_since = self._monotonic()
        run.emit(
            RunStarted(
                time=run.clock.now,
                num_clients=len(run.clients),
                max_in_flight=strategy.concurrency,
                num_parameters=run.layout.size,
                version=run.version,
                uploads=run.uploads,
                rejected=run.rejected,
            )
        )
        self._send(strategy.dispatch.resume(tasks, self._train_config))
        for callback in self._callbacks:
            callback.started()
        self._publish()

    def _end_reason(self) -> str | None:
        """Return why the run ends now; None if it continues."""
        for ends in self._ends:
            reason: str | None = ends()
            if reason is not None:
                return reason
        return None

    def _interrupt(self) -> None:
        with ExitStack() as stack:  # if one of them raises, the others save what they have
            for callback in reversed(self._callbacks):
                stack.callback(callback.interrupted)

    def _end(self, reason: str) -> None:
        run = self._run
        stopped = reason == STOP_REQUESTED
        if stopped:
            self._interrupt()
        for callback in self._callbacks:
            callback.ended(reason)
        while self._inbox.asking and not stopped:  # after a stop nobody waits for clients
            if self._inbox.collect(tasks=False).progress:
                self._pace.reset()
            if self._inbox.asking:
                self._pace.rest()
        log.info("The run ends: %s", reason)
        run.emit(
            RunEnded(
                time=run.clock.now,
                version=run.version,
                uploads=run.uploads,
                rejected=run.rejected,
                reason=reason,
                server_seconds=run.server_seconds,
            )
        )
        run.result.arrays = run.arrays

    def _look_around(self) -> None:
        """From time to time, notice who comes and goes, and let callbacks look at the run."""
        if self._monotonic() < self._next_turn:
            return
        self._next_turn = self._monotonic() + _TURN
        self._membership.look()
        self._run.whole = False
        for callback in self._callbacks:
            callback.turn()
        self._run.whole = True

    # --- Dispatch ------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Fill the free slots."""
        strategy, run = self._strategy, self._run
        if run.clients.num_busy >= strategy.concurrency and not strategy.queued_per_node:
            return
        run.whole = False
        messages = list(
            strategy.configure_train(run.version + 1, run.arrays, self._train_config, self._grid)
        )
        run.whole = True
        self._send(messages)

    def _send(self, messages: list[Message]) -> None:
        """Push train messages and wait for their replies from now on."""
        if not messages:
            return
        run, strategy = self._run, self._strategy
        accepted = set(self._grid.push_messages(messages))
        run.whole = False
        for task in strategy.dispatch.sent(messages):
            self._inbox.expect(task, accepted=task.message_id in accepted)
        for task, _ in list(run.prepared.values()):
            strategy.apply.reject(task, "the message could not be sent")
        run.whole = True

    # --- Collect -------------------------------------------------------------------------------

    def _collect(self) -> Task | None:
        """Collect what has arrived; return the task whose turn it is, or rest a little."""
        found = self._inbox.collect()
        if found.lost:
            self._send_again(found.lost, "replies were lost with one that cannot be read")
            for lost in found.lost:
                self._inbox.expect_singly(lost)
        if found.expired:
            self._send_again(found.expired, "tasks expired while time stood still")
            self._pace.rest(_AGAIN)
        now = self._monotonic()
        task = self._inbox.next_task()
        if found.progress or task is not None:
            self._silent_since = now
            self._pace.reset()
            return task
        if now - self._silent_since >= NOTICE:
            self._silent_since = now
            reason = f"{len(self._inbox)} clients at work"
            self._run.emit(Waiting(time=self._run.clock.now, reason=reason))
        started = self._perf_counter()
        for callback in self._callbacks:
            callback.idle()
        self._run.server_seconds += self._perf_counter() - started
        self._pace.rest()
        return None

    def _send_again(self, tasks: list[Task], why: str) -> None:
        """Send tasks again, by no fault of their clients.

        A task keeps its number, its seed and its due time: with the virtual clock the run ends in
        the same bits as if nothing had happened.
        """
        log.warning("%d %s: sent again", len(tasks), why)
        while tasks:  # of each node one at a time: the ids of messages are matched by node
            firsts: dict[int, Task] = {}
            for task in tasks:
                firsts.setdefault(task.node_id, task)
            self._run.whole = False
            messages = self._strategy.dispatch.repeat(firsts.values(), self._train_config)
            self._run.whole = True
            self._send(messages)
            tasks = [task for task in tasks if task is not firsts[task.node_id]]

    # --- Apply ---------------------------------------------------------------------------------

    def _apply(self, task: Task | None) -> None:
        """Let the next reply take effect, if it is here and its time comes before the end."""
        strategy, run = self._strategy, self._run
        moment = run.clock.moment(None if task is None else task.due)
        if not all(until(moment) for until in self._until):
            return
        if task is None or not run.clock.advance(moment, strategy.limits.deadline):
            return
        run.whole = False
        reply = self._inbox.take(task)
        if reply is None:
            strategy.apply.reject(task, f"no reply within {self._timeout:g} s", silent=True)
        elif isinstance(reply, ForgeryError):
            strategy.apply.reject(task, str(reply), quarantine=True)
        else:
            started = self._perf_counter()
            strategy.aggregate_train(run.version + 1, [reply])
            run.server_seconds += self._perf_counter() - started
        run.whole = True

    def _publish(self) -> None:
        """Show a new version to the callbacks.

        A reply has made it, or a message that could not be sent, if that was the last of a round.
        Or the run was interrupted before all of them had seen it, and is resumed.
        """
        run = self._run
        if run.published != run.version:
            for callback in self._callbacks:
                callback.published()
            run.published = run.version
