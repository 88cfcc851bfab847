"""Run the app on Flower's simulation engine: many clients on a few Ray workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulation.engines.flower.submit import check_run_config, print_line, submit
from simulation.engines.flower.superlink import log_folder, running_superlink
from simulation.environment import ConfigValue


def run_on_ray(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    *,
    num_clients: int,
    num_cpus: int | None = None,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
    stream: bool = True,
    flwr_home: Path | None = None,
) -> dict[str, Any]:
    """Run the app with simulated clients, and leave nothing running.

    Parameters
    ----------
    app_dir : Path
        The folder with the app's pyproject.toml.
    run_config : Mapping[str, bool | int | float | str]
        What to change of the app's default run config; ``run-dir`` must be an absolute path, if
        the app has this setting.
    num_clients : int
        How many clients Flower simulates.
    num_cpus : int | None (default: None)
        CPUs that Ray may count on, all by default. ``num_cpus / client_cpus`` workers train at
        the same time.
    client_cpus : int (default: 1)
        CPUs that one working client takes.
    client_gpus : float (default: 0.0)
        GPUs, or the part of one, that one working client takes.
    stream : bool (default: True)
        Whether to print the run's log.
    flwr_home : Path | None (default: None)
        Folder for Flower's state, which is then kept; a temporary one by default.

    Returns
    -------
    dict[str, Any]
        The summary that the ServerApp wrote; `{"status": "completed"}` for an app that writes none.

    Raises
    ------
    RunFailed
        If the run did not complete; the text says why.
    KeyboardInterrupt
        After Ctrl-C, when the run has been stopped and all processes have ended.
    """
    app_dir = Path(app_dir).resolve()
    run_dir = check_run_config(app_dir, run_config)
    federation_config: dict[str, ConfigValue] = {
        "num-supernodes": num_clients,
        "client-resources-num-cpus": client_cpus,
        "client-resources-num-gpus": float(client_gpus),
    }
    if num_cpus is not None:
        federation_config["init-args-num-cpus"] = num_cpus
    with running_superlink(
        simulation=True,
        log_dir=log_folder(run_dir),
        flwr_home=flwr_home,
    ) as superlink:
        run = submit(superlink, app_dir, run_config, federation_config=federation_config)
        return run.wait(echo=print_line if stream else None)
