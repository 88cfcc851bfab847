"""One launch: an app, a run config, and the engine that runs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpsa_strategy.checks import shown
from server_app.places import run_name, unused
from simulation.engines.cluster.joining import cluster_address
from simulation.engines.grpc import run_on_processes
from simulation.engines.ray import run_on_ray
from simulation.environment import APP, ConfigValue, RunConfig
from simulation.errors import Refused

_PATHS = {"run-dir", "data-dir", "cache-dir", "resume"}


@dataclass(frozen=True)
class Resources:
    """What an engine may use.

    Parameters
    ----------
    workers : int | None (default: None)
        local: processes that train, 0 for none but the server's; None: one for each core.
    train_here : bool (default: False)
        local: whether the server's process trains too, beside the workers.
    cpus : int | None (default: None)
        ray: CPU cores for all clients; None: all.
    client_cpus : int (default: 1)
        ray: CPU cores for one client.
    client_gpus : float (default: 0.0)
        ray: GPUs, or the part of one, for one client.
    ray_address : str | None (default: None)
        ray: see `simulation.engines.cluster.joining.cluster_address`.
    warm : bool (default: True)
        processes: whether nodes start clients from a warm process, or as Flower does.
    """

    workers: int | None = None
    train_here: bool = False
    cpus: int | None = None
    client_cpus: int = 1
    client_gpus: float = 0.0
    ray_address: str | None = None
    warm: bool = True


@dataclass(frozen=True)
class Launch:
    """What is run, where, and what is shown of it.

    The run config is what differs from the app's own; `clients` is how many there are if it does
    not say. `stream` shows the run's log; `talk` prints what is started and where results go.
    """

    engine: str
    run_config: Mapping[str, ConfigValue]
    clients: int
    app: Path = APP
    resources: Resources = Resources()
    stream: bool = True
    talk: bool = True

    def say(self, text: str) -> None:
        """Tell a person what happens, if anybody looks."""
        if self.talk:
            print(text, flush=True)


def _ray(launch: Launch) -> dict[str, Any]:
    address = cluster_address(launch.resources.ray_address)
    if address is not None:
        if launch.resources.cpus is not None:
            raise Refused("--cpus: on a cluster `ray start --num-cpus` decides, for each machine.")
        # Not at the top: it loads Ray, and --help should not wait for that.
        from simulation.engines.cluster.run import run_on_cluster

        launch.say(f"Simulating {launch.clients} clients on the Ray cluster at {address}.")
        return run_on_cluster(
            launch.app,
            launch.run_config,
            address=address,
            num_clients=launch.clients,
            client_cpus=launch.resources.client_cpus,
            client_gpus=launch.resources.client_gpus,
            stream=launch.stream,
        )
    launch.say(f"Starting {launch.clients} simulated clients on Ray; this takes about 20 seconds.")
    return run_on_ray(
        launch.app,
        launch.run_config,
        num_clients=launch.clients,
        num_cpus=launch.resources.cpus,
        client_cpus=launch.resources.client_cpus,
        client_gpus=launch.resources.client_gpus,
        stream=launch.stream,
    )


def _local(launch: Launch) -> dict[str, Any]:
    # Not at the top: it loads torch, and --help should not wait for that.
    from simulation.engines.local.run import run_locally
    from simulation.machine import num_cores

    here, workers = launch.resources.train_here, launch.resources.workers
    if workers is None:
        workers = num_cores() - here
    places = [f"{workers} worker process{'es' if workers > 1 else ''}"] if workers else []
    places += ["this process"] if here or not workers else []
    launch.say(f"Simulating {launch.clients} clients in {' and '.join(places)}.")
    return run_locally(
        launch.run_config,
        workers=workers,
        train_here=here,
        stream=launch.stream,
        app_dir=launch.app,
        num_clients=launch.clients,
    )


def _processes(launch: Launch) -> dict[str, Any]:
    launch.say(f"Starting a SuperLink and {launch.clients} SuperNodes as processes.")
    return run_on_processes(
        launch.app,
        launch.run_config,
        num_nodes=launch.clients,
        stream=launch.stream,
        warm=launch.resources.warm,
    )


ENGINES: dict[str, Callable[[Launch], dict[str, Any]]] = {
    "local": _local,
    "ray": _ray,
    "processes": _processes,
}
"""What a launch can run on; each returns the run's summary."""


def run(launch: Launch) -> dict[str, Any]:
    """Check a launch, carry it out, and return the run's summary.

    Raises
    ------
    Refused
        If it cannot run; nothing was started.
    RunFailed
        If it did not complete.
    """
    check(launch.app, launch.run_config)
    clients = launch.run_config.get("num-clients", launch.clients)
    if type(clients) is not int:
        raise Refused(f"num-clients = {clients!r}: must be a whole number")
    if run_dir := launch.run_config.get("run-dir"):
        launch.say(f"Results go to {run_dir}")
    return ENGINES[launch.engine](replace(launch, clients=clients))


def named_folder(name: str | None, run_dir: Path | str | None) -> Path | None:
    """Return the folder that a person chose for a run; None if none was chosen."""
    if name is None:
        return None if run_dir is None else Path(run_dir)
    if run_dir is not None:
        raise Refused("a name and a run folder are both given: a name is that of a folder in runs")
    if not re.fullmatch(r"[\w][\w.+=-]{0,99}", name):
        raise Refused(f"name = {shown(name)}: must be letters, digits, '-', '_', '.', '+' and '='")
    return Path("runs") / name


def with_places(
    settings: Mapping[str, ConfigValue],
    defaults: Mapping[str, ConfigValue],
    run_dir: Path | None = None,
    now: datetime | None = None,
) -> RunConfig:
    """Return a run config with the run's folder, and all paths absolute.

    The ServerApp runs elsewhere, where a relative path means another folder.
    """
    config = dict(settings)
    if "run-dir" in defaults:
        config["run-dir"] = str(run_dir or config.get("run-dir") or _new(config, defaults, now))
    elif run_dir is not None:
        raise Refused("--run-dir: this app has no setting 'run-dir'.")
    for key in _PATHS & config.keys():
        text = str(config[key])
        if text and not (key == "resume" and text.lower() in ("true", "false")):
            config[key] = str(Path(text).absolute())
    return config


def _new(config: RunConfig, defaults: Mapping[str, ConfigValue], now: datetime | None) -> Path:
    merged = {**defaults, **config}
    data = str(merged.get("task") or merged.get("dataset") or "")
    name = run_name(str(merged.get("strategy") or ""), data, now or datetime.now(UTC))
    return unused(Path("runs") / name)


def check(app: Path, run_config: Mapping[str, ConfigValue]) -> None:
    """Refuse what cannot run, and warn of what has no effect, before anything is started."""
    # Not at the top: it loads Flower, and --help should not wait for that.
    from simulation.preflight import check_folder, check_launch

    if app == APP:
        for warning in check_launch(run_config):
            print(f"Warning: {warning}", file=sys.stderr, flush=True)
    elif "run-dir" in run_config:
        check_folder("run-dir", Path(str(run_config["run-dir"])))
