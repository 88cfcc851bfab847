"""AsyncStrategy: Flower's `Strategy`, asynchronous."""

from __future__ import annotations

import logging

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.server.evaluation import EvaluateFn
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
        Saves the run's state from time to time.
    resume_from : dict[str, Any] (default: None)
        A saved state to go on from; the run has to be set up as the saved one was.
    listeners : Sequence[Callable[[Event], None]] (default: None)
        Called with every event of the run; None logs a line per version and the final results.
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
        if any(isinstance(listener, VersionLog) for listener in self.listeners):
            log.info("Final results:")
            for line in str(result).splitlines():
                log.info("\t%s", line)
        return result

    def summary(self) -> None:
        """Log the strategy's configuration."""
        busy = self.max_in_flight or f"{self.fraction_train:.0%} of the nodes"
        log.info("\t├──> Clients kept busy: %s", busy)
        log.info("\t├──> Clock: %r", self.clock)
        log.info("\t├──> Federated evaluation: %.0f%% of the nodes", 100 * self.fraction_evaluate)
        log.info("\t└──> %r", self.rule.settings)
