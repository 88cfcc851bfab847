"""The commands ``reproduce``, ``list`` and ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from fedpsa_strategy.cli.main import examples
from simulation.arguments import FiniteRange, Processors, ray_address_option
from simulation.command import LaunchCommand
from simulation.errors import Refused
from simulation.experiments.choices import choices, command_text, label, out_option, read_options
from simulation.machine import num_jobs

if TYPE_CHECKING:
    from simulation.experiments.catalogue import Experiment
    from simulation.experiments.cells import Cell
    from simulation.experiments.options import Options
    from simulation.experiments.rows import Row
    from simulation.experiments.scheduler import Place
    from simulation.experiments.store import CellStore


@click.command(
    "reproduce",
    cls=LaunchCommand,
    short_help="make a table or a figure of the paper",
    epilog=examples(
        "fedpsa reproduce table-accuracy --datasets digits --alphas 0.5 --days 0.25",
        "fedpsa reproduce figure-curves --methods FedPSA,FedBuff --seeds 0-4",
        "fedpsa reproduce table-accuracy --on ray --ray-address auto      # on a Ray cluster",
    ),
)
@click.argument("name")
@choices
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What simulates the clients.",
)
@click.option(
    "--on",
    type=click.Choice(["here", "ray"]),
    default="here",
    show_default=True,
    help="Where the runs are run: in processes on this machine, or as tasks on the machines of a"
    " Ray cluster.",
)
@ray_address_option("on ray: the cluster")
@click.option(
    "--cell-cpus",
    type=Processors(),
    default=1.0,
    show_default=True,
    metavar="X",
    help="on ray: processors, or the part of one, for one run.",
)
@click.option(
    "--cell-gpus",
    type=FiniteRange(0, 1024),
    default=0.0,
    show_default=True,
    metavar="X",
    help="on ray: GPUs, or the part of one, for one run.",
)
@out_option("Folder for tables and figures.")
@click.option(
    "--label",
    callback=label,
    default="",
    metavar="WORD",
    help="Write to NAME-WORD, beside what was found with other options.",
)
@click.option(
    "--finished-only", is_flag=True, help="Run nothing, also write when runs are missing."
)
@click.option(
    "--recorded",
    is_flag=True,
    help="Count runs as finished that are recorded in the folder of --out, wherever they were run.",
)
def reproduce(**given: Any) -> int:
    """Make the table or figure NAME of the paper; `list` shows which there are.

    It runs what has not been run yet, several runs side by side, and writes results/NAME. What was
    interrupted goes on where it stopped; runs that several experiments need are run once.
    """
    arguments = SimpleNamespace(**given)
    # Not at the top: --help should not wait for these.
    from simulation.experiments.catalogue import find_experiment
    from simulation.experiments.display import make_display
    from simulation.experiments.results import folder_name, write_results
    from simulation.experiments.rows import recorded_rows
    from simulation.experiments.scheduler import Scheduler
    from simulation.experiments.store import CellStore

    experiment, options = find_experiment(arguments.name), read_options(arguments)
    cells, store = plan(experiment, options), CellStore(arguments.cells)
    recorded: dict[str, Row] = {}
    if arguments.recorded:
        # The experiment's own record of a run comes first.
        own = arguments.out / folder_name(experiment, arguments.label)
        for folder in (arguments.out, own):
            recorded |= recorded_rows(folder, experiment.series)
    write = partial(
        write_results,
        experiment,
        cells,
        store,
        arguments.out,
        command=command_text(experiment.name, arguments),
        label=arguments.label,
        recorded=recorded,
    )
    if arguments.finished_only:
        print(f"The results are in {write(failures={})}", flush=True)
        return 0
    scheduler = Scheduler([cell for cell in cells if cell.id not in recorded], store)
    state = scheduler.state
    if known := len({cell.id for cell in cells} & recorded.keys()):
        print(f"{known} cells are recorded in {arguments.out} already.", flush=True)
    if not state.waiting:
        total = known + state.total
        print(f"All {total} cells of {experiment.name} are finished.", flush=True)
    elif state.done:
        print(f"{state.done} of {state.total} cells are finished already.", flush=True)
    if state.waiting:
        try:
            with (
                _place(arguments, store, state.waiting) as place,
                make_display(experiment.name) as display,
            ):
                scheduler.run(place, display)
        except (KeyboardInterrupt, SystemExit):
            print("\nAll runs have ended; writing what there is.", flush=True)
            folder = write(failures=state.failed)
            print(
                f"{state.done} of {state.total} cells are finished; {folder} shows them. The same"
                " command resumes from here.",
                flush=True,
            )
            raise
    folder = write(failures=state.failed)
    print(f"The results are in {folder}", flush=True)
    if state.failed:
        print(f"{len(state.failed)} of {state.total} cells failed; the others are complete.")
    return 1 if state.failed else 0


@click.command(
    "list",
    cls=LaunchCommand,
    short_help="show the tables and figures that `reproduce` makes",
    epilog=examples("fedpsa list", "fedpsa list --datasets digits --days 0.25"),
)
@choices
@out_option("Folder of the results.")
def list_(**given: Any) -> int:
    """Show the tables and figures that `reproduce` makes.

    Also how many runs they need with the given options, how many of these are finished here or
    recorded in the folder of results, and roughly how long the rest will take; then the results
    that there are.
    """
    arguments = SimpleNamespace(**given)
    from simulation.experiments.caption import short_caption
    from simulation.experiments.catalogue import EXPERIMENTS
    from simulation.experiments.estimate import expected_seconds, in_words, measured_seconds
    from simulation.experiments.report import find_sections
    from simulation.experiments.rows import recorded_rows
    from simulation.experiments.store import CellStore

    options, store = read_options(arguments), CellStore(arguments.cells)
    jobs = num_jobs(arguments.jobs, "local")
    line = "{:<20} {:>5} {:>8} {:>8} {:>10}  {}".format
    print(line("name", "cells", "finished", "recorded", "time left", "what it shows"))
    for experiment in EXPERIMENTS.values():
        try:
            unique = {cell.id: cell for cell in experiment.cells(options)}
        except ValueError as error:  # an option that does not fit this one may fit others
            print(line(experiment.name, "–", "–", "–", "–", error))
            continue
        finished = {key for key, cell in unique.items() if store.finished(cell) is not None}
        known = recorded_rows(arguments.out, experiment.series).keys()
        recorded = (unique.keys() & known) - finished
        missing = [cell for key, cell in unique.items() if key not in finished | recorded]
        rates = measured_seconds(store.rates(list(unique.values())))
        each = [expected_seconds(cell, rates) for cell in missing]
        seconds = max([sum(each) / jobs, *each])
        left = f"~ {in_words(seconds)}" if missing else "–"
        counts = len(unique), len(finished), len(recorded)
        print(line(experiment.name, *counts, left, experiment.summary))
    print(
        f"\n{', '.join(options.datasets)}; seeds {', '.join(map(str, options.seeds))};"
        f" {options.days:g} virtual days; {jobs} side by side. The times are rough."
        "\nExperiments share runs: table-accuracy, table-aulc and figure-curves have the same."
        f"\nFinished: in {arguments.cells}. Recorded: in {arguments.out} alone; `reproduce"
        " --recorded` does not run these again."
    )
    if sections := find_sections(arguments.out):
        print(
            f"\nRecorded in {arguments.out}, with whatever options; each folder's table.md names"
            " its command:"
        )
    for section in sections:
        scale, _, _ = short_caption(section.rows).partition("\n")
        print(f"{section.folder:<24} {section.state:>13}  {scale}")
    return 0


@click.command(
    "report",
    cls=LaunchCommand,
    short_help="put all results into one page",
    epilog=examples("fedpsa report", "fedpsa report --out results/digits"),
)
@out_option("Folder of the results.")
def report(out: Path) -> int:
    """Put all tables and figures that exist into one page, results/index.html.

    It needs no other file.
    """
    from simulation.experiments.report import write_report

    print(f"The report is {write_report(out)}", flush=True)
    return 0


def plan(experiment: Experiment, options: Options) -> list[Cell]:
    """Return the cells of an experiment."""
    if options.methods is not None and not experiment.takes_methods:
        raise Refused(f"{experiment.name} is about FedPSA: it has no use for --methods.")
    try:
        cells = experiment.cells(options)
    except ValueError as error:
        raise Refused(str(error)) from error
    if not cells:
        raise Refused(f"With these options {experiment.name} has nothing to run.")
    return cells


def _place(
    arguments: SimpleNamespace, store: CellStore, cells: Sequence[Cell]
) -> AbstractContextManager[Place]:
    """Return where the cells are run."""
    from simulation.engines.cluster.joining import cluster_address
    from simulation.experiments.processes import processes

    if arguments.on == "here":
        jobs = num_jobs(arguments.jobs, arguments.engine)
        return processes(store, jobs=jobs, engine=arguments.engine)
    if arguments.engine != "local":
        raise Refused("--on ray: each run simulates its clients with --engine local.")
    address = cluster_address(arguments.ray_address)
    # Not before it is needed: this loads Ray.
    from simulation.engines.cluster.machines import Resources
    from simulation.experiments.on_ray import ray_cluster

    each = Resources(arguments.cell_cpus, arguments.cell_gpus)
    return ray_cluster(store, cells, address=address, each=each, jobs=arguments.jobs)
