"""Run any Flower app on the local engine."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from simulation.app_config import app_components, default_run_config
from simulation.engines.local.grid import LocalGrid, VirtualNodes
from simulation.engines.local.internals import RUN_ID, SERVER_NODE_ID
from simulation.engines.local.run import log_level
from simulation.environment import ConfigValue
from simulation.errors import Refused, RunFailed

log = logging.getLogger("flwr")


def run_app_locally(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    *,
    num_clients: int,
    workers: int,
    train_here: bool = False,
    stream: bool = True,
) -> dict[str, Any]:
    """Run an app on this machine without Flower's engines, and leave nothing running.

    Parameters
    ----------
    app_dir : Path
        The folder with the app's pyproject.toml; its modules are imported from there.
    run_config : Mapping[str, bool | int | float | str]
        What to change of the app's default run config.
    num_clients : int
        How many nodes the app sees.
    workers, train_here, stream
        See `simulation.engines.local.run.run_locally`.

    Returns
    -------
    dict[str, Any]
        `{"status": "completed"}`.

    Raises
    ------
    Refused
        If there is no such app.
    RunFailed
        If the ServerApp raises; the text says what.
    """

    def open_grid(client_app: str, full: Mapping[str, ConfigValue]) -> VirtualNodes:
        return LocalGrid(num_clients, full, workers=workers, app=client_app, train_here=train_here)

    return run_app_on_grid(app_dir, run_config, open_grid, stream=stream)


def run_app_on_grid(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    open_grid: Callable[[str, Mapping[str, ConfigValue]], VirtualNodes],
    *,
    stream: bool = True,
) -> dict[str, Any]:
    """Run an app in this process, on a grid that executes the ClientApp itself.

    Parameters
    ----------
    app_dir, run_config, stream
        See `run_app_locally`, also for what is returned and raised.
    open_grid : Callable[[str, Mapping[str, bool | int | float | str]], VirtualNodes]
        Makes the grid for a ClientApp, as ``module:attribute``, and the whole run config.
    """
    server_app, client_app = app_components(app_dir)
    full = {**default_run_config(app_dir), **run_config}
    sys.path.insert(0, str(app_dir))  # the workers get it from here
    try:
        with log_level(logging.INFO if stream else logging.WARNING):
            app = _load(server_app)
            context = Context(RUN_ID, SERVER_NODE_ID, {}, RecordDict(), full)
            with open_grid(client_app, full) as grid:
                app(grid, context)
    except (Refused, RunFailed):
        raise
    except Exception as error:
        log.error("%s", traceback.format_exc())
        raise RunFailed(f"The run failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(app_dir))
    return {"status": "completed"}


def _load(reference: str) -> ServerApp:
    module, _, name = reference.partition(":")
    app = getattr(import_module(module), name)
    if not isinstance(app, ServerApp):
        raise Refused(f"{reference} is a {type(app).__name__}, not a ServerApp")
    return app
