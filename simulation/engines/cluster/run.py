"""Run the app with clients on all machines of a Ray cluster.

Flower's own simulation engine joins a cluster too, but keeps a fixed pool of Ray actors: one that
is lost with its machine stays in the pool and answers every message that it gets with an error.
Here messages are Ray tasks instead, which Ray schedules over the machines that there are, and
executes again when a machine is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulation.app_config import app_components, default_run_config
from simulation.engines.cluster.code import code_for_machines
from simulation.engines.cluster.joining import joined
from simulation.engines.cluster.machines import (
    Resources,
    check_machines,
    room_text,
    useful_machines,
    warn_of_differences,
)
from simulation.engines.cluster.pool import RayPool
from simulation.engines.local.grid import VirtualNodes
from simulation.engines.local.run import run_on_grid
from simulation.engines.local.worker import Setup
from simulation.environment import APP, ConfigValue
from simulation.objects import given

ASK_FIRST_NODE = "simulation.engines.cluster.tasks:ask_first_node"
"""Called on a machine with a `Setup`."""


def run_on_cluster(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    *,
    address: str,
    num_clients: int,
    client_cpus: float = 1,
    client_gpus: float = 0.0,
    stream: bool = True,
) -> dict[str, Any]:
    """Run an app with its server here and its clients on a cluster, and leave nothing running.

    Parameters
    ----------
    address : str
        Of the cluster: ``host:port``, or "auto" for the one that this machine is part of.
    client_cpus, client_gpus : float (default: 1 and 0.0)
        What one working client takes of a machine.

    Raises
    ------
    LaunchFailed
        If the cluster cannot be joined, or a machine lacks something: the text says which.
    """
    each = Resources(client_cpus, client_gpus)
    _, client_app = app_components(app_dir)
    full = {**default_run_config(app_dir), **run_config}
    ours = app_dir == APP

    def open_grid(app: str, config: Mapping[str, ConfigValue]) -> VirtualNodes:
        return VirtualNodes(num_clients, config, app, lambda setup: RayPool(setup, each))

    with (
        code_for_machines(app_dir, user_modules(full) if ours else ()) as code,
        joined(address, code, show_output=stream) as joined_address,
    ):
        found = useful_machines(each)
        if stream:
            print(
                f"Joined the Ray cluster at {joined_address}: {room_text(found, each, 'client')}."
                " Looking for code, packages and data on each.",
                flush=True,
            )
        check_machines(
            found,
            [client_app.partition(":")[0]],
            [(ASK_FIRST_NODE, Setup(client_app, {}, full, given(full.values())))] if ours else (),
        )
        warn_of_differences(found)
        return run_on_grid(app_dir, run_config, open_grid, stream=stream)


def user_modules(run_config: Mapping[str, Any]) -> list[str]:
    """Return the modules of the user that a run config names: an own task, an own method."""
    named = (str(run_config.get("task", "")), str(run_config.get("strategy", "")))
    task, strategy = (name.partition(":")[0] for name in named)
    return [*([task] if task else []), *([strategy] if ":" in named[1] else [])]
