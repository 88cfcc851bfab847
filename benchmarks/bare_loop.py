"""The least that local training can cost: a loop that does nothing else.

A program: it gets ready, says so, waits for a line on its input, trains, and prints how long that
took. Its batches, its order of samples and its training step are those of a run. With `--plain` it
is the loop that one would write: over batches, with a step that is compiled by `torch.compile`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import own_peak
from task.steps import make_training
from task.tasks import DatasetTask
from task.training import shuffled


@torch.compile(fullgraph=True, dynamic=False)
def plain_step(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
    """Return the parameters after a step of gradient descent."""

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    gradients = torch.func.grad(loss)(weights)
    return {name: weight - 0.01 * gradients[name] for name, weight in weights.items()}


def plain_training(
    model: nn.Module, inputs: Tensor, targets: Tensor, orders: Tensor, batch_size: int
) -> None:
    """Train by a compiled step for every batch."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for order in orders:
        for part in torch.split(order, batch_size):
            weights = plain_step(model, weights, inputs[part], targets[part])
    model.load_state_dict(weights)


def main() -> None:
    """Be the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--step", default="compiled")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--test-fraction", type=float, default=0.1)
    parser.add_argument("--plain", action="store_true", help="call a compiled step for every batch")
    parser.add_argument("--endless", action="store_true", help="go on, and write a byte per task")
    options = parser.parse_args()
    torch.set_num_threads(1)

    task = DatasetTask(
        options.dataset,
        options.clients,
        alpha=options.alpha,
        test_fraction=options.test_fraction,
        data_dir=options.data_dir,
    )
    shards = [
        task.train_data({"partition-id": index, "num-partitions": options.clients})
        for index in range(options.clients)
    ]
    model = task.make_model(0)
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def train(number: int) -> None:
        shard = shards[number % len(shards)]
        model.load_state_dict(start)
        orders = shuffled(len(shard), options.epochs, number)
        if options.plain:
            plain_training(model, shard.x, shard.y, orders, options.batch_size)
            return
        training = make_training(options.step, model, options.batch_size, 0.01, 0.0)
        training(shard.x, shard.y, orders)

    train(0)
    if options.endless:
        for number in itertools.count():
            train(number)
            os.write(sys.stdout.fileno(), b".")
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu_started = time.perf_counter(), time.process_time()
    for number in range(options.tasks):
        train(number)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_memory": own_peak(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
