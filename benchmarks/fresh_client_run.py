"""One update in a process that was just started, as Flower's deployment engine does it.

A program: its arguments are the time at which it was started, the dataset, and the folders of data
and cache. It prints how long each part took.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_NOW = time.time()
STARTED, DATASET, DATA_DIR, CACHE_DIR = sys.argv[1:5]
PARTS: dict[str, float] = {"process start": _NOW - float(STARTED)}


class _Part:
    """Adds the seconds of a block to a part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        PARTS[self._name] = time.perf_counter() - self._started


def main() -> None:
    """Be the program."""
    with _Part("Flower: imports"):
        import flwr.clientapp
        import flwr.supernode.cli.flwr_clientapp  # what the real process starts with  # noqa: F401
        from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
    with _Part("torch: import"):
        import torch  # noqa: F401
    with _Part("ours: imports"):
        import client_app.app as client
        from simulation.local_internals import act_as, give_id
    from server_app.settings import Settings
    from task.models import make_model

    settings = Settings(dataset=DATASET, data_dir=DATA_DIR, cache_dir=CACHE_DIR)
    context = Context(
        1, 1, {"partition-id": 3, "num-partitions": 50}, RecordDict(), settings.to_run_config()
    )
    probe = json.loads(sys.argv[5])
    config = {"lr": 0.01, "local-epochs": 5, "batch-size": 64, "seed": 1, "version": 0, **probe}
    arrays = ArrayRecord(make_model(DATASET, 0).state_dict())
    act_as(1)
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}), 1, "train")
    give_id(message, "1")
    with _Part("ours: data"):
        task = client.node_task(context)
        task.train_data(context.node_config)
    with _Part("whole"):
        reply = client.app(message, context)
    metrics: dict[str, Any] = dict(reply.content.metric_records["metrics"])
    PARTS["ours: training"] = metrics["train-seconds"]
    PARTS["ours: sensitivity and sketch"] = metrics["sensitivity-seconds"]
    PARTS["ours: model, Δ, reply"] = (
        PARTS.pop("whole") - metrics["train-seconds"] - metrics["sensitivity-seconds"]
    )
    print(json.dumps(PARTS))


if __name__ == "__main__":
    main()
