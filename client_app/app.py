"""Flower's entry point on a node."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from client_app.fedpac import train_fedpac
from fedpsa_strategy.client import make_reply
from task.datasets import dataset_info
from task.hardware import resolve_device, set_threads
from task.models import make_model
from task.shards import Shard, client_shard, file_shard
from task.training import evaluate as evaluate_model
from task.training import train as train_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's data and reply with the update."""
    run, config = context.run_config, message.content.config_records["config"]
    set_threads(_get(run, "threads", int))
    shard = node_shard(context)
    device = resolve_device(_get(run, "device", str))
    model = _loaded_model(message, context)
    common: dict[str, Any] = {
        "lr": _get(config, "lr", float),
        "epochs": _get(config, "local-epochs", int),
        "batch_size": _get(config, "batch-size", int),
        "seed": _get(config, "seed", int),
        "device": device,
    }
    extra = {}
    started = time.perf_counter()
    if config.get("method") == "fedpac":
        loss, extra["fedpac"] = train_fedpac(
            model,
            shard,
            message.content.array_records["fedpac"],
            alignment=_get(config, "alignment", float),
            head_lr=_get(config, "head-lr", float),
            head_epochs=_get(config, "head-epochs", int),
            **common,
        )
    else:
        proximal = _get(config, "proximal", float) if "proximal" in config else 0.0
        loss = train_model(model, shard, step=_get(run, "step", str), proximal=proximal, **common)
    metrics = {"train-loss": loss, "train-seconds": time.perf_counter() - started}
    reply = make_reply(message, model, num_examples=len(shard), metrics=metrics, context=context)
    for key, record in extra.items():
        reply.content[key] = record
    return reply


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on this node's data."""
    set_threads(_get(context.run_config, "threads", int))
    shard = node_shard(context)
    device = resolve_device(_get(context.run_config, "device", str))
    loss, accuracy = evaluate_model(_loaded_model(message, context), shard, device=device)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(shard)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which partition this node holds, and how much data."""
    metrics = MetricRecord({"num-examples": len(node_shard(context))})
    if "partition-id" in context.node_config:
        metrics["partition-id"] = _get(context.node_config, "partition-id", int)
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def node_shard(context: Context) -> Shard:
    """Return this node's data: its own file, or its partition of a public dataset."""
    run, node = context.run_config, context.node_config
    dataset = _get(run, "dataset", str)
    if "data-path" in node:
        return file_shard(_get(node, "data-path", str), dataset_info(dataset))
    if "partition-id" not in node:
        raise ValueError(
            "this node has no data: start its SuperNode with --node-config "
            '"data-path=\'/path/to/data.npz\'" or "partition-id=0 num-partitions=10"'
        )
    num_partitions = _get(node, "num-partitions", int)
    if num_partitions != (num_clients := _get(run, "num-clients", int)):
        raise ValueError(
            f"this node holds a partition of {num_partitions}, but num-clients is {num_clients}: "
            "make num-clients and the number of (simulated) nodes agree"
        )
    return client_shard(
        dataset,
        partition_id=_get(node, "partition-id", int),
        num_partitions=num_partitions,
        partition=_get(run, "partition", str),
        alpha=_get(run, "dirichlet-alpha", float),
        test_fraction=_get(run, "test-fraction", float),
        seed=_get(run, "seed", int),
        data_dir=_get(run, "data-dir", str),
        cache_dir=_get(run, "cache-dir", str),
    )


def _loaded_model(message: Message, context: Context) -> nn.Module:
    """Return the model of the message on this node's device."""
    model = _workspace(_get(context.run_config, "dataset", str))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model.to(resolve_device(_get(context.run_config, "device", str)))


@lru_cache(maxsize=1)
def _workspace(dataset: str) -> nn.Module:
    """Return a model whose values do not matter; long-lived workers use one for all tasks."""
    return make_model(dataset, seed=0)


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
