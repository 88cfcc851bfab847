"""Sweeps: every combination of some settings once, side by side, and one table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from fedpsa_strategy.methods.registry import find_method
from fedpsa_strategy.watch.comparison import compare
from fedpsa_strategy.watch.event_log import plain
from fedpsa_strategy.watch.runs import Run
from server_app.settings import Settings
from simulation.environment import RunConfig
from simulation.errors import Refused
from simulation.experiments.cells import OWN_SPLIT, Cell, Label
from simulation.experiments.display import PlainDisplay, make_display
from simulation.experiments.options import make_cell
from simulation.experiments.processes import processes
from simulation.experiments.scheduler import Scheduler
from simulation.experiments.store import CellStore
from simulation.machine import num_jobs

_TOLD = {"strategy", "dataset", "task", "dirichlet-alpha", "seed"}


def run_sweep(
    configs: Sequence[RunConfig], folder: Path, engine: str, jobs: int | None, *, as_json: bool
) -> int:
    """Run what is not finished yet, print the table or JSON, and return the exit code.

    By default one runs on each core, and one at a time on Ray.
    """
    cells, store = sweep_cells(configs), CellStore(folder)
    to_stderr = PlainDisplay(lambda text: click.echo(text, err=True))
    scheduler = Scheduler(cells, store)
    total, done = scheduler.state.total, scheduler.state.done
    click.echo(f"{total} runs, {done} of them finished; they are in {store.folder}.", err=as_json)
    failed = {}
    if scheduler.state.waiting:
        try:
            with (
                processes(store, jobs=num_jobs(jobs, engine), engine=engine) as place,
                to_stderr if as_json else make_display("sweep") as display,
            ):
                failed = scheduler.run(place, display)
        except (KeyboardInterrupt, SystemExit):
            click.echo("All runs have ended; the same command resumes from here.", err=True)
            raise
    unique = {cell.id: cell for cell in cells}.values()
    finished = [store.path(cell) for cell in unique if store.finished(cell) is not None]
    found = compare([Run(path) for path in finished]) if finished else None
    if as_json:
        rows, groups = (found.rows, found.groups) if found else ([], [])
        told = {"runs": rows, "groups": groups, "failed": failed}
        click.echo(json.dumps(plain(told), indent=2))
    elif found:
        click.echo(f"\n{found}")
    return int(bool(failed))


def sweep_cells(configs: Sequence[RunConfig]) -> list[Cell]:
    """Return the runs of a sweep; what is not allowed, or disturbs the others, is `Refused`."""
    varied = {
        key
        for config in configs
        for key in config
        if len({repr(other.get(key)) for other in configs}) > 1
    }
    if any(key in config for config in configs for key in ("run-dir", "resume")):
        raise Refused("run-dir, resume: every run of a sweep has a folder of its own.")
    try:
        cells = [_cell(config, sorted(varied - _TOLD)) for config in configs]
    except ValueError as error:
        raise Refused(str(error)) from error
    if any(cell.settings.clock == "wall" for cell in cells):
        raise Refused(
            "clock = 'wall': runs side by side would slow one another down, and real time is"
            " what they measure; run them one by one."
        )
    return cells


def _cell(config: RunConfig, varied: Sequence[str]) -> Cell:
    settings = Settings.from_run_config(config)
    labels: dict[str, Label] = {
        "method": find_method(settings.strategy).label,
        "dataset": settings.data_name,
        "alpha": OWN_SPLIT if settings.task else settings.dirichlet_alpha,
        "seed": settings.seed,
    }
    values = settings.to_run_config()
    return make_cell(labels | {key: f"{key}={values[key]}" for key in varied}, config)
