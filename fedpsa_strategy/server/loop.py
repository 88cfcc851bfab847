"""The asynchronous loop, one for all engines, clocks and rules: dispatch, collect, apply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedpsa_strategy.errors import ForgeryError
from fedpsa_strategy.server.awake import AwakeTime
from fedpsa_strategy.server.callbacks.base import hooks
from fedpsa_strategy.server.evaluation import EvaluateFn, Evaluations
from fedpsa_strategy.server.events import RunEnded, RunStarted, Waiting
from fedpsa_strategy.server.hooks import FlowerHooks
from fedpsa_strategy.server.inbox import Inbox
from fedpsa_strategy.server.membership import Membership
from fedpsa_strategy.server.pace import NOTICE, Pace
from fedpsa_strategy.server.run_state import Task
from fedpsa_strategy.server.snapshot import restore_snapshot, take_snapshot
from fedpsa_strategy.server.stop import STOP_REQUESTED, ShouldStop, Stop

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
    wall : Callable
        The time of day, which goes on while the machine is asleep.
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
        wall: Callable[[], float] = time.time,
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
        self._result = Result(arrays=run.arrays)
        ends = hooks(strategy.callbacks, "ends")
        self._stop = Stop(run, strategy.limits, num_versions, monotonic, should_stop, ends)
        self._membership = Membership(
            run, grid, strategy.num_nodes_wanted, strategy.failures, monotonic, sleep
        )
        self._evaluations = Evaluations(
            strategy,
            run,
            grid,
            strategy.evaluation,
            self._result,
            evaluate_fn,
            evaluate_config,
            timeout,
            monotonic,
        )
        awake = AwakeTime(monotonic, wall)
        self._inbox = Inbox(run, grid, self._evaluations, timeout, awake)
        self._pace = Pace(grid, sleep)
        self._idle = hooks(strategy.callbacks, "idle")
        self._turn = hooks(strategy.callbacks, "turn")
        self._next_turn = 0.0
        self._silent_since = 0.0
        self._server_seconds = 0.0  # spent on aggregation, before an interruption too

    def run(self) -> Result:
        """Run to the end and return Flower's result."""
        run, membership, checkpointer = self._run, self._membership, self._strategy.checkpointer
        self._begin()
        try:
            while (reason := self._stop.reason()) is None:
                self._look_around()
                self._dispatch()
                if run.rejected_in_a_row or not run.in_flight:
                    membership.check_alive()
                if not self._inbox.ready:
                    self._collect()
                run.whole = False
                self._apply()
                run.whole = True
                if checkpointer.due(run.version):
                    self._save()
        except BaseException:  # a signal, or a grid that says the run is over
            self._save()
            raise
        self._end(reason)
        return self._result

    def _begin(self) -> None:
        """Wait for the nodes, and begin or resume."""
        strategy, run = self._strategy, self._run
        saved = strategy.checkpointer.resume_from
        tasks = [] if saved is None else self._load_state_dict(saved)
        start_time = 0.0 if saved is None else saved["time"]
        run.clock.hold(start_time)
        self._membership.gather()
        run.clock.start(start_time)
        self._stop.begin()
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
        if saved is None:
            self._evaluations.evaluate()
        else:
            self._send(strategy.dispatch.resume(tasks, self._train_config))
        strategy.checkpointer.begin(run.version)

    def _end(self, reason: str) -> None:
        run = self._run
        stopped = reason == STOP_REQUESTED
        if stopped:  # nobody waits for clients any more
            self._save()
        self._evaluations.last(on_clients=not stopped)
        while not stopped and self._evaluations.close():
            if self._inbox.collect(evaluations_only=True).progress:
                self._pace.reset()
            if self._evaluations.close():
                self._pace.rest()
        log.info("The run ends: %s", reason)
        run.emit(
            RunEnded(
                time=run.clock.now,
                version=run.version,
                uploads=run.uploads,
                rejected=run.rejected,
                reason=reason,
                server_seconds=self._server_seconds,
            )
        )
        self._result.arrays = run.arrays

    def _look_around(self) -> None:
        """From time to time, notice who comes and goes, and let callbacks look at the run."""
        if self._monotonic() < self._next_turn:
            return
        self._next_turn = self._monotonic() + _TURN
        self._membership.look()
        self._run.whole = False
        for turn in self._turn:
            turn()
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

    def _collect(self) -> None:
        """Collect what has arrived, or rest a little."""
        found = self._inbox.collect()
        if found.lost:
            self._send_again(found.lost, "replies were lost with one that cannot be read")
            for task in found.lost:
                self._inbox.expect_singly(task)
        if found.expired:
            self._send_again(found.expired, "tasks expired while time stood still")
            self._pace.rest(_AGAIN)
        self._evaluations.close()
        now = self._monotonic()
        if found.progress or self._inbox.ready:
            self._silent_since = now
            self._pace.reset()
            return
        if now - self._silent_since >= NOTICE:
            self._silent_since = now
            reason = f"{len(self._inbox)} clients at work"
            self._run.emit(Waiting(time=self._run.clock.now, reason=reason))
        started = self._perf_counter()
        for idle in self._idle:
            idle()
        self._server_seconds += self._perf_counter() - started
        self._pace.rest()

    def _send_again(self, tasks: list[Task], why: str) -> None:
        """Send tasks again, by no fault of their clients.

        A task keeps its number, its seed and its due time: with the virtual clock the run ends in
        the same bits as if nothing had happened.
        """
        log.warning("%d %s: sent again", len(tasks), why)
        self._run.whole = False
        messages = self._strategy.dispatch.repeat(tasks, self._train_config)
        self._run.whole = True
        self._send(messages)

    # --- Apply ---------------------------------------------------------------------------------

    def _apply(self) -> None:
        """Let the next reply take effect, if it is here and its time comes before the end."""
        strategy, run = self._strategy, self._run
        task = self._inbox.next_task()
        moment = run.clock.moment(None if task is None else task.due)
        if not self._evaluations.until(moment, self._stop):
            return
        if task is None or not run.clock.advance(moment, self._stop.limits.deadline):
            return
        version = run.version
        reply = self._inbox.take(task)
        if reply is None:
            strategy.apply.reject(task, f"no reply within {self._timeout:g} s", silent=True)
        elif isinstance(reply, ForgeryError):
            strategy.apply.reject(task, str(reply), quarantine=True)
        else:
            started = self._perf_counter()
            strategy.aggregate_train(version + 1, [reply])
            self._server_seconds += self._perf_counter() - started
        if run.version != version:
            if run.version_metrics is not None:
                self._result.train_metrics_clientapp[run.version] = run.version_metrics
            self._evaluations.version_made()
            self._stop.version_made(self._result)

    # --- Checkpoints ---------------------------------------------------------------------------

    def _save(self) -> None:
        run = self._run
        # In the middle of a step the state is neither before nor after it: the last one counts.
        if run.whole and self._strategy.checkpointer.store is not None:
            self._strategy.checkpointer.save(run.sequence, run.version, self._state_dict())

    def _state_dict(self) -> dict[str, Any]:
        return take_snapshot(self._run, self._strategy.callbacks) | {
            # Of each the last entry: a checkpoint must not grow with the number of versions. What
            # was before is in the events, and no longer in a resumed run's result.
            "histories": [
                [[version, dict(metrics)] for version, metrics in list(history.items())[-1:]]
                for history in _histories(self._result)
            ],
            "evaluations": self._evaluations.state_dict(),
            "server_seconds": self._server_seconds,
        }

    def _load_state_dict(self, saved: dict[str, Any]) -> list[Task]:
        tasks = restore_snapshot(self._run, self._strategy.callbacks, saved)
        for history, entries in zip(_histories(self._result), saved["histories"], strict=True):
            history.update({version: MetricRecord(metrics) for version, metrics in entries})
        self._evaluations.load_state_dict(saved["evaluations"])
        self._server_seconds = saved["server_seconds"]
        return tasks


def _histories(result: Result) -> list[dict[int, MetricRecord]]:
    return [
        result.train_metrics_clientapp,
        result.evaluate_metrics_clientapp,
        result.evaluate_metrics_serverapp,
    ]
