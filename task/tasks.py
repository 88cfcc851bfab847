"""A task: the model, the data and the loss, in four functions.

Our datasets are tasks; so is any module or object of a user's own that has these four functions and
is named `task='my_module:my_task'` in the run config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.datasets import dataset_info
from task.errors import TaskError
from task.kinds import Kind
from task.models import make_model
from task.own_metrics import MetricsFn
from task.shards import Source, dataset_source, file_shard
from task.tensors import Shard

__all__ = [
    "DatasetTask",
    "LearningTask",
    "TaskError",
    "as_shard",
    "calibration_recipe",
    "find_task",
    "own_metrics_of",
]

FUNCTIONS = ("make_model", "train_data", "test_data", "loss")


class LearningTask(Protocol):
    """What has to be provided to train something else than the built-in datasets."""

    def make_model(self, seed: int) -> nn.Module:
        """Return the initial model, the same for the same seed."""

    def train_data(self, node_config: Mapping[str, Any]) -> Any:
        """Return the inputs and targets of the node with this node config, as two tensors."""

    def test_data(self) -> Any:
        """Return the inputs and targets that the server tests on, as two tensors."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return one loss per sample."""


@dataclass(frozen=True)
class DatasetTask:
    """One of the built-in datasets, split over clients.

    Parameters
    ----------
    dataset : str
        A key of `task.datasets.DATASETS`.
    num_clients : int
        Into how many parts the training data is split.
    partition, alpha
        See `task.partition.partition`.
    test_fraction, seed, data_dir, cache_dir
        See `task.shards.dataset_source`.
    model, model_width
        See `task.models.make_model`.
    held_out : int (default: 0)
        How many training samples no client gets.
    """

    dataset: str
    num_clients: int
    partition: str = "client-dirichlet"
    alpha: float = 0.5
    test_fraction: float = 0.1
    seed: int = 0
    data_dir: str = ""
    cache_dir: str = ""
    model: str = "default"
    model_width: float = 1.0
    held_out: int = 0

    @property
    def _source(self) -> Source:
        return dataset_source(
            self.dataset,
            test_fraction=self.test_fraction,
            seed=self.seed,
            data_dir=self.data_dir,
            cache_dir=self.cache_dir,
        )

    def prepare(self) -> None:
        """Read the dataset and draw the partition once, so that clients find both in the cache."""
        self._source.warm_cache(self.num_clients, self.partition, self.alpha)

    def make_model(self, seed: int) -> nn.Module:
        """Return the dataset's model."""
        return make_model(self.dataset, seed, self.model, self.model_width)

    def train_data(self, node_config: Mapping[str, Any]) -> Shard:
        """Return a node's data: its own file (`data-path`), or its partition of the dataset."""
        if "data-path" in node_config:
            return file_shard(str(node_config["data-path"]), dataset_info(self.dataset))
        if "partition-id" not in node_config:
            raise ValueError(
                "this node has no data: start its SuperNode with --node-config "
                '"data-path=\'/path/to/data.npz\'" or "partition-id=0 num-partitions=10"'
            )
        partition, total = (
            _integer(node_config, key) for key in ("partition-id", "num-partitions")
        )
        if total != self.num_clients:
            raise ValueError(
                f"this node holds a partition of {total}, but num-clients is {self.num_clients}: "
                "make num-clients and the number of (simulated) nodes agree"
            )
        return self._source.client(partition, total, self.partition, self.alpha, self.held_out)

    def calibration_data(self) -> Shard | None:
        """Return the training samples that no client gets, if there are any."""
        return self._source.held_out(self.held_out) if self.held_out else None

    def test_data(self) -> Shard:
        """Return the test split."""
        return self._source.test()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample."""
        return functional.cross_entropy(outputs, targets, reduction="none")


@lru_cache(maxsize=4)
def find_task(reference: str) -> LearningTask:
    """Return a user's task by its name `module:object`, or `module` for the module itself.

    `TaskError` says that there is none, or that it lacks one of the four functions.
    """
    module_name, _, name = reference.partition(":")
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise TaskError(
            f"task={reference!r}: cannot import {module_name!r} ({error}); install it where server "
            "and nodes run, or put its folder on PYTHONPATH there"
        ) from error
    if name:
        if not hasattr(found, name):
            raise TaskError(f"task={reference!r}: {module_name} has no {name!r}")
        found = getattr(found, name)
    if isinstance(found, type):
        found = found()
    if missing := [
        function for function in FUNCTIONS if not callable(getattr(found, function, None))
    ]:
        raise TaskError(f"task={reference!r} lacks the functions {missing}; a task has {FUNCTIONS}")
    task: LearningTask = found
    return task


def own_metrics_of(task: LearningTask) -> MetricsFn | None:
    """Return a task's function `metrics(outputs, targets)`, if it has one."""
    found = getattr(task, "metrics", None)
    if found is None:
        return None
    if not callable(found):
        raise TaskError("a task's `metrics` must be a function of outputs and targets")
    metrics_fn: MetricsFn = found
    return metrics_fn


def as_shard(data: Any, what: str) -> Shard:
    """Return inputs and targets as a shard, two tensors of the same, positive length."""
    if isinstance(data, Shard):
        return data
    try:
        x, y = (torch.as_tensor(values) for values in data)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{what} must return inputs and targets, two tensors: {error}") from None
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise TaskError(
            f"{what} returned inputs of shape {tuple(x.shape)} and targets of shape "
            f"{tuple(y.shape)}: both need the samples along their first dimension, the same "
            "number of them and at least one"
        )
    return Shard(x.contiguous(), y.contiguous())


def calibration_recipe(shard: Shard, kind: Kind | None) -> dict[str, Any]:
    """Return how a calibration batch like some real samples is drawn."""
    recipe: dict[str, Any] = {"shape": tuple(shard.x.shape[1:])}
    if not shard.x.is_floating_point():
        recipe["vocabulary"] = int(shard.x.max()) + 1
    if shard.y.dim() > 1 or shard.y.is_floating_point():
        recipe["target_shape"] = tuple(shard.y.shape[1:])
    if not shard.y.is_floating_point():
        recipe["num_classes"] = int(shard.y.max()) + 1 if kind is None else kind.num_classes
    return recipe


def _integer(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise ValueError(f"{key!r} is missing from the config this node was given")
    value = config[key]
    if type(value) is not int:
        raise ValueError(f"{key}={value!r} must be a int, not {type(value).__name__}")
    return value
