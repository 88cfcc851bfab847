"""Run the app on this machine without Flower's engines."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedpsa_strategy.errors import FedPSAError
from server_app.app import run_settings
from server_app.method_settings import SettingsError
from server_app.settings import Settings
from server_app.stopping import StopSignals
from simulation.engines.flower.submit import STOP_REQUEST
from simulation.engines.local.grid import LocalGrid, VirtualNodes
from simulation.environment import ConfigValue
from simulation.errors import LaunchFailed, RunFailed

log = logging.getLogger("flwr")


def run_locally(
    run_config: Mapping[str, ConfigValue],
    *,
    workers: int,
    train_here: bool = False,
    stream: bool = True,
) -> dict[str, Any]:
    """Run the app on this machine, and leave nothing running.

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

    Returns
    -------
    dict[str, Any]
        The summary of the run, which is also in its folder.

    Raises
    ------
    LaunchFailed
        If the run config cannot be used.
    RunFailed
        If the run did not complete; the text says why.
    KeyboardInterrupt
        After Ctrl-C, when the run has saved a checkpoint and its results so far, and all workers
        have ended. SIGTERM and SIGHUP do the same with `SystemExit`.
    """

    def open_grid(settings: Settings) -> VirtualNodes:
        return LocalGrid(
            settings.num_clients, settings.to_run_config(), workers=workers, train_here=train_here
        )

    return run_on_grid(run_config, open_grid, stream=stream)


def run_on_grid(
    run_config: Mapping[str, ConfigValue],
    open_grid: Callable[[Settings], VirtualNodes],
    *,
    stream: bool = True,
) -> dict[str, Any]:
    """Run the app in this process, on a grid that executes the ClientApp itself.

    Parameters
    ----------
    run_config, stream
        See `run_locally`, also for what is returned and raised.
    open_grid : Callable[[Settings], VirtualNodes]
        Makes the grid for the run's settings.
    """
    try:
        settings = Settings.from_run_config(run_config)
    except SettingsError as error:
        raise LaunchFailed(str(error)) from error
    if settings.run_dir:
        with contextlib.suppress(OSError):  # what is wrong with the folder, the run will say
            (Path(settings.run_dir) / STOP_REQUEST).unlink()
    with log_level(logging.INFO if stream else logging.WARNING), StopSignals() as signals:
        summary = _run(settings, open_grid, signals.requested)
    if summary["status"] != "completed":
        raise RunFailed(f"The run was {summary['status']}.", summary=summary)
    return summary


def _run(
    settings: Settings,
    open_grid: Callable[[Settings], VirtualNodes],
    stop_fn: Callable[[], bool],
) -> dict[str, Any]:
    if settings.step == "compiled":
        log.info("Every worker compiles the training step first: up to a minute, less if cached.")
    try:
        with open_grid(settings) as grid:
            return run_settings(grid, settings, stop_fn)
    except RunFailed:
        raise
    except Exception as error:
        # Errors of these kinds explain themselves; of others the reader wants to know the place.
        if not isinstance(error, FedPSAError | ValueError | OSError):
            log.error("%s", traceback.format_exc())
        raise RunFailed(f"The run failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def log_level(level: int) -> Iterator[None]:
    """Show no less important lines of the run's log, for as long as the ``with`` block runs."""
    before = log.level
    log.setLevel(max(level, before))
    try:
        yield
    finally:
        log.setLevel(before)
