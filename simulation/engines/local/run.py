"""Run an app on this machine without Flower's engines."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from fedpsa_strategy.errors import FedPSAError
from server_app.app import run_settings
from server_app.method_settings import SettingsError
from server_app.places import STOP_REQUEST
from server_app.settings import Settings
from server_app.stopping import StopSignals
from simulation.app_config import app_components, default_run_config
from simulation.engines.local.grid import CLIENT_APP, LocalGrid, VirtualNodes
from simulation.engines.local.internals import RUN_ID, SERVER_NODE_ID
from simulation.environment import APP, ConfigValue
from simulation.errors import LaunchFailed, Refused, RunFailed

log = logging.getLogger("flwr")

OpenGrid = Callable[[str, Mapping[str, ConfigValue]], VirtualNodes]
"""Makes the grid for a ClientApp, as ``module:attribute``, and a whole run config."""


def run_locally(
    run_config: Mapping[str, ConfigValue],
    *,
    workers: int,
    train_here: bool = False,
    stream: bool = True,
    app_dir: Path = APP,
    num_clients: int = 0,
) -> dict[str, Any]:
    """Run an app on this machine, and leave nothing running; see `simulation.engines`.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        What to change of the app's default run config.
    workers : int
        Processes that train; 0 trains in this one. The results do not depend on it.
    train_here : bool (default: False)
        Whether this process trains as well, beside the workers, so that none only waits. A
        ClientApp that takes its process down then ends the run.
    stream : bool (default: True)
        Whether to show the run's log; warnings are always shown.
    app_dir : Path (default: this repository)
        The folder with the app's pyproject.toml; its modules are imported from there.
    num_clients : int (default: 0)
        How many nodes the app sees; 0: what the run config says.
    """

    def open_grid(client_app: str, full: Mapping[str, ConfigValue]) -> VirtualNodes:
        num_nodes = num_clients or int(full["num-clients"])
        return LocalGrid(num_nodes, full, workers=workers, app=client_app, train_here=train_here)

    return run_on_grid(app_dir, run_config, open_grid, stream=stream)


def run_on_grid(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    open_grid: OpenGrid,
    *,
    stream: bool = True,
) -> dict[str, Any]:
    """Run an app in this process, on a grid that executes the ClientApp itself."""
    with _log_level(logging.INFO if stream else logging.WARNING):
        if app_dir == APP:
            return _run_ours(run_config, open_grid)
        return _run_other(app_dir, run_config, open_grid)


def _run_ours(run_config: Mapping[str, ConfigValue], open_grid: OpenGrid) -> dict[str, Any]:
    try:
        settings = Settings.from_run_config(run_config)
    except SettingsError as error:
        raise LaunchFailed(str(error)) from error
    if settings.run_dir:
        with contextlib.suppress(OSError):  # what is wrong with the folder, the run will say
            (Path(settings.run_dir) / STOP_REQUEST).unlink()
    if settings.step == "compiled":
        log.info("Every worker compiles the training step first: up to a minute, less if cached.")
    # Errors of these kinds explain themselves; of others the reader wants to know the place.
    with (
        StopSignals() as signals,
        _as_run_failed(FedPSAError, ValueError, OSError),
        open_grid(CLIENT_APP, settings.to_run_config()) as grid,
    ):
        summary = run_settings(grid, settings, signals.requested)
    if summary["status"] != "completed":
        raise RunFailed(f"The run was {summary['status']}.", summary=summary)
    return summary


def _run_other(
    app_dir: Path, run_config: Mapping[str, ConfigValue], open_grid: OpenGrid
) -> dict[str, Any]:
    server_app, client_app = app_components(app_dir)
    full = {**default_run_config(app_dir), **run_config}
    sys.path.insert(0, str(app_dir))  # the workers get it from here
    try:
        with _as_run_failed():
            module, _, name = server_app.partition(":")
            app = getattr(import_module(module), name)
            if not isinstance(app, ServerApp):
                raise Refused(f"{server_app} is a {type(app).__name__}, not a ServerApp")
            context = Context(RUN_ID, SERVER_NODE_ID, {}, RecordDict(), full)
            with open_grid(client_app, full) as grid:
                app(grid, context)
    finally:
        sys.path.remove(str(app_dir))
    return {"status": "completed"}


@contextlib.contextmanager
def _as_run_failed(*clear: type[Exception]) -> Iterator[None]:
    """Turn any error into `RunFailed`, and log where it was raised unless its kind is clear."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:
        if not isinstance(error, clear):
            log.error("%s", traceback.format_exc())
        raise RunFailed(f"The run failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _log_level(level: int) -> Iterator[None]:
    """Show no less important lines of the run's log, for as long as the ``with`` block runs."""
    before = log.level
    log.setLevel(max(level, before))
    try:
        yield
    finally:
        log.setLevel(before)
