"""What a strategy can be told beside its method, in groups; each checks itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from flwr.app import MetricRecord, RecordDict

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.server.metrics import weighted_mean
from fedpsa_strategy.wire.update_dtype import check_update_dtype

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]


class FlowerKeywords(TypedDict, total=False):
    """The types of `FlowerOptions`, for callers that write them as keywords."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator | None
    evaluate_metrics_aggr_fn: MetricsAggregator | None


@dataclass(frozen=True)
class FlowerOptions:
    """What Flower's FedAvg takes, with the same names and meaning: keywords of every strategy.

    Parameters
    ----------
    fraction_train : float (default: 0.2)
        Share of the nodes that is kept busy.
    fraction_evaluate : float (default: 0.0)
        Share of the nodes that evaluates the global model, 0 for none.
    min_train_nodes : int (default: 1)
        Minimum number of busy nodes.
    min_evaluate_nodes : int (default: 1)
        Minimum number of nodes that evaluate, if any do.
    min_available_nodes : int (default: 1)
        The run waits until this many nodes are connected.
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
    """

    fraction_train: float = 0.2
    fraction_evaluate: float = 0.0
    min_train_nodes: int = 1
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 1
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: MetricsAggregator | None = None
    evaluate_metrics_aggr_fn: MetricsAggregator | None = None

    def __post_init__(self) -> None:
        check_range("fraction_train", self.fraction_train, above=0, most=1)
        check_range("fraction_evaluate", self.fraction_evaluate, least=0, most=1)
        check_range("min_train_nodes", self.min_train_nodes, least=1)
        check_range("min_evaluate_nodes", self.min_evaluate_nodes, least=1)
        check_range("min_available_nodes", self.min_available_nodes, least=1)

    @property
    def combine_train_metrics(self) -> MetricsAggregator:
        """The function that combines the metrics of a version's uploads."""
        return self.train_metrics_aggr_fn or weighted_mean

    @property
    def combine_evaluate_metrics(self) -> MetricsAggregator:
        """The function that combines the metrics of a federated evaluation."""
        return self.evaluate_metrics_aggr_fn or weighted_mean


@dataclass(frozen=True)
class Limits:
    """When a run ends, if not by its number of versions.

    Parameters
    ----------
    deadline : float (default: None)
        At this time of its clock (virtual units, or seconds).
    time_limit : float (default: None)
        After this many real seconds, whatever its clock.
    target_accuracy : float (default: None)
        When `evaluate_fn` reports an `accuracy` of at least this.
    stop_fn : Callable[[], bool] (default: None)
        When this returns True: asked about twice a second, the run ends cleanly.
    """

    deadline: float | None = None
    time_limit: float | None = None
    target_accuracy: float | None = None
    stop_fn: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        check_range("deadline", self.deadline, above=0)
        check_range("time_limit", self.time_limit, above=0)
        check_range("target_accuracy", self.target_accuracy, above=0, most=1)


@dataclass(frozen=True)
class Failures:
    """What to do with nodes that fail, or are not there.

    Parameters
    ----------
    max_failures : int (default: 3)
        A node that fails so often in a row is left out for a while.
    pause : float (default: 600.0)
        For how long, in units of the clock.
    node_timeout : float (default: 120.0)
        How many seconds to wait for nodes before giving up.
    query_timeout : float (default: 0.0)
        Where nodes may come and go: how many seconds they have to tell their partition at the
        start, by which they are known again when they come back under another id. 0: nodes
        are not asked, and clients need no query function.
    overdue_factor : float (default: 5.0)
        With the wall clock, a client that takes longer than the median response time plus this
        many median deviations is overdue: its slot goes to another one, and its reply still counts
        when it comes. 0: a slot is held until the reply comes, or is given up.
    overdue_floor, overdue_ceiling : float (default: 30.0, 1800.0)
        No client is overdue before the first, and every client is after the second; seconds.
    """

    max_failures: int = 3
    pause: float = 600.0
    node_timeout: float = 120.0
    query_timeout: float = 0.0
    overdue_factor: float = 5.0
    overdue_floor: float = 30.0
    overdue_ceiling: float = 1800.0

    def __post_init__(self) -> None:
        check_range("max_failures", self.max_failures, least=1)
        check_range("pause", self.pause, above=0)
        check_range("node_timeout", self.node_timeout, above=0)
        check_range("query_timeout", self.query_timeout, least=0)
        check_range("overdue_factor", self.overdue_factor, least=0)
        check_range("overdue_floor", self.overdue_floor, above=0)
        check_range("overdue_ceiling", self.overdue_ceiling, above=0)
        if self.overdue_floor > self.overdue_ceiling:
            raise ValueError(
                f"overdue_floor = {self.overdue_floor}: must be at most overdue_ceiling = "
                f"{self.overdue_ceiling}"
            )


@dataclass(frozen=True)
class Evaluation:
    """When the global model is evaluated.

    Parameters
    ----------
    every : int (default: 1)
        Versions between two evaluations.
    interval : float (default: None)
        Units of the clock between two evaluations; None: by versions.
    """

    every: int = 1
    interval: float | None = None

    def __post_init__(self) -> None:
        check_range("every", self.every, least=1)
        check_range("interval", self.interval, above=0)


@dataclass(frozen=True)
class Training:
    """What clients are told about training and about what they send.

    Parameters
    ----------
    lr_decay : float (default: 1.0)
        The train config's `lr` is multiplied by lr_decay ** version.
    lr_decay_per_upload : int (default: None)
        Decay by uploads instead: lr_decay ** (uploads / this number).
    update_dtype : "float32", "float16", "bfloat16", "int8" or "int4" (default: "float32")
        In which format clients send updates; "float32" means in the model's own dtypes, "int8" and
        "int4" levels that share a scale by blocks, rounded at random and without bias.
    """

    lr_decay: float = 1.0
    lr_decay_per_upload: int | None = None
    update_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_update_dtype(self.update_dtype)
        check_range("lr_decay", self.lr_decay, above=0, most=1)
        check_range("lr_decay_per_upload", self.lr_decay_per_upload, least=1)


@dataclass(frozen=True)
class MessageForm:
    """How train messages and their replies look.

    Parameters
    ----------
    arrays_key, config_key : str
        Names of the records in messages.
    weight_key : str
        The metric that weighs replies.
    training : Training
        What clients are told.
    """

    arrays_key: str
    config_key: str
    weight_key: str
    training: Training
