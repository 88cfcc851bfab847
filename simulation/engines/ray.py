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
) -> dict[str, Any]:
    """Run the app with simulated clients, and leave nothing running; see `simulation.engines`.

    Parameters
    ----------
    num_clients : int
        How many clients Flower simulates.
    num_cpus : int | None (default: None)
        CPUs that Ray may count on, all by default. ``num_cpus / client_cpus`` workers train at
        the same time.
    client_cpus, client_gpus : int, float (default: 1 and 0.0)
        CPUs and GPUs, or the part of one, that one working client takes.
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
    with running_superlink(simulation=True, log_dir=log_folder(run_dir)) as superlink:
        run = submit(superlink, app_dir, run_config, federation_config=federation_config)
        return run.wait(echo=print_line if stream else None)
