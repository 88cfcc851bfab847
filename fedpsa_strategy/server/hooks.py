"""Flower's hooks, on top of dispatch and application."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import InvalidReplyError, NotRunningError
from fedpsa_strategy.methods.base import Rule
from fedpsa_strategy.seeds import MAX_SEED, derive
from fedpsa_strategy.server.apply import Apply
from fedpsa_strategy.server.callbacks import Callback, Plausible
from fedpsa_strategy.server.callbacks.patience import Patience
from fedpsa_strategy.server.callbacks.train_config import TrainConfig
from fedpsa_strategy.server.checkpoint import Checkpointer
from fedpsa_strategy.server.clients import Clients
from fedpsa_strategy.server.clock import Clock, WallClock
from fedpsa_strategy.server.dispatch import Dispatch
from fedpsa_strategy.server.events import Listener
from fedpsa_strategy.server.metrics import with_plausible_weights
from fedpsa_strategy.server.options import (
    Evaluation,
    Failures,
    FlowerKeywords,
    FlowerOptions,
    Limits,
    MessageForm,
    Training,
)
from fedpsa_strategy.server.run_state import RunState, new_run
from fedpsa_strategy.watch.version_log import VersionLog
from fedpsa_strategy.wire.layout import Layout
from fedpsa_strategy.wire.replies import read_metrics_reply
from fedpsa_strategy.wire.text import MAX_REASON, shown

log = logging.getLogger("flwr")


class FlowerHooks(Strategy):
    """What the loop asks a strategy: Flower's four hooks, the parts behind them, and its options.

    See `AsyncStrategy`, which adds `start`, for the parameters.
    """

    dispatch: Dispatch  # from `begin` on
    apply: Apply

    def __init__(
        self,
        *,
        rule: Rule,
        max_in_flight: int | None = None,
        queued_per_node: int = 0,
        trainable: Iterable[str] | None = None,
        clock: Clock | None = None,
        num_clients: int | None = None,
        seed: int = 0,
        training: Training | None = None,
        limits: Limits | None = None,
        failures: Failures | None = None,
        evaluation: Evaluation | None = None,
        callbacks: Sequence[Callback] = (),
        checkpointer: Checkpointer | None = None,
        listeners: Sequence[Listener] | None = None,
        **flower: Unpack[FlowerKeywords],
    ) -> None:
        check_range("max_in_flight", max_in_flight, least=1)
        check_range("queued_per_node", queued_per_node, least=0)
        check_range("num_clients", num_clients, least=1)
        check_range("seed", seed, least=0, most=MAX_SEED)
        self.clock = clock if clock is not None else WallClock()
        if self.clock.fixed_nodes and num_clients is None:
            raise ValueError(
                "num_clients is needed with a VirtualClock, for runs that can be repeated"
            )
        self.rule = rule
        self.flower = FlowerOptions(**flower)
        self.max_in_flight = max_in_flight
        # Simulated nodes need no time between two tasks, and a round waits for all clients.
        self.queued_per_node = (
            queued_per_node if self.clock.real_time and not rule.synchronous else 0
        )
        self.trainable = None if trainable is None else list(trainable)
        self.num_clients = num_clients
        self.seed = seed
        self.limits = limits if limits is not None else Limits()
        self.failures = failures if failures is not None else Failures()
        self.evaluation = evaluation if evaluation is not None else Evaluation()
        self.form = MessageForm(
            self.flower.arrayrecord_key,
            self.flower.configrecord_key,
            self.flower.weighted_by_key,
            training or Training(),
        )
        self.callbacks: list[Callback] = [
            Plausible(self.flower.weighted_by_key),
            TrainConfig(rule.settings.client_config()),
            *callbacks,
        ]
        # A round waits for all of its clients in it.
        if self.clock.real_time and not rule.synchronous and self.failures.overdue_factor:
            self.callbacks.append(Patience(self.failures))
        self.checkpointer = checkpointer if checkpointer is not None else Checkpointer()
        self.listeners: list[Listener] = list([VersionLog()] if listeners is None else listeners)
        self.message_ttl: float | None = None
        self._state: RunState | None = None
        self._running = False  # whether the state is that of a run which has not ended

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up the state of a new run that starts from `arrays`."""
        clients = Clients(self.seed)
        for node_id in sorted(node_ids):
            clients.join(node_id)
        layout = Layout(arrays, self.trainable)
        run = new_run(self.rule, self.clock, self.listeners, arrays, layout, clients)
        self.dispatch = Dispatch(run, self.form, self.seed, self.message_ttl, self.callbacks)
        self.apply = Apply(
            run, self.form, self.failures, self.callbacks, self.flower.combine_train_metrics
        )
        self._state = run
        self._running = True
        for callback in self.callbacks:
            callback.begin(run)

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
        share = int(self.flower.fraction_train * len(self.state.clients) + 1e-9)
        return max(self.flower.min_train_nodes, share)

    @property
    def num_nodes_wanted(self) -> int:
        """How many nodes a run waits for; exactly this many where the clock fixes them."""
        if self.clock.fixed_nodes and self.num_clients is not None:
            return self.num_clients
        return self.flower.min_available_nodes

    # --- Flower's interface --------------------------------------------------------------------

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
            When neither `start()` nor `begin()` has begun a run: another loop is calling.
        """
        if not self._running:
            raise NotRunningError(
                f"{type(self).__name__} runs an asynchronous loop of its own: call its start(). "
                "Another strategy around it, such as Flower's differential privacy wrappers, would "
                "run synchronous rounds and take its updates for models, so it is not supported"
            )
        return self.dispatch.fill(self.concurrency, arrays, config, self.queued_per_node)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
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
        run = self.state
        if run.prepared:  # another loop than ours has sent them
            self.dispatch.sent([message for _, message in run.prepared.values()])
        version = run.version
        for reply in replies:
            self.apply.reply(reply)
        if run.version == version:
            return None, None
        return run.arrays, run.result.train_metrics_clientapp.get(run.version)

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
        if self.flower.fraction_evaluate == 0:
            return []
        # A ranking by derived numbers: seeded, and independent of Flower's order of nodes.
        nodes = self.state.clients.node_ids if self._state else set(grid.get_node_ids())
        ranked = sorted(nodes, key=lambda node: (self._evaluate_rank(server_round, node), node))
        share = int(len(ranked) * self.flower.fraction_evaluate + 1e-9)
        size = max(self.flower.min_evaluate_nodes, share)
        record = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({self.form.arrays_key: arrays, self.form.config_key: record})
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
        contents = with_plausible_weights(contents, self.form.weight_key)
        combine = self.flower.combine_evaluate_metrics
        return combine(contents, self.form.weight_key) if contents else None

    def _evaluate_rank(self, version: int, node_id: int) -> int:
        client = self.state.clients.by_node(node_id) if self._state else None
        return derive(self.seed, "evaluate", version, client.index if client else node_id)
