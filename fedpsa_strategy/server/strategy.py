"""AsyncStrategy: Flower's `Strategy`, asynchronous."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.server.callbacks.evaluation import EvaluateFn
from fedpsa_strategy.server.hooks import FlowerHooks
from fedpsa_strategy.server.loop import AsyncLoop
from fedpsa_strategy.watch.version_log import VersionLog

log = logging.getLogger("flwr")


class AsyncStrategy(FlowerHooks):
    """Keeps a number of clients busy and gives each reply, as it comes, to an aggregation rule.

    A "round" of Flower is a version of the global model here.

    Parameters
    ----------
    rule : Rule
        The aggregation rule.
    max_in_flight : int (default: None)
        How many nodes are kept busy, instead of a share of them.
    queued_per_node : int (default: 0)
        With the wall clock: how many further tasks wait at a node while it works, when all nodes
        that may work do. The next one starts at once when one ends; its start is that much older.
    trainable : Iterable[str] (default: None)
        Keys of the trainable arrays; None means all float arrays but the `running_mean` and
        `running_var` of PyTorch's normalisation layers. The others are states: a version's floats
        are a weighted mean of the values that clients hold, integers those of the last upload.
    clock : Clock (default: None)
        `WallClock()` if None, or a `VirtualClock(latency)`.
    num_clients : int (default: None)
        With the virtual clock: exactly this many nodes must take part.
    seed : int (default: 0)
        Seed of the sampling and of the tasks' own seeds.
    training : Training (default: None)
        Decay of the learning rate, and the format of updates.
    limits : Limits (default: None)
        What ends the run before its last version.
    failures : Failures (default: None)
        What to do with nodes that fail, or are not there.
    evaluation : Evaluation (default: None)
        When the global model is evaluated; None is after every version.
    callbacks : Sequence[Callback] (default: ())
        Look at tasks and replies, such as `NormGuard`, which limits how large an update may be.
    checkpointer : Checkpointer (default: None)
        Saves the run's state from time to time, and has the state that the run resumes from.
    listeners : Sequence[Callable[[Event], None]] (default: None)
        Called with every event of the run; None logs a line per version and the final results.
    **flower : Any
        What Flower's FedAvg takes, under the same names: `fraction_train`, `min_available_nodes`,
        `weighted_by_key` and so on (`FlowerOptions`).
    """

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
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
        should_stop : Callable[[int, Result], bool] (default: None)
            Asked after each version, with its number and the result so far; True ends the run.

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
            should_stop=should_stop,
        )
        try:
            result = loop.run()
        finally:
            self._running = False
        if any(isinstance(listener, VersionLog) for listener in self.listeners):
            log.info("Final results:")
            for line in str(result).splitlines():
                log.info("\t%s", line)
        return result

    def summary(self) -> None:
        """Log the strategy's configuration."""
        busy = self.max_in_flight or f"{self.flower.fraction_train:.0%} of the nodes"
        log.info("\t├──> Clients kept busy: %s", busy)
        log.info("\t├──> Clock: %r", self.clock)
        log.info(
            "\t├──> Federated evaluation: %.0f%% of the nodes", 100 * self.flower.fraction_evaluate
        )
        log.info("\t└──> %r", self.rule.settings)
