"""Apply: from a reply to the rule, and to a new version."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from flwr.app import Message, RecordDict

from fedpsa_strategy.errors import (
    DivergedError,
    ForgeryError,
    IgnoredReplyError,
    InvalidReplyError,
    OutOfMemoryReplyError,
)
from fedpsa_strategy.methods.base import Update, Vector
from fedpsa_strategy.server.callbacks.base import Callback, hooks
from fedpsa_strategy.server.clients import Client
from fedpsa_strategy.server.events import Aggregated, Quarantined, Rejected, Uploaded
from fedpsa_strategy.server.options import Failures, MessageForm, MetricsAggregator
from fedpsa_strategy.server.pull import is_gone
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.contract import SECONDS
from fedpsa_strategy.wire.replies import TrainReply, first_too_large, read_train_reply
from fedpsa_strategy.wire.states import combine_states
from fedpsa_strategy.wire.text import MAX_REASON, shown

log = logging.getLogger("flwr")

# What is asked again at once would end in the same way.
_AT_ONCE = (ForgeryError, OutOfMemoryReplyError)

_MOST_DOUBLINGS = 6  # of the pause of a node that stays silent


class Apply:
    """Checks replies, gives updates to the rule and takes over the models that it makes.

    Parameters
    ----------
    run : RunState
        The run.
    form : MessageForm
        How replies look.
    failures : Failures
        When a client is left out.
    callbacks : Sequence[Callback]
        Look at replies.
    combine_metrics : Callable[[list[RecordDict], str], MetricRecord]
        Combines the metrics of the uploads of one version.
    """

    def __init__(
        self,
        run: RunState,
        form: MessageForm,
        failures: Failures,
        callbacks: Sequence[Callback],
        combine_metrics: MetricsAggregator,
    ) -> None:
        self._run = run
        self._form = form
        self._failures = failures
        self._combine_metrics = combine_metrics
        self._read = hooks(callbacks, "read")
        self._check = hooks(callbacks, "check")
        self._accepted = hooks(callbacks, "accepted")
        self._rejected = hooks(callbacks, "rejected")
        self._made = hooks(callbacks, "made")

    def reply(self, message: Message) -> None:
        """Let one reply take effect."""
        run, metadata = self._run, message.metadata
        task = run.in_flight.get(metadata.reply_to_message_id)
        if task is None:
            self._refuse_unknown(metadata.src_node_id)
            return
        try:
            # Errors may be Flower's own, for a node that died.
            if metadata.src_node_id != task.node_id and not message.has_error():
                raise InvalidReplyError(
                    f"the reply comes from node {metadata.src_node_id}, not from node "
                    f"{task.node_id}"
                )
            sent = read_train_reply(
                message,
                run.layout,
                (task.start.vector, task.start.states),
                arrays_key=self._form.arrays_key,
                weight_key=self._form.weight_key,
                update_dtype=self._form.training.update_dtype,
            )
            for read in self._read:
                sent = read(task, message, sent)
            reply = sent
            for check in self._check:
                reply = check(task, reply, sent)
            self._take(task, reply)
        except InvalidReplyError as error:
            self.reject(
                task,
                str(error),
                quarantine=isinstance(error, _AT_ONCE),
                silent=is_gone(message, task.node_id),
                failed=not isinstance(error, IgnoredReplyError),
            )

    def reject(
        self,
        task: Task,
        reason: str,
        *,
        quarantine: bool = False,
        silent: bool = False,
        failed: bool = True,
    ) -> None:
        """Give up a task: its client's slot is free again.

        Parameters
        ----------
        task : Task
            The task.
        reason : str
            What the event says.
        quarantine : bool (default: False)
            Leave the node out at once, not only after several failures.
        silent : bool (default: False)
            There was no reply. With real time the node is left out for a while, each time longer,
            until it answers or joins again.
        failed : bool (default: True)
            Whether it is the client's failure.
        """
        run, most = self._run, self._failures.max_failures
        for rejected in self._rejected:
            rejected(task)
        reason = shown(reason, MAX_REASON)
        client = self._free(task, answered=not silent)
        run.rejected += 1
        run.rejected_in_a_row += failed
        run.count_reason(reason)
        client.failures = max(client.failures + failed, most if quarantine else 0)
        level = logging.WARNING if failed else logging.DEBUG
        log.log(level, "Rejected: %s: %s", client.named(task.node_id), reason)
        now = run.clock.now
        run.emit(Rejected(time=now, **task.about, reason=reason))
        pause = self._failures.pause if failed and client.failures >= most else 0.0
        if silent and run.clock.real_time:
            pause = self._failures.pause * 2 ** min(client.silences, _MOST_DOUBLINGS)
            client.silences += 1
        if pause:
            client.paused_until = now + pause
            times = "once" if client.failures == 1 else f"{client.failures} times in a row"
            log.warning("Client %d failed %s: paused for %g", task.client, times, pause)
            run.emit(
                Quarantined(
                    time=now,
                    client=task.client,
                    node_id=task.node_id,
                    failures=client.failures,
                    until=client.paused_until,
                )
            )
        if run.clients.num_busy == 0:
            self._end_round()

    def _refuse_unknown(self, node_id: int) -> None:
        """Count a reply without a task: no client to count it against, and no slot to free."""
        run = self._run
        run.rejected += 1
        run.emit(
            Rejected(
                time=run.clock.now,
                sequence=-1,
                client=-1,
                node_id=node_id,
                version=run.version,
                reason="reply to an unknown or already consumed message",
            )
        )

    def _free(self, task: Task, *, answered: bool = True) -> Client:
        """Take the task out of flight; its client may work again."""
        run = self._run
        run.in_flight.pop(task.message_id, None)
        run.prepared.pop(task.node_id, None)
        client = run.clients[task.client]
        run.clients.end_task(client, answered=answered)
        if answered:
            client.answered = run.clock.now
        return client

    def _take(self, task: Task, reply: TrainReply) -> None:
        """Give an accepted update to the rule, and take over the new model if it makes one."""
        run = self._run
        update = Update(
            client=task.client,
            delta=reply.delta,
            squared_norm=reply.squared_norm,
            num_examples=reply.num_examples,
            version=task.version,
            staleness=run.version - task.version,
            start=task.start.vector,
            metrics=reply.metrics,
            extra=reply.extra,
            response_time=run.clock.now - task.made,
        )
        model = run.rule.add(update)
        for accepted in self._accepted:
            accepted(task)
        client = self._free(task)
        client.failures = client.silences = 0
        run.clients.set_num_examples(client, reply.num_examples)
        run.rejected_in_a_row = 0
        run.uploads += 1
        run.upload_states.append(reply.states)
        run.clients.waiting.add(task.client)
        scalars = reply.metrics.copy()  # a new record would check every value again
        for key, value in reply.metrics.items():
            if isinstance(value, list):
                del scalars[key]
        run.round_metrics.append(RecordDict({"metrics": scalars}))
        cost = {} if reply.seconds is None else {SECONDS: reply.seconds}
        report = run.rule.report
        # First the new version, if there is one, then the events: listeners must find a rule
        # and a state that agree.
        if model is not None:
            self._set_version(model)
        run.emit(
            Uploaded(
                time=run.clock.now,
                sequence=task.sequence,
                client=task.client,
                node_id=task.node_id,
                version=task.version,
                staleness=update.staleness,
                num_examples=update.num_examples,
                squared_norm=update.squared_norm,
                num_bytes=reply.num_bytes,
                metrics={**scalars, **cost},
                report=report,
            )
        )
        if model is not None:
            self._tell_version()
        if run.clients.num_busy == 0:
            self._end_round()

    def _end_round(self) -> None:
        """Let a synchronous rule aggregate: the last client of its round is done."""
        run = self._run
        if run.rule.synchronous:
            model = run.rule.finish_round()
            if model is not None:
                self._set_version(model)
                self._tell_version()

    def _set_version(self, model: Vector) -> None:
        run, rule = self._run, self._run.rule
        for made in self._made:
            rule.model = model = made(model)
        before = run.model
        if model.shape != before.vector.shape or model.dtype != before.vector.dtype:
            raise TypeError(
                f"{type(rule).__name__} made a model of shape {model.shape} and {model.dtype}: "
                f"must be {before.vector.shape} and {before.vector.dtype}"
            )
        weights = rule.state_weights
        if weights is None:
            weights = [1 / len(run.round_metrics)] * len(run.round_metrics)
        states = combine_states(before.states, run.upload_states, weights)
        kept = rule.uploads_kept
        run.upload_states = run.upload_states[-kept:] if kept else []
        run.version += 1
        run.set_model(model, states)
        if not math.isfinite(run.model.norm):  # which the next upload is compared with anyway
            raise DivergedError(
                f"version {run.version} is not finite, or too large to square: first in "
                f"{run.layout.key_at(first_too_large(model))!r}"
            )
        run.clients.waiting.clear()
        metrics = self._combine_metrics(run.round_metrics, self._form.weight_key)
        if metrics is not None:  # a user's function may have nothing to tell
            run.result.train_metrics_clientapp[run.version] = metrics
        run.round_metrics = []

    def _tell_version(self) -> None:
        run = self._run
        run.emit(
            Aggregated(
                time=run.clock.now,
                version=run.version,
                uploads=run.uploads,
                report=run.rule.version_report,
            )
        )
