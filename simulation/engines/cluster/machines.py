"""The machines of a cluster: how much fits on them, and whether they have what a run needs."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from simulation.engines.cluster.inspection import exists, inspect, versions
from simulation.errors import LaunchFailed
from simulation.machine import cpu_model

CHECK_SECONDS = 600.0
"""How long a machine may take to get the code and look for its data, which it may download."""


@dataclass(frozen=True)
class Resources:
    """What one client, or one cell of an experiment, takes; a part of a GPU will do."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        parts = [counted(self.cpus, "processor")]
        if self.gpus:
            parts.append(counted(self.gpus, "GPU"))
        return " and ".join(parts)

    @property
    def options(self) -> dict[str, float]:
        """What Ray calls them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


@dataclass(frozen=True)
class Machine:
    """A machine that takes part in a cluster, what Ray calls a node."""

    node_id: str
    name: str
    cpus: float
    gpus: float

    def slots(self, each: Resources) -> int:
        """Return how many of these fit on it at a time."""
        offers = ((self.cpus, each.cpus), (self.gpus, each.gpus))
        # A thousandth more: 1 / 0.1 must not be less than 10.
        return min(int(has / takes * 1.001) for has, takes in offers if takes)


def machines() -> list[Machine]:
    """Return the machines that the cluster has at the moment."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    names = [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive]
    return [
        Machine(
            node["NodeID"],
            # Two nodes on one machine are told apart by their ids.
            name if names.count(name) == 1 else f"{name}, node {node['NodeID'][:8]}",
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node, name in zip(alive, names, strict=True)
    ]


def useful_machines(each: Resources) -> list[Machine]:
    """Return the machines that have room for a client or a cell; `LaunchFailed` if none has."""
    found = machines()
    useful = [machine for machine in found if machine.slots(each)]
    if not useful:
        offers = "; ".join(f"{m.name}: {m.cpus:g} processors, {m.gpus:g} GPUs" for m in found)
        raise LaunchFailed(f"No machine of the cluster has {each} for one: {offers}.")
    return useful


def num_slots(each: Resources) -> int:
    """Return how many of these fit on the cluster at the moment."""
    return sum(machine.slots(each) for machine in machines())


def check_machines(
    found: Sequence[Machine],
    imports: Sequence[str],
    works: Sequence[tuple[str, Any]] = (),
) -> None:
    """Check that code, environment and data are on each machine.

    `LaunchFailed` names what is missing. `works` are functions to call there, as ``module:name``,
    and their arguments; each raises what is missing.
    """
    ask: Any = ray.remote(inspect)
    here = versions()
    calls = [(name, pickle.dumps(argument)) for name, argument in works] or [("", b"")]
    asked = {
        ask.options(**_there(machine)).remote(here, list(imports), *call): machine
        for machine in found
        for call in calls
    }
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=CHECK_SECONDS)
    problems = dict.fromkeys(
        f"{asked[answer].name}: {problem}" for answer in ready if (problem := _problem(answer))
    )
    for answer in late:
        ray.cancel(answer, force=True)
        problems[f"{asked[answer].name}: no answer within {CHECK_SECONDS:.0f} s"] = None
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise LaunchFailed(f"Not every machine of the cluster can take part.\n{listed}")


def _problem(answer: Any) -> str:
    try:
        return str(ray.get(answer))
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[-1].strip() if lines else type(error).__name__


def warn_of_differences(found: Sequence[Machine]) -> None:
    """Say so if machines have different processors, on which results may differ in last bits."""
    models: dict[str, list[str]] = {}
    for machine, model in zip(found, _everywhere(found, cpu_model), strict=True):
        models.setdefault(model, []).append(machine.name)
    if len(models) > 1:
        listed = "; ".join(f"{model}: {', '.join(names)}" for model, names in models.items())
        print(
            "Warning: the machines have different processors, so that results may differ in their"
            f" last bits from run to run: {listed}",
            file=sys.stderr,
            flush=True,
        )


def lacking(found: Sequence[Machine], path: str) -> list[str]:
    """Return the names of the machines that do not see a file."""
    seen = _everywhere(found, exists, path)
    return [machine.name for machine, there in zip(found, seen, strict=True) if not there]


def _everywhere(found: Sequence[Machine], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on each of some machines; return what it returns there."""
    remote: Any = ray.remote(function)
    return ray.get(
        [remote.options(**_there(machine)).remote(*arguments) for machine in found],
        timeout=CHECK_SECONDS,
    )


def _there(machine: Machine) -> dict[str, Any]:
    """Return the options of a task that runs on a machine, however busy it is, or not at all."""
    strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
    return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}


def counted(number: float, what: str) -> str:
    """Return a number of something as text."""
    return f"{number:g} {what}" + ("" if number == 1 else "s")


def room_text(found: Sequence[Machine], each: Resources, what: str) -> str:
    """Return how many machines there are, and how many clients or cells fit on them."""
    room = sum(machine.slots(each) for machine in found)
    return f"{counted(len(found), 'machine')} with room for {counted(room, what)} at a time"
