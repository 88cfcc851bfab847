"""The least that local training can cost: a loop that does nothing else.

A program: it gets ready, says so, waits for a line on its input, trains, and prints how long that
took. Its batches, its order of samples and its training step are those of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from benchmarks.measure import own_peak
from task.steps import make_training
from task.tasks import DatasetTask
from task.training import shuffled


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
        training = make_training(options.step, model, options.batch_size, 0.01, 0.0)
        training(shard.x, shard.y, orders)

    train(0)
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
