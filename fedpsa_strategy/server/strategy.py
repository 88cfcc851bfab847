"""AsyncStrategy: Flower's `Strategy`, asynchronous."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import ForgeryError, InvalidReplyError, NotRunningError
from fedpsa_strategy.methods.base import Rule, Update, Vector
from fedpsa_strategy.seeds import MAX_SEED, derive
from fedpsa_strategy.server.checkpoint import Checkpointer
from fedpsa_strategy.server.clients import Client, Clients
from fedpsa_strategy.server.clock import Clock, VirtualClock, WallClock
from fedpsa_strategy.server.events import (
    Aggregated,
    Dispatched,
    Event,
    Listener,
    Quarantined,
    Rejected,
    Resent,
    Uploaded,
)
from fedpsa_strategy.server.loop import AsyncLoop
from fedpsa_strategy.server.metrics import weighted_mean
from fedpsa_strategy.server.norm_guard import NormGuard
from fedpsa_strategy.server.plausible import check_num_examples, check_step
from fedpsa_strategy.watch.version_log import VersionLog
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS, SECONDS
from fedpsa_strategy.wire.layout import Layout, States
from fedpsa_strategy.wire.replies import (
    TrainReply,
    count_bytes,
    read_metrics_reply,
    read_train_reply,
    squared_norm,
)
from fedpsa_strategy.wire.states import combine_states
from fedpsa_strategy.wire.text import MAX_REASON, shown
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPE_KEY, check_update_dtype

log = logging.getLogger("flwr")

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_MOST_REASONS = 64  # different ones that are counted: clients may write what they like


@dataclass
class Task:
    """One train message on its way: all that is needed to send it again, or to judge its reply."""

    sequence: int
    client: int
    node_id: int
    version: int
    uploads: int
    due: float | None  # virtual time at which the reply takes effect
    message_id: str = ""


@dataclass
class RunState:
    """Where a run stands."""

    layout: Layout
    clients: Clients
    arrays: ArrayRecord
    version: int = 0
    uploads: int = 0
    rejected: int = 0
    rejected_in_a_row: int = 0
    sequence: int = 0
    in_flight: dict[str, Task] = field(default_factory=dict)  # by message id
    prepared: dict[int, tuple[Task, Message]] = field(default_factory=dict)  # by node id
    models: dict[int, tuple[Vector, States]] = field(default_factory=dict)  # versions in use
    norms: dict[int, float] = field(default_factory=dict)  # of these, as far as they were needed
    upload_states: list[States] = field(default_factory=list)  # of the last uploads
    tasks_of: Counter[int] = field(default_factory=Counter)  # tasks on their way, by version
    reasons: Counter[str] = field(default_factory=Counter)
    round_metrics: list[RecordDict] = field(default_factory=list)
    version_metrics: MetricRecord | None = None

    def count_reason(self, reason: str) -> None:
        """Count a reason for a rejection; of too many different ones, the rarest is forgotten."""
        self.reasons[reason] += 1
        if len(self.reasons) > _MOST_REASONS:
            del self.reasons[min(self.reasons, key=self.reasons.__getitem__)]


class AsyncStrategy(Strategy):
    """Keeps a number of clients busy and gives each reply, as it comes, to an aggregation rule.

    A "round" of Flower is a version of the global model here.

    Parameters
    ----------
    rule : Rule
        The aggregation rule.
    fraction_train : float (default: 0.2)
        Share of the nodes that is kept busy.
    max_in_flight : int (default: None)
        How many nodes are kept busy, instead of a share of them.
    min_train_nodes : int (default: 1)
        At least so many are kept busy, however small the share.
    fraction_evaluate : float (default: 0.0)
        Share of the nodes that evaluates the global model, 0 for none.
    min_evaluate_nodes : int (default: 1)
        At least so many evaluate, if any do.
    min_available_nodes : int (default: 1)
        The run waits until so many nodes are connected.
    weighted_by_key : str (default: "num-examples")
        The metric that weighs the replies' metrics.
    arrayrecord_key : str (default: "arrays")
        Key of the ArrayRecord in messages.
    configrecord_key : str (default: "config")
        Key of the ConfigRecord in messages.
    train_metrics_aggr_fn : Callable[[list[RecordDict], str], MetricRecord] (default: None)
        Combines the metrics of the uploads of one version; None is the weighted mean.
    evaluate_metrics_aggr_fn : Callable[[list[RecordDict], str], MetricRecord] (default: None)
        The same for federated evaluation.
    trainable : Iterable[str] (default: None)
        Keys of the trainable arrays; None means all float arrays but the `running_mean` and
        `running_var` of PyTorch's normalisation layers. The others are states: a version's floats
        are a weighted mean of the values that clients hold, integers those of the last upload.
    clock : Clock (default: None)
        `WallClock()` if None, or a `VirtualClock(latency)`.
    num_clients : int (default: None)
        With the virtual clock: exactly so many nodes have to take part.
    seed : int (default: 0)
        Seed of the sampling and of the tasks' own seeds.
    lr_decay : float (default: 1.0)
        The train config's `lr` is multiplied by lr_decay ** version.
    lr_decay_per_upload : int (default: None)
        Decay by uploads instead: lr_decay ** (uploads / this number).
    deadline : float (default: None)
        The run stops at this time of its clock (virtual units, or seconds).
    time_limit : float (default: None)
        The run stops after so many real seconds, whatever its clock.
    target_accuracy : float (default: None)
        The run stops when `evaluate_fn` reports an `accuracy` of at least this.
    evaluate_every : int (default: 1)
        Evaluate every so many versions.
    evaluate_interval : float (default: None)
        Evaluate every so many units of the clock instead.
    max_failures : int (default: 3)
        A node that fails so often in a row is left out for a while.
    failure_pause : float (default: 600.0)
        For how long, in units of the clock.
    node_timeout : float (default: 120.0)
        How many seconds to wait for nodes before giving up.
    query_timeout : float (default: 0.0)
        With the wall clock: how many seconds nodes have to tell their partition at the start, by
        which they are known again when they come back under another id. 0: nobody is asked, and
        clients need no query function.
    update_dtype : "float32", "float16" or "bfloat16" (default: "float32")
        In which format clients send updates; "float32" means in the model's own dtypes.
    norm_guard : NormGuard (default: None)
        Limits how large an update may be; None: no limit.
    checkpointer : Checkpointer (default: None)
        Saves the run's state from time to time.
    resume_from : dict[str, Any] (default: None)
        A saved state to go on from; the run has to be set up as the saved one was.
    stop_fn : Callable[[], bool] (default: None)
        Asked about twice a second; the run ends in good order when it returns True.
    listeners : Sequence[Callable[[Event], None]] (default: None)
        Called with every event of the run; None logs a line per version and the final results.
    """

    def __init__(
        self,
        *,
        rule: Rule,
        fraction_train: float = 0.2,
        max_in_flight: int | None = None,
        min_train_nodes: int = 1,
        fraction_evaluate: float = 0.0,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 1,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregator | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregator | None = None,
        trainable: Iterable[str] | None = None,
        clock: Clock | None = None,
        num_clients: int | None = None,
        seed: int = 0,
        lr_decay: float = 1.0,
        lr_decay_per_upload: int | None = None,
        deadline: float | None = None,
        time_limit: float | None = None,
        target_accuracy: float | None = None,
        evaluate_every: int = 1,
        evaluate_interval: float | None = None,
        max_failures: int = 3,
        failure_pause: float = 600.0,
        node_timeout: float = 120.0,
        query_timeout: float = 0.0,
        update_dtype: str = "float32",
        norm_guard: NormGuard | None = None,
        checkpointer: Checkpointer | None = None,
        resume_from: dict[str, Any] | None = None,
        stop_fn: Callable[[], bool] | None = None,
        listeners: Sequence[Listener] | None = None,
    ) -> None:
        check_range("fraction_train", fraction_train, above=0, most=1)
        check_range("fraction_evaluate", fraction_evaluate, least=0, most=1)
        check_range("max_in_flight", max_in_flight, least=1)
        check_range("min_train_nodes", min_train_nodes, least=1)
        check_range("min_evaluate_nodes", min_evaluate_nodes, least=1)
        check_range("min_available_nodes", min_available_nodes, least=1)
        check_range("num_clients", num_clients, least=1)
        check_range("seed", seed, least=0, most=MAX_SEED)
        check_range("lr_decay", lr_decay, above=0, most=1)
        check_range("lr_decay_per_upload", lr_decay_per_upload, least=1)
        check_range("deadline", deadline, above=0)
        check_range("time_limit", time_limit, above=0)
        check_range("target_accuracy", target_accuracy, above=0, most=1)
        check_range("evaluate_every", evaluate_every, least=1)
        check_range("evaluate_interval", evaluate_interval, above=0)
        check_range("max_failures", max_failures, least=1)
        check_range("failure_pause", failure_pause, above=0)
        check_range("node_timeout", node_timeout, above=0)
        check_range("query_timeout", query_timeout, least=0)
        self.clock = clock if clock is not None else WallClock()
        if self.clock.virtual and num_clients is None:
            raise ValueError(
                "num_clients is needed with a VirtualClock, for runs that can be repeated"
            )
        self.rule = rule
        self.fraction_train = fraction_train
        self.max_in_flight = max_in_flight
        self.min_train_nodes = min_train_nodes
        self.fraction_evaluate = fraction_evaluate
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or weighted_mean
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or weighted_mean
        self.trainable = None if trainable is None else list(trainable)
        self.num_clients = num_clients
        self.seed = seed
        self.lr_decay = lr_decay
        self.lr_decay_per_upload = lr_decay_per_upload
        self.deadline = deadline
        self.time_limit = time_limit
        self.target_accuracy = target_accuracy
        self.evaluate_every = evaluate_every
        self.evaluate_interval = evaluate_interval
        self.max_failures = max_failures
        self.failure_pause = failure_pause
        self.node_timeout = node_timeout
        self.query_timeout = query_timeout
        self.update_dtype = check_update_dtype(update_dtype)
        self.norm_guard = norm_guard if norm_guard is not None else NormGuard()
        self.checkpointer = checkpointer
        self.resume_from = resume_from
        self.stop_fn = stop_fn
        self.listeners: list[Listener] = list([VersionLog()] if listeners is None else listeners)
        self._logs_results = listeners is None
        self.message_ttl: float | None = None
        self._state: RunState | None = None
        self._running = False  # whether the state is that of a run which has not ended

    # --- Flower's interface --------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run until `num_rounds` versions are made, or another limit is reached.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        initial_arrays : ArrayRecord
            The first global model.
        num_rounds : int (default: 3)
            Versions to make.
        timeout : float (default: 3600)
            Seconds after which a reply is no longer waited for.
        train_config : ConfigRecord (default: None)
            Sent with every train message.
        evaluate_config : ConfigRecord (default: None)
            Sent with every evaluate message.
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] (default: None)
            Centralised evaluation of a version.

        Returns
        -------
        Result
            Flower's result: the final arrays, and metrics by version.
        """
        check_range("num_rounds", num_rounds, least=1)
        check_range("timeout", timeout, above=0)
        log.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        self.message_ttl = timeout
        self.begin(initial_arrays)
        loop = AsyncLoop(
            self,
            grid,
            num_versions=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
        )
        try:
            result = loop.run()
        finally:
            self._running = False
        if self._logs_results:
            log.info("Final results:")
            for line in str(result).splitlines():
                log.info("\t%s", line)
        return result

    def configure_train(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Make a train message for every free slot, each for an idle node.

        Parameters
        ----------
        server_round : int
            The version in the making.
        arrays : ArrayRecord
            The current global model.
        config : ConfigRecord
            Sent along, with `lr` decayed and `version`, `server-round` and `seed` added.
        grid : Grid
            Where the nodes are.

        Raises
        ------
        NotRunningError
            When neither `start()` nor `begin()` has begun a run: somebody else's loop is calling.
        """
        if not self._running:
            raise NotRunningError(
                f"{type(self).__name__} runs an asynchronous loop of its own: call its start(). "
                "Another strategy around it, such as Flower's differential privacy wrappers, would "
                "run synchronous rounds and take its updates for models, so it is not supported"
            )
        state = self.state
        messages: list[Message] = []
        if self.rule.synchronous and state.clients.num_busy:
            return messages
        while state.clients.num_busy < self.concurrency:
            client = state.clients.sample(state.sequence, self.clock.now)
            if client is None:
                break
            task = self._new_task(client)
            messages.append(self.train_message(task, arrays, config))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and give them to the rule, one after the other.

        Parameters
        ----------
        server_round : int
            The version in the making.
        replies : Iterable[Message]
            Replies to messages of `configure_train`.

        Returns
        -------
        tuple[ArrayRecord | None, MetricRecord | None]
            The newest global model and the metrics of the uploads in it, or None if there is no new
            version.
        """
        state = self.state
        self.confirm_sent(message for _, message in list(state.prepared.values()))
        version = state.version
        for reply in replies:
            task = state.in_flight.get(reply.metadata.reply_to_message_id)
            if task is None:
                # No task, so nobody to hold to account and no slot to free.
                state.rejected += 1
                self.emit(
                    Rejected(
                        time=self.clock.now,
                        sequence=-1,
                        client=-1,
                        node_id=reply.metadata.src_node_id,
                        version=server_round - 1,
                        reason="reply to an unknown or already consumed message",
                    )
                )
                continue
            try:
                _check_sender(task, reply)
                self._take(task, self.inspect(task, self.read_reply(task, reply)))
            except InvalidReplyError as error:
                self.reject(task, str(error), quarantine=isinstance(error, ForgeryError))
        if state.version == version:
            return None, None
        return state.arrays, state.version_metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make evaluate messages for a sample of the nodes.

        Parameters
        ----------
        server_round : int
            The version to evaluate.
        arrays : ArrayRecord
            Its arrays.
        config : ConfigRecord
            Sent along, with `server-round` added.
        grid : Grid
            Where the nodes are.
        """
        if self.fraction_evaluate == 0:
            return []
        # A ranking by derived numbers: seeded, and independent of Flower's order of nodes.
        nodes = self.state.clients.node_ids if self._state else set(grid.get_node_ids())
        ranked = sorted(nodes, key=lambda node: (self._evaluate_rank(server_round, node), node))
        size = max(self.min_evaluate_nodes, int(len(ranked) * self.fraction_evaluate + 1e-9))
        record = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: record})
        return [
            Message(content, node, MessageType.EVALUATE, ttl=self.message_ttl)
            for node in ranked[:size]
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Combine the metrics of evaluate replies.

        Parameters
        ----------
        server_round : int
            The version that was evaluated.
        replies : Iterable[Message]
            Replies to messages of `configure_evaluate`.
        """
        contents = []
        for reply in replies:
            try:
                contents.append(read_metrics_reply(reply))
            except InvalidReplyError as error:
                log.warning(
                    "Evaluation of version %d: a reply is left out: %s",
                    server_round,
                    shown(error, MAX_REASON),
                )
        return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key) if contents else None

    def summary(self) -> None:
        """Log the strategy's configuration."""
        busy = self.max_in_flight or f"{self.fraction_train:.0%} of the nodes"
        log.info("\t├──> Clients kept busy: %s", busy)
        log.info("\t├──> Clock: %r", self.clock)
        log.info("\t├──> Federated evaluation: %.0f%% of the nodes", 100 * self.fraction_evaluate)
        log.info("\t└──> %r", self.rule.settings)

    # --- For the loop, and for strategies built on this one ------------------------------------

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        if self._state is None:
            raise NotRunningError("the strategy has no run yet: call start() or begin() first")
        return self._state

    @property
    def concurrency(self) -> int:
        """How many clients are to be kept busy now."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        share = int(self.fraction_train * len(self.state.clients) + 1e-9)
        return max(self.min_train_nodes, share)

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up the state of a new run that starts from `arrays`."""
        layout = Layout(arrays, self.trainable)
        model = layout.read(arrays)
        clients = Clients(self.seed)
        for node_id in sorted(node_ids):
            clients.join(node_id)
        self._state = RunState(layout, clients, arrays, models={0: model})
        self._running = True
        self.rule.start(model[0])
        self.norm_guard.reset()

    def emit(self, event: Event) -> None:
        """Hand an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def train_message(self, task: Task, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """Return the message of a task, which is in flight as soon as it is sent."""
        content = RecordDict(self.task_records(task, arrays, config))
        message = Message(content, task.node_id, MessageType.TRAIN, ttl=self.message_ttl)
        self.state.prepared[task.node_id] = (task, message)
        self.state.tasks_of[task.version] += 1
        return message

    def resume_messages(self, tasks: Iterable[Task], config: ConfigRecord) -> list[Message]:
        """Return the messages of tasks that were in flight when a run was interrupted.

        With the wall clock there are none: their time has passed, and other clients take over.
        """
        state = self.state
        messages = []
        for task in tasks if self.clock.virtual else ():
            client = state.clients[task.client]
            task.node_id = client.node_id
            state.clients.start_task(client)
            arrays = state.layout.write(*state.models[task.version])
            messages.append(self.train_message(task, arrays, config))
        self._forget_models()
        return messages

    def repeat_messages(self, tasks: Iterable[Task], config: ConfigRecord) -> list[Message]:
        """Return the messages of tasks whose replies were lost: the same ones, under new ids."""
        state = self.state
        messages = []
        for task in tasks:
            del state.in_flight[task.message_id]
            state.tasks_of[task.version] -= 1  # sending it counts it again
            arrays = state.layout.write(*state.models[task.version])
            messages.append(self.train_message(task, arrays, config))
        return messages

    def task_records(
        self, task: Task, arrays: ArrayRecord, config: ConfigRecord
    ) -> dict[str, ArrayRecord | MetricRecord | ConfigRecord]:
        """Return the records of a train message: a function of the task and the run's state."""
        return {
            self.arrayrecord_key: arrays,
            self.configrecord_key: self.task_config(task, config),
        }

    def task_config(self, task: Task, config: ConfigRecord) -> ConfigRecord:
        """Return the config of a train message: a function of the task and `config` alone."""
        record = config.copy()
        if isinstance(lr := record.get("lr"), float):
            exponent = (
                task.version
                if self.lr_decay_per_upload is None
                else task.uploads / self.lr_decay_per_upload
            )
            record["lr"] = lr * self.lr_decay**exponent
        record["version"] = task.version
        record["server-round"] = task.version + 1
        record["seed"] = derive(self.seed, "task", task.sequence)
        record[REPLY_ARRAYS] = DELTA
        if self.update_dtype != "float32":
            record[UPDATE_DTYPE_KEY] = self.update_dtype
        return record

    def start_of(self, task: Task) -> tuple[Vector, States]:
        """Return the model that a task in flight starts from: what its message carried."""
        return self.state.models[task.version]

    def read_reply(self, task: Task, reply: Message) -> TrainReply:
        """Check a reply to a train message; raises InvalidReplyError."""
        return read_train_reply(
            reply,
            self.state.layout,
            self.start_of(task),
            arrays_key=self.arrayrecord_key,
            weight_key=self.weighted_by_key,
            update_dtype=self.update_dtype,
        )

    def inspect(self, task: Task, reply: TrainReply) -> TrainReply:
        """Look at a well-formed update before it counts; raises InvalidReplyError."""
        state = self.state
        model_norm = self.model_norm(state.version)
        check_step(
            math.sqrt(reply.squared_norm),
            self.model_norm(task.version),
            model_norm,
            state.layout.largest_norm,
        )
        check_num_examples(
            self.weighted_by_key,
            reply.num_examples,
            state.clients[task.client].num_examples,
            state.clients.median_num_examples,
        )
        return self.norm_guard.check(
            reply, client=task.client, model_norm=model_norm, num_clients=len(state.clients)
        )

    def model_norm(self, version: int) -> float:
        """Return ||w|| of a version that is in use, over its trainable parameters."""
        state = self.state
        if version not in state.norms:
            state.norms[version] = math.sqrt(squared_norm(state.models[version][0]))
        return state.norms[version]

    def prepare(self) -> None:
        """Do what the next reply will need, while there is none: called before a run waits.

        It may be interrupted at any point, so nothing of a run's state may change here.
        """

    def confirm_sent(self, messages: Iterable[Message]) -> list[Task]:
        """Note the ids that pushing gave to prepared messages; return their tasks.

        Tasks that were sent before the run was resumed were counted then.
        """
        state = self.state
        tasks = []
        for message in messages:
            # By node: whoever rebuilds messages on the way still sends one task to one node.
            if (message_id := message.metadata.message_id) and (
                found := state.prepared.pop(message.metadata.dst_node_id, None)
            ):
                task = found[0]
                sent_before = bool(task.message_id)
                task.message_id = message_id
                state.in_flight[message_id] = task
                tasks.append(task)
                about: dict[str, Any] = {
                    "time": self.clock.now,
                    "sequence": task.sequence,
                    "client": task.client,
                    "node_id": task.node_id,
                    "version": task.version,
                }
                if sent_before:
                    self.emit(Resent(**about))
                else:
                    self.emit(Dispatched(**about, num_bytes=count_bytes(message.content)))
        return tasks

    def reject(self, task: Task, reason: str, *, quarantine: bool = False) -> None:
        """Give up a task: its client failed, its slot is free again.

        Parameters
        ----------
        task : Task
            The task.
        reason : str
            What the event says.
        quarantine : bool (default: False)
            Leave the node out at once, not only after several failures.
        """
        state = self.state
        reason = shown(reason, MAX_REASON)
        client = self._free(task)
        state.rejected += 1
        state.rejected_in_a_row += 1
        state.count_reason(reason)
        client.failures = max(client.failures + 1, self.max_failures if quarantine else 0)
        event = Rejected(
            time=self.clock.now,
            sequence=task.sequence,
            client=task.client,
            node_id=task.node_id,
            version=task.version,
            reason=reason,
        )
        log.warning("Rejected: %s: %s", client.named(task.node_id), reason)
        self.emit(event)
        if client.failures >= self.max_failures:
            client.paused_until = self.clock.now + self.failure_pause
            log.warning("Client %d failed %d times in a row: paused", task.client, client.failures)
            self.emit(
                Quarantined(
                    time=self.clock.now,
                    client=task.client,
                    node_id=task.node_id,
                    failures=client.failures,
                    until=client.paused_until,
                )
            )
        self._end_round()

    # --- Internals -----------------------------------------------------------------------------

    def _evaluate_rank(self, version: int, node_id: int) -> int:
        client = self.state.clients.by_node(node_id) if self._state else None
        return derive(self.seed, "evaluate", version, client.index if client else node_id)

    def _new_task(self, client: Client) -> Task:
        state = self.state
        due = None
        if isinstance(self.clock, VirtualClock):
            due = self.clock.now + self.clock.latency(client.index, state.sequence)
        task = Task(state.sequence, client.index, client.node_id, state.version, state.uploads, due)
        state.sequence += 1
        state.clients.start_task(client)
        return task

    def _free(self, task: Task) -> Client:
        """Take the task out of flight; its client may work again."""
        state = self.state
        state.in_flight.pop(task.message_id, None)
        state.prepared.pop(task.node_id, None)
        state.tasks_of[task.version] -= 1
        if not state.tasks_of[task.version]:
            del state.tasks_of[task.version]
        client = state.clients[task.client]
        state.clients.end_task(client)
        return client

    def _forget_models(self) -> None:
        state = self.state
        for version in state.models.keys() - state.tasks_of.keys() - {state.version}:
            del state.models[version]
            state.norms.pop(version, None)

    def _take(self, task: Task, reply: TrainReply) -> None:
        """Give an accepted update to the rule, and take over the new model if it makes one."""
        state = self.state
        update = Update(
            client=task.client,
            delta=reply.delta,
            squared_norm=reply.squared_norm,
            num_examples=reply.num_examples,
            version=task.version,
            staleness=state.version - task.version,
            start=self.start_of(task)[0],
            metrics=reply.metrics,
            extra=reply.extra,
        )
        model = self.rule.add(update)
        client = self._free(task)
        client.failures = 0
        state.clients.set_num_examples(client, reply.num_examples)
        state.rejected_in_a_row = 0
        state.uploads += 1
        state.upload_states.append(reply.states)
        state.clients.waiting.add(task.client)
        scalars = _scalars(reply.metrics)
        state.round_metrics.append(RecordDict({"metrics": scalars}))
        cost = {} if reply.seconds is None else {SECONDS: reply.seconds}
        report = self.rule.report
        # First the new version, if there is one, then the events: whoever listens must find a rule
        # and a state that agree.
        if model is not None:
            self._set_version(model)
        self.emit(
            Uploaded(
                time=self.clock.now,
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
        self._end_round()

    def _end_round(self) -> None:
        """Let a synchronous rule aggregate when the last client of its round is done."""
        if self.rule.synchronous and self.state.clients.num_busy == 0:
            model = self.rule.finish_round()
            if model is not None:
                self._set_version(model)
                self._tell_version()

    def _set_version(self, model: Vector) -> None:
        state = self.state
        states = combine_states(
            state.models[state.version][1], state.upload_states, self.rule.state_weights
        )
        kept = self.rule.uploads_kept
        state.upload_states = state.upload_states[-kept:] if kept else []
        state.version += 1
        state.models[state.version] = (model, states)
        state.arrays = state.layout.write(model, states)
        state.clients.waiting.clear()
        self._forget_models()
        state.version_metrics = self.train_metrics_aggr_fn(
            state.round_metrics, self.weighted_by_key
        )
        state.round_metrics = []

    def _tell_version(self) -> None:
        state = self.state
        self.emit(
            Aggregated(
                time=self.clock.now,
                version=state.version,
                uploads=state.uploads,
                report=self.rule.version_report,
            )
        )


def _check_sender(task: Task, reply: Message) -> None:
    """Refuse an update that another node made; errors may be Flower's own, for a node that died."""
    sender = reply.metadata.src_node_id
    if not reply.has_error() and sender != task.node_id:
        raise InvalidReplyError(f"the reply comes from node {sender}, not from node {task.node_id}")


def _scalars(metrics: MetricRecord) -> MetricRecord:
    scalars = metrics.copy()  # a new record would check every value again
    for key in [key for key, value in metrics.items() if isinstance(value, list)]:
        del scalars[key]
    return scalars
