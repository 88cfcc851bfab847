"""What a checkpoint holds of a strategy's run, and how the run goes on from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord, RecordDict

from fedpsa_strategy.errors import FedPSAError

if TYPE_CHECKING:
    from fedpsa_strategy.server.strategy import AsyncStrategy, Task


class ResumeError(FedPSAError):
    """A checkpoint does not fit the run that is to go on from it."""


def take_snapshot(strategy: AsyncStrategy) -> dict[str, Any]:
    """Return all state of a run between two replies, as plain values and arrays."""
    state = strategy.state
    return {
        "strategy": type(strategy).__name__,
        "size": state.layout.size,
        "time": strategy.clock.now,
        "version": state.version,
        "uploads": state.uploads,
        "rejected": state.rejected,
        "rejected_in_a_row": state.rejected_in_a_row,
        "sequence": state.sequence,
        "reasons": dict(state.reasons),
        "rule": strategy.rule.state_dict(),
        "models": [
            {"version": version, "vector": vector, "states": dict(states)}
            for version, (vector, states) in state.models.items()
        ],
        "upload_states": [dict(states) for states in state.upload_states],
        "norms": strategy.norm_guard.state,
        # Also those that are just being sent: whether they arrived, nobody knows.
        "tasks": [
            asdict(task)
            for task in [*state.in_flight.values(), *(task for task, _ in state.prepared.values())]
        ],
        "clients": [asdict(client) for client in state.clients],
        "waiting": sorted(state.clients.waiting),
        "round_metrics": [
            dict(next(iter(record.metric_records.values()))) for record in state.round_metrics
        ],
    }


def check_fits(saved: dict[str, Any], strategy: AsyncStrategy, size: int) -> None:
    """Refuse a checkpoint of another strategy or model.

    Parameters
    ----------
    saved : dict[str, Any]
        What `take_snapshot` returned.
    strategy : AsyncStrategy
        What is to go on from it.
    size : int
        The values in the strategy's model.

    Raises
    ------
    ResumeError
        Says what differs.
    """
    name = type(strategy).__name__
    if saved["strategy"] != name:
        raise ResumeError(f"the checkpoint is of {saved['strategy']}, this run uses {name}")
    if saved["size"] != size:
        raise ResumeError(f"the checkpoint's model has {saved['size']} values, this run's {size}")


def restore_snapshot(strategy: AsyncStrategy, saved: dict[str, Any]) -> list[Task]:
    """Put a new run where a saved one was; return the tasks that were in flight.

    Nodes join afterwards, and are recognised by node id or partition.
    """
    from fedpsa_strategy.server.strategy import Task

    state = strategy.state
    check_fits(saved, strategy, state.layout.size)
    state.version = saved["version"]
    state.uploads = saved["uploads"]
    state.rejected = saved["rejected"]
    state.rejected_in_a_row = saved["rejected_in_a_row"]
    state.sequence = saved["sequence"]
    state.reasons = Counter(saved["reasons"])
    strategy.rule.load_state_dict(saved["rule"])
    state.models = {item["version"]: (item["vector"], item["states"]) for item in saved["models"]}
    state.upload_states = saved["upload_states"]
    state.arrays = state.layout.write(*state.models[state.version])
    strategy.norm_guard.reset(saved["norms"])
    state.clients.restore(saved["clients"], saved["waiting"])
    state.round_metrics = [
        RecordDict({"metrics": MetricRecord(metrics)}) for metrics in saved["round_metrics"]
    ]
    return [Task(**task) for task in saved["tasks"]]
