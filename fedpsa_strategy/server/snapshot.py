"""What a checkpoint holds of a run, and how a run resumes from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedpsa_strategy.errors import FedPSAError
from fedpsa_strategy.methods.base import Rule
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Model, RunState, Task

# Fields of the run that are saved as they are.
_PLAIN = (
    "version",
    "uploads",
    "rejected",
    "rejected_in_a_row",
    "sequence",
    "accuracy",
    "server_seconds",
)


class ResumeError(FedPSAError):
    """A checkpoint does not fit the run that is to resume from it."""


def take_snapshot(run: RunState, callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return all state of a run between two replies, as plain values and arrays."""
    # Also those that are just being sent: it is not known whether they arrived.
    tasks = [*run.in_flight.values(), *(task for task, _ in run.prepared.values())]
    # Each once: tasks may share their start with each other and with the current version.
    models = list({id(model): model for model in (run.model, *(t.start for t in tasks))}.values())
    place = {id(model): number for number, model in enumerate(models)}
    return {name: getattr(run, name) for name in _PLAIN} | {
        "published": run.published,
        "method": _name(run.rule),
        "size": run.layout.size,
        "time": run.clock.now,
        "reasons": dict(run.reasons),
        "rule": run.rule.state_dict(),
        "callbacks": {name: dict(item.state_dict()) for name, item in _named(callbacks)},
        "models": [{"vector": model.vector, "states": dict(model.states)} for model in models],
        "upload_states": [dict(states) for states in run.upload_states],
        "tasks": [_plain_task(task) | {"start": place[id(task.start)]} for task in tasks],
        "clients": [asdict(client) for client in run.clients],
        "waiting": sorted(run.clients.waiting),
        "round_metrics": [
            dict(next(iter(record.metric_records.values()))) for record in run.round_metrics
        ],
        # Of each the last entry: a checkpoint must not grow with the number of versions. What was
        # before is in the events, and no longer in a resumed run's result.
        "histories": [
            [[version, dict(metrics)] for version, metrics in list(history.items())[-1:]]
            for history in _histories(run.result)
        ],
    }


def check_fits(saved: dict[str, Any], rule: Rule, size: int) -> None:
    """Refuse a checkpoint of another method or model.

    Parameters
    ----------
    saved : dict[str, Any]
        What `take_snapshot` returned.
    rule : Rule
        What is to go on from it.
    size : int
        The values in the run's model.

    Raises
    ------
    ResumeError
        Says what differs.
    """
    if saved["method"] != _name(rule):
        raise ResumeError(f"the checkpoint is of {saved['method']}, this run uses {_name(rule)}")
    if saved["size"] != size:
        raise ResumeError(f"the checkpoint's model has {saved['size']} values, this run's {size}")


def restore_snapshot(
    run: RunState, callbacks: Iterable[Callback], saved: dict[str, Any]
) -> list[Task]:
    """Put a new run where a saved one was; return the tasks that were in flight.

    Nodes join afterwards, and are recognised by node id or partition.
    """
    check_fits(saved, run.rule, run.layout.size)
    for name in _PLAIN:
        setattr(run, name, saved[name])
    # Older checkpoints were only written when all callbacks had seen the version.
    run.published = saved.get("published", run.version)
    run.reasons = Counter(saved["reasons"])
    run.clock.hold(saved["time"])
    run.rule.load_state_dict(saved["rule"])
    states = saved["callbacks"]
    if "evaluations" in saved:  # where it stood before evaluation was a callback
        states = {"Evaluations": saved["evaluations"], **states}
    for name, item in _named(callbacks):
        if state := states.get(name):
            item.load_state_dict(state)
    models = [Model(item["vector"], item["states"]) for item in saved["models"]]
    run.set_model(run.rule.model, models[0].states)
    models[0] = run.sent
    run.upload_states = saved["upload_states"]
    run.clients.restore(saved["clients"], saved["waiting"])
    run.round_metrics = [
        RecordDict({"metrics": MetricRecord(metrics)}) for metrics in saved["round_metrics"]
    ]
    for history, entries in zip(_histories(run.result), saved["histories"], strict=True):
        history.update({version: MetricRecord(metrics) for version, metrics in entries})
    return [Task(**task | {"start": models[task["start"]]}) for task in saved["tasks"]]


def _histories(result: Result) -> list[dict[int, MetricRecord]]:
    return [
        result.train_metrics_clientapp,
        result.evaluate_metrics_clientapp,
        result.evaluate_metrics_serverapp,
    ]


def _plain_task(task: Task) -> dict[str, Any]:
    return {item.name: getattr(task, item.name) for item in fields(task)}


def _named(callbacks: Iterable[Callback]) -> list[tuple[str, Callback]]:
    """Return callbacks with a name for each: that of its class, numbered from its second on."""
    seen: Counter[str] = Counter()
    named = []
    for item in callbacks:
        name = type(item).__name__
        seen[name] += 1
        named.append((name if seen[name] == 1 else f"{name} {seen[name]}", item))
    return named


def _name(rule: Rule) -> str:
    return type(rule).__name__.removesuffix("Rule")
