"""Runs from Python: `from simulation import simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedpsa_strategy.checks import key_of
from fedpsa_strategy.methods.base import Method
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.seeds import derive
from fedpsa_strategy.watch.comparison import Comparison, compare
from fedpsa_strategy.watch.runs import NotARunError
from fedpsa_strategy.watch.runs import Run as AnyRun
from server_app.build import make_task
from server_app.method_settings import as_text
from server_app.settings import Settings
from simulation import launch, objects
from simulation.app_config import check_keys
from simulation.engines.cluster.joining import cluster_address
from simulation.environment import ConfigValue, RunConfig
from simulation.errors import Refused
from simulation.launch import Launch, Resources
from simulation.presets import preset_config

__all__ = ["Comparison", "NotARunError", "Run", "compare", "load", "simulate"]


class Run(AnyRun):
    """A run of this repository's app; see `fedpsa_strategy.Run`."""

    @property
    def model(self) -> nn.Module:
        """The final model.

        Raises
        ------
        FileNotFoundError
            If the run has left none.
        TaskError
            If its task was an object of another session: `arrays()` has the values then.
        """
        arrays = self.arrays()
        settings = Settings.from_run_config({**self.settings, "resume": ""})
        model = make_task(settings).make_model(derive(settings.seed, "model") % 2**32)
        current = model.state_dict()
        model.load_state_dict(
            {name: current[name].new_tensor(array) for name, array in arrays.items()}
        )
        return model.eval()


def simulate(
    strategy: str | Method | type[Method] = "fedpsa",
    dataset: str | None = None,
    task: Any = None,
    *,
    clients: int | None = None,
    preset: str | Sequence[str] = (),
    engine: str = "local",
    workers: int | None = None,
    cpus: int | None = None,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
    ray_address: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    run_dir: Path | str | None = None,
    log: bool = True,
    **settings: ConfigValue,
) -> Run:
    """Train with simulated clients on this machine, and return the run.

    Parameters
    ----------
    strategy : str | Method | type[Method] (default: "fedpsa")
        A method's name, or ``module:Class``; or a method of your own, a class or an object with its
        settings.
    dataset : str | None (default: None)
        What is learned; "digits" if nothing else says.
    task : Any (default: None)
        Your own model and data: ``module:object``, or an object, a class or a module with the four
        functions of docs/OWN_TASK.md.
    clients : int | None (default: None)
        How many; 50 if nothing else says.
    preset : str | Sequence[str] (default: ())
        Names in `simulation.presets.PRESETS`.
    engine : "local" | "ray" (default: "local")
        What simulates the clients.
    workers, cpus, client_cpus, client_gpus, ray_address
        See `simulation.launch.Resources`.
    name : str | None (default: None)
        The name of the run's folder in ``runs``; by default its time, strategy and data.
    tags : Sequence[str] (default: ())
        Words to find it by.
    run_dir : Path | str | None (default: None)
        The run's folder, instead of one in ``runs``.
    log : bool (default: True)
        Whether to show the run's log.
    **settings : bool | int | float | str
        All other settings of docs/SETTINGS.md, with underscores: ``virtual_days=0.25``.

    Returns
    -------
    Run
        Its accuracy, curve, events, picture and model.

    Raises
    ------
    Refused
        If it cannot run; the text says what would be right. Nothing was started.
    RunFailed
        If it did not complete; the text says why.
    """
    defaults = Settings().to_run_config()
    config: RunConfig = {"clock": "virtual", "num-clients": 50}
    config |= preset_config((preset,) if isinstance(preset, str) else preset)
    config |= {key_of(key): value for key, value in settings.items()}
    config |= _method(strategy)
    config |= {} if dataset is None else {"dataset": dataset}
    if task is not None:
        config["task"] = task if isinstance(task, str) else objects.reference_to(task)
    if clients is not None:
        if settings.get("num_clients", clients) != clients:
            raise Refused(f"clients = {clients} contradicts num_clients")
        config["num-clients"] = clients
    if tags:
        config["tags"] = ",".join(tags)
    check_keys(config, defaults)
    _check_engine(engine, config, ray_address)
    config = launch.with_places(config, defaults, launch.named_folder(name, run_dir))
    resources = Resources(
        workers=workers,
        cpus=cpus,
        client_cpus=client_cpus,
        client_gpus=client_gpus,
        ray_address=ray_address,
    )
    threads = torch.get_num_threads()
    try:
        launch.run(Launch(engine, config, 50, resources=resources, stream=log, talk=log))
    finally:
        torch.set_num_threads(threads)  # the local engine's server is this process
    return Run(str(config["run-dir"]))


def load(folder: Path | str) -> Run:
    """Return an earlier run, from its folder."""
    return Run(folder)


def _check_engine(engine: str, config: RunConfig, ray_address: str | None) -> None:
    """Refuse an engine that there is not, or whose processes lack what is in the config."""
    if engine not in ("local", "ray"):
        raise Refused(f"engine = {engine!r}: must be 'local' or 'ray'")
    session = [key for key in ("strategy", "task") if objects.is_of_session(config.get(key))]
    if session and engine == "ray" and cluster_address(ray_address) is None:
        raise Refused(
            f"{' and '.join(session)}: an object of this session does not reach Flower's processes;"
            " use engine='local' or a Ray cluster, or write it into a module and name it as"
            " module:object"
        )


def _method(strategy: str | Method | type[Method]) -> RunConfig:
    """Return the run config of a method."""
    if isinstance(strategy, str):
        return {"strategy": strategy}
    if isinstance(strategy, type):
        if not issubclass(strategy, Method):
            raise TypeError(f"{strategy.__name__} is no subclass of fedpsa_strategy.Method")
        ours = METHODS.get(strategy.name) is strategy
        return {"strategy": strategy.name if ours else objects.reference_to(strategy)}
    if not isinstance(strategy, Method):
        raise TypeError(
            f"strategy is a {type(strategy).__name__}: name a method, or give a class or an object"
            " of fedpsa_strategy.Method"
        )
    config = _method(type(strategy))
    values = {key_of(name): value for name, value in vars(strategy).items()}
    known = {key: values[key] for key in type(strategy).setting_keys()}
    if config["strategy"] in METHODS:
        return config | known
    return config | {"method-settings": as_text(known)}
