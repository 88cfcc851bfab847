"""Dispatch: from a free slot to a train message on its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedpsa_strategy.seeds import derive
from fedpsa_strategy.server.callbacks.base import Callback, hooks
from fedpsa_strategy.server.clients import Client
from fedpsa_strategy.server.events import Dispatched, Resent
from fedpsa_strategy.server.options import MessageForm
from fedpsa_strategy.server.run_state import Model, RunState, Task
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS
from fedpsa_strategy.wire.replies import count_bytes
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPE_KEY


class Dispatch:
    """Makes train messages and keeps account of those that are sent.

    Parameters
    ----------
    run : RunState
        The run.
    form : MessageForm
        How messages look.
    seed : int
        Seed of the tasks' own seeds.
    ttl : float or None
        How long a message lives, in seconds.
    callbacks : Sequence[Callback]
        Add to messages.
    """

    def __init__(
        self,
        run: RunState,
        form: MessageForm,
        seed: int,
        ttl: float | None,
        callbacks: Sequence[Callback],
    ) -> None:
        self._run = run
        self._form = form
        self._seed = seed
        self._ttl = ttl
        self._configure = hooks(callbacks, "configure")
        self._attach = hooks(callbacks, "attach")

    def fill(
        self, limit: int, arrays: ArrayRecord, config: ConfigRecord, queued: int = 0
    ) -> list[Message]:
        """Return a train message for every free slot, each for an idle node.

        Parameters
        ----------
        limit : int
            How many clients are to be busy.
        arrays : ArrayRecord
            What clients start from, unless the rule has something else for one of them.
        config : ConfigRecord
            Sent along.
        queued : int (default: 0)
            How many further tasks may wait at a node, when all nodes are at work.
        """
        run = self._run
        clients = run.clients
        messages: list[Message] = []
        if run.rule.synchronous and clients.num_busy:
            return messages
        shared = run.sent
        if arrays is not run.arrays and (queued or clients.num_busy < limit):
            shared = Model(*run.layout.read(arrays))
        now = run.clock.now
        while clients.num_busy < limit:
            client = clients.sample(run.sequence, now)
            if client is None:
                break
            messages.append(self._new_task(client, shared, arrays, config))
        for client in clients.all_at_work(now) if queued else ():
            if client.tasks <= queued and client.node_id not in run.prepared:
                messages.append(self._new_task(client, shared, arrays, config))
        return messages

    def _new_task(
        self, client: Client, shared: Model, arrays: ArrayRecord, config: ConfigRecord
    ) -> Message:
        """Give a client a task."""
        run = self._run
        start, record = shared, arrays
        vector = run.rule.start_for(client.index)
        if vector is not run.rule.model:
            # What the client is given is what its message says, in the arrays' own formats.
            record = run.layout.write(vector, shared.states)
            start = Model(*run.layout.read(record))
        due = run.clock.due(client.index, run.sequence)
        task = Task(
            run.sequence,
            client.index,
            client.node_id,
            run.version,
            run.uploads,
            due,
            start,
            made=run.clock.now,
        )
        run.sequence += 1
        run.clients.start_task(client)
        return self._message(task, record, config)

    def resume(self, tasks: Iterable[Task], config: ConfigRecord) -> list[Message]:
        """Return the messages of tasks that were in flight when a run was interrupted.

        Those that count on arrival are left out: their time has passed, others take over.
        """
        messages = []
        for task in tasks:
            if task.due is not None:
                client = self._run.clients[task.client]
                task.node_id = client.node_id
                self._run.clients.start_task(client)
                messages.append(self._message(task, self._run.record_of(task.start), config))
        return messages

    def repeat(self, tasks: Iterable[Task], config: ConfigRecord) -> list[Message]:
        """Return the messages of tasks whose replies were lost: the same ones, under new ids."""
        messages = []
        for task in tasks:
            del self._run.in_flight[task.message_id]
            messages.append(self._message(task, self._run.record_of(task.start), config))
        return messages

    def sent(self, messages: Iterable[Message]) -> list[Task]:
        """Note the ids that pushing gave to prepared messages; return their tasks.

        Tasks that were sent before the run was resumed were counted then.
        """
        run = self._run
        tasks = []
        for message in messages:
            metadata = message.metadata
            # By node: hooks that rebuild messages still send one task to one node.
            if not metadata.message_id or metadata.dst_node_id not in run.prepared:
                continue
            task, _ = run.prepared.pop(metadata.dst_node_id)
            sent_before = bool(task.message_id)
            task.message_id = metadata.message_id
            run.in_flight[task.message_id] = task
            tasks.append(task)
            now, about = run.clock.now, task.about
            if sent_before:
                run.emit(Resent(time=now, **about))
            else:
                run.emit(Dispatched(time=now, **about, num_bytes=count_bytes(message.content)))
        return tasks

    def _message(self, task: Task, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """Return the message of a task, which is in flight as soon as it is sent."""
        form, training = self._form, self._form.training
        record = config.copy()
        if isinstance(lr := record.get("lr"), float):
            per = training.lr_decay_per_upload
            exponent = task.version if per is None else task.uploads / per
            record["lr"] = lr * training.lr_decay**exponent
        record["version"] = task.version
        record["server-round"] = task.version + 1
        record["seed"] = derive(self._seed, "task", task.sequence)
        record[REPLY_ARRAYS] = DELTA
        if training.update_dtype != "float32":
            record[UPDATE_DTYPE_KEY] = training.update_dtype
        for configure in self._configure:
            configure(task, record)
        records: dict[str, Any] = {form.arrays_key: arrays, form.config_key: record}
        for attach in self._attach:
            records |= attach(task)
        message = Message(RecordDict(records), task.node_id, MessageType.TRAIN, ttl=self._ttl)
        self._run.prepared[task.node_id] = (task, message)
        return message
