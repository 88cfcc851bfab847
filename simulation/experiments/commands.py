"""The commands ``reproduce``, ``list`` and ``report``."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.app_config import check_keys
from simulation.arguments import parse_value, setting, whole_number
from simulation.errors import Refused

if TYPE_CHECKING:
    from simulation.experiments.catalogue import Experiment
    from simulation.experiments.cells import Cell
    from simulation.experiments.options import Options
    from simulation.experiments.rows import Row

Subparsers = Any  # argparse's own type for this is private

_MOST_SEEDS = 1000
DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")


def add_reproduce(subparsers: Subparsers) -> None:
    """Add ``python -m simulation reproduce``."""
    parser = subparsers.add_parser(
        "reproduce",
        help="make a table or a figure of the paper",
        description="Make a table or a figure of the paper: run what has not been run yet, several"
        " runs side by side, and write results/NAME. What was interrupted goes on where it stopped;"
        " runs that several experiments need are run once.",
    )
    parser.add_argument("name", metavar="NAME", help="the experiment; `list` shows them")
    _add_choices(parser)
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="what simulates the clients (default: %(default)s)",
    )
    _add_out(parser, "folder for tables and figures")
    parser.add_argument(
        "--label",
        type=_label,
        default="",
        metavar="WORD",
        help="write to NAME-WORD, beside what was found with other options",
    )
    parser.add_argument(
        "--finished-only",
        action="store_true",
        help="run nothing, also write when runs are missing",
    )
    parser.add_argument(
        "--recorded",
        action="store_true",
        help="count runs as finished that any results in the folder of --out tell of, wherever"
        " they were run",
    )
    parser.set_defaults(handler=reproduce)


def add_list(subparsers: Subparsers) -> None:
    """Add ``python -m simulation list``."""
    parser = subparsers.add_parser(
        "list",
        help="show the tables and figures that `reproduce` makes",
        description="Show the tables and figures that `reproduce` makes, how many runs they need"
        " with the given options, how many of these are finished here or recorded in the folder of"
        " results, and roughly how long the rest will take; then the results that there are.",
    )
    _add_choices(parser)
    _add_out(parser, "folder of the results")
    parser.set_defaults(handler=list_experiments)


def add_report(subparsers: Subparsers) -> None:
    """Add ``python -m simulation report``."""
    parser = subparsers.add_parser(
        "report",
        help="put all results into one page",
        description="Put all tables and figures that exist into one page, which needs no other"
        " file: results/index.html.",
    )
    _add_out(parser, "folder of the results")
    parser.set_defaults(handler=report)


def _add_out(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help=f"{what} (default: %(default)s)",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--datasets",
        type=_names,
        default=("fmnist",),
        metavar="A,B",
        help=f"what is learned: {', '.join(DATASETS)}, or own tasks as module:object (default:"
        " fmnist)",
    )
    parser.add_argument(
        "--alphas",
        type=_alphas,
        metavar="X,Y",
        help="concentrations of the Dirichlet partition (default: the experiment's own)",
    )
    parser.add_argument(
        "--methods",
        type=_names,
        metavar="A,B",
        help="methods to compare (default: the experiment's own)",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=(0, 1, 2),
        metavar="N,M-K",
        help="one run for each (default: 0-2)",
    )
    parser.add_argument(
        "--days",
        type=_days,
        default=10.0,
        metavar="X",
        help="virtual days of each run (default: 10, as in the paper)",
    )
    parser.add_argument(
        "--lr-decay-per",
        choices=("version", "upload"),
        default="version",
        help="what the decay of the learning rate counts (default: %(default)s, as in the paper)",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="change a value of the run config of all runs; may be repeated",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(1, 1024),
        metavar="N",
        help="runs side by side, one thread each (default: the number of cores; 1 on Ray)",
    )
    parser.add_argument(
        "--cells",
        type=Path,
        default=Path("runs") / "cells",
        metavar="DIR",
        help="folder for the runs (default: %(default)s)",
    )


def reproduce(arguments: argparse.Namespace) -> int:
    """Run what is missing of an experiment and write its results; return the exit code."""
    # Not at the top: whoever asks for --help should not wait for these.
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
        # What the experiment's own results tell of a run comes first.
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
    with make_display(experiment.name) as display:
        scheduler = Scheduler(
            [cell for cell in cells if cell.id not in recorded],
            store,
            jobs=_jobs(arguments, arguments.engine),
            engine=arguments.engine,
            display=display,
        )
        state = scheduler.state
        if known := len({cell.id for cell in cells} & recorded.keys()):
            print(f"{known} cells are recorded in {arguments.out} already.", flush=True)
        if not state.waiting:
            total = known + state.total
            print(f"All {total} cells of {experiment.name} are finished.", flush=True)
        elif state.done:
            print(f"{state.done} of {state.total} cells are finished already.", flush=True)
        try:
            failures = scheduler.run()
        except (KeyboardInterrupt, SystemExit):
            print("\nAll runs have ended; writing what there is.", flush=True)
            folder = write(failures=state.failed)
            print(
                f"{state.done} of {state.total} cells are finished; {folder} shows them. The same"
                " command goes on from here.",
                flush=True,
            )
            raise
    folder = write(failures=failures)
    print(f"The results are in {folder}", flush=True)
    if failures:
        print(f"{len(failures)} of {state.total} cells failed; the others are complete.")
    return 1 if failures else 0


def list_experiments(arguments: argparse.Namespace) -> int:
    """Print all experiments, one line each; return the exit code."""
    from simulation.experiments.caption import short_caption
    from simulation.experiments.catalogue import EXPERIMENTS
    from simulation.experiments.estimate import expected_seconds, in_words, measured_seconds
    from simulation.experiments.report import find_sections
    from simulation.experiments.rows import recorded_rows
    from simulation.experiments.store import CellStore

    options, store = read_options(arguments), CellStore(arguments.cells)
    jobs = _jobs(arguments, "local")
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


def report(arguments: argparse.Namespace) -> int:
    """Write the page with all results; return the exit code."""
    from simulation.experiments.report import write_report

    print(f"The report is {write_report(arguments.out)}", flush=True)
    return 0


def plan(experiment: Experiment, options: Options) -> list[Cell]:
    """Return the cells of an experiment.

    Raises
    ------
    Refused
        If it has no use for an option, or nothing is left to run.
    """
    if options.methods is not None and not experiment.takes_methods:
        raise Refused(f"{experiment.name} is about FedPSA: it has no use for --methods.")
    try:
        cells = experiment.cells(options)
    except ValueError as error:
        raise Refused(str(error)) from error
    if not cells:
        raise Refused(f"With these options {experiment.name} has nothing to run.")
    return cells


def command_text(name: str, arguments: argparse.Namespace) -> str:
    """Return the command that makes these results again, wherever and however it is run."""
    from simulation.experiments.cells import WITHOUT_EFFECT

    words = ["python", "-m", "simulation", "reproduce", name]
    words += ["--datasets", ",".join(arguments.datasets)]
    if arguments.alphas:
        words += ["--alphas", ",".join(f"{alpha:g}" for alpha in arguments.alphas)]
    if arguments.methods:
        words += ["--methods", ",".join(arguments.methods)]
    words += ["--seeds", ",".join(map(str, arguments.seeds)), "--days", f"{arguments.days:g}"]
    if arguments.lr_decay_per != "version":
        words += ["--lr-decay-per", arguments.lr_decay_per]
    if arguments.label:
        words += ["--label", arguments.label]
    for key, value in arguments.settings:
        words += [] if key in WITHOUT_EFFECT else ["--set", f"{key}={value}"]
    return shlex.join(words)


def read_options(arguments: argparse.Namespace) -> Options:
    """Return the options of a command line.

    Raises
    ------
    Refused
        For datasets, methods or settings that do not exist.
    """
    from server_app.settings import Settings
    from simulation.experiments.cells import METHODS
    from simulation.experiments.options import Options

    known = {name.lower(): name for name in METHODS}
    methods = None
    if arguments.methods is not None:
        methods = tuple(
            _one_of(known, name.lower(), "method", METHODS) for name in arguments.methods
        )
    defaults = Settings().to_run_config()
    extra = {key: parse_value(text, defaults.get(key)) for key, text in arguments.settings}
    check_keys(extra, defaults)
    return Options(
        datasets=tuple(_dataset(name) for name in arguments.datasets),
        alphas=arguments.alphas,
        methods=methods,
        seeds=arguments.seeds,
        days=arguments.days,
        lr_decay_per=arguments.lr_decay_per,
        extra=extra,
    )


def _one_of(known: dict[str, str], name: str, what: str, names: Any) -> str:
    if name not in known:
        raise Refused(f"There is no {what} {name!r}; there are {', '.join(names)}.")
    return known[name]


def _dataset(name: str) -> str:
    """Return the name of a dataset, or of an own task that exists.

    Raises
    ------
    Refused
        If it is neither.
    """
    if name in DATASETS:
        return name
    module = name.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise Refused(
            f"There is no dataset {name!r}; there are {', '.join(DATASETS)}, and own tasks as"
            f" module:object, but no module {module!r} is on PYTHONPATH."
        )
    return name


def _jobs(arguments: argparse.Namespace, engine: str) -> int:
    from simulation.experiments.machine import num_cores

    return arguments.jobs or (num_cores() if engine == "local" else 1)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


def _label(text: str) -> str:
    # argparse sends the default, no label, through here as well.
    if text and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError("must be small letters, digits and dashes")
    return text


def _alphas(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_days(part) for part in _names(text)))


def _days(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _seeds(text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for part in _names(text):
        first, dash, last = part.partition("-")
        found = range(int(first), int(last if dash else first) + 1)
        if len(found[: _MOST_SEEDS + 1]) > _MOST_SEEDS:
            raise argparse.ArgumentTypeError(f"{text!r} names more than {_MOST_SEEDS} seeds")
        seeds += found
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} names no seed")
    return tuple(dict.fromkeys(seeds))
