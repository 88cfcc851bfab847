"""Flower's entry point on a node."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from fedpsa_strategy.client.reply import make_reply
from fedpsa_strategy.methods.registry import find_method
from fedpsa_strategy.probe.per_sample import LossFn
from fedpsa_strategy.probe.state_dicts import load_values, read_arrays
from fedpsa_strategy.seeds import model_seed
from task.errors import OutOfMemoryError
from task.hardware import release, resolve_device, set_threads
from task.kinds import CLASSES, Kind
from task.own_checks import check_own_task
from task.tasks import DatasetTask, LearningTask, as_shard, find_task, own_metrics_of
from task.training import measure
from task.training import train as train_model

app = ClientApp()

# Before torch 2.5 it was CUDA's alone.
_OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's data and reply with the update."""
    return _within_memory(_train, message, context)


def _train(message: Message, context: Context) -> Message:
    run, config = context.run_config, cast(ConfigRecord, message.content["config"])
    set_threads(_get(run, "threads", int))
    task = node_task(context)
    shard = as_shard(task.train_data(context.node_config), "train_data")
    device = resolve_device(_get(run, "device", str))
    before = read_arrays(cast(ArrayRecord, message.content["arrays"]))
    model = _loaded_model(task, before, run, device)
    loss_fn = _loss_fn(task)
    if loss_fn is not None:
        check_own_task(model, shard, loss_fn, "train_data")
    step = _get(run, "step", str)
    common: dict[str, Any] = {
        "lr": _get(config, "lr", float),
        "epochs": _get(config, "local-epochs", int),
        "batch_size": _get(config, "batch-size", int),
        "seed": _get(config, "seed", int),
    }
    extra: dict[str, ArrayRecord] = {}
    started = time.perf_counter()
    if reference := find_method(_get(run, "strategy", str)).client_half:
        # The method has a way of its own to train: function(model, shard, message, ...) ->
        # (loss, records that go with the reply).
        module, _, name = reference.partition(":")
        own_way = getattr(import_module(module), name)
        loss, extra = own_way(model, shard, message, device=device, **common)
    else:
        proximal = _get(config, "proximal", float) if "proximal" in config else 0.0
        loss = train_model(
            model,
            shard,
            step=step,
            proximal=proximal,
            loss_fn=loss_fn,
            autocast=_get(run, "autocast", str),
            device=None,  # the model is in its place
            **common,
        )
    metrics = {"train-loss": loss, "train-seconds": time.perf_counter() - started}
    reply = make_reply(
        message,
        model,
        num_examples=len(shard),
        metrics=metrics,
        context=context,
        loss_fn=loss_fn,
        before=before,
    )
    for key, record in extra.items():
        reply.content[key] = record
    return reply


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on this node's data."""
    return _within_memory(_evaluate, message, context)


def _evaluate(message: Message, context: Context) -> Message:
    set_threads(_get(context.run_config, "threads", int))
    task = node_task(context)
    shard = as_shard(task.train_data(context.node_config), "train_data")
    device = resolve_device(_get(context.run_config, "device", str))
    arrays = read_arrays(cast(ArrayRecord, message.content["arrays"]))
    model = _loaded_model(task, arrays, context.run_config, device)
    loss_fn = _loss_fn(task)
    kind: Kind | None = CLASSES
    if loss_fn is not None:
        kind = check_own_task(model, shard, loss_fn, "train_data")
    found = measure(
        model,
        shard,
        device=device,
        loss_fn=loss_fn,
        kind=kind,
        metrics_fn=own_metrics_of(task),
    )
    metrics = MetricRecord({**found, "num-examples": len(shard)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _within_memory(
    work: Callable[[Message, Context], Message], message: Message, context: Context
) -> Message:
    """Do a task on a device that others use too: what it does not need any more is given back."""
    device = resolve_device(_get(context.run_config, "device", str))
    try:
        return work(message, context)
    except _OUT_OF_MEMORY as error:
        problem = str(error)
    finally:
        release(device)
    # Only here nothing holds the tensors of the task any more.
    _workspace.cache_clear()
    release(device)
    raise OutOfMemoryError(
        f"the memory of {device} is full: use a smaller batch-size, or fewer clients at a time on "
        f"one device (client-resources-num-gpus). torch says: {problem}"
    )


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which partition this node holds, how much data, and where, if it may."""
    shard = as_shard(node_task(context).train_data(context.node_config), "train_data")
    metrics = MetricRecord({"num-examples": len(shard)})
    if "partition-id" in context.node_config:
        metrics["partition-id"] = _get(context.node_config, "partition-id", int)
    content = RecordDict({"metrics": metrics})
    # A machine's name is private: only what its node config says is told.
    if host := context.node_config.get("host-name"):
        content["node"] = ConfigRecord({"host-name": str(host)})
    return Message(content, reply_to=message)


def node_task(context: Context) -> LearningTask:
    """Return the task of the run: a user's own, or one of the datasets."""
    run = context.run_config
    if reference := _get(run, "task", str):
        return find_task(reference)
    return DatasetTask(
        dataset=_get(run, "dataset", str),
        num_clients=_get(run, "num-clients", int),
        partition=_get(run, "partition", str),
        alpha=_get(run, "dirichlet-alpha", float),
        test_fraction=_get(run, "test-fraction", float),
        seed=_get(run, "seed", int),
        data_dir=_get(run, "data-dir", str),
        cache_dir=_get(run, "cache-dir", str),
        model=_get(run, "model", str),
        model_width=_get(run, "model-width", float),
        held_out=_get(run, "held-out", int),
    )


def _loaded_model(
    task: LearningTask, values: dict[str, NDArray[Any]], run: Any, device: torch.device
) -> nn.Module:
    """Return the model with these values on this node's device."""
    seed = model_seed(_get(run, "seed", int))
    model = _workspace(cast(Any, task), seed, device)  # a protocol does not promise a hash
    load_values(model, values)
    return model


@lru_cache(maxsize=1)
def _workspace(task: Any, seed: int, device: torch.device) -> nn.Module:
    """Return the first model, for all tasks of a long-lived worker.

    Messages bring all of its values but those of frozen parameters, which are the server's own.
    """
    model: nn.Module = task.make_model(seed=seed).to(device)
    return model


def _loss_fn(task: LearningTask) -> LossFn | None:
    """Return a user's loss; the datasets' cross-entropy has a faster path of its own."""
    return None if isinstance(task, DatasetTask) else task.loss


def _get(config: Any, key: str, kind: type) -> Any:
    """Return a value of the run, node or message config, checked."""
    if key not in config:
        raise ValueError(f"{key!r} is missing from the config this node was given")
    value = config[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{key}={value!r} must be a {kind.__name__}, not {type(value).__name__}")
    return value
