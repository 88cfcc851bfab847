"""What the experiments' commands are told: which runs, how many, and where they are."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.app_config import check_keys
from simulation.arguments import folded, parse_value, setting, whole_number
from simulation.errors import Refused

if TYPE_CHECKING:
    from simulation.experiments.options import Options

_MOST_SEEDS = 1000
DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Add where the results are."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help=f"{what} (default: %(default)s)",
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add which runs an experiment consists of."""
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
        help="methods to compare, those of others as module:Class (default: the experiment's own)",
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


def read_options(arguments: argparse.Namespace) -> Options:
    """Return the options of a command line.

    Raises
    ------
    Refused
        For datasets, methods or settings that do not exist.
    """
    from server_app.settings import Settings
    from simulation.experiments.options import Options

    methods = None
    if arguments.methods is not None:
        methods = tuple(_method(name) for name in arguments.methods)
    defaults = Settings().to_run_config()
    extra = {key: parse_value(text, defaults.get(key)) for key, text in folded(arguments.settings)}
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


def label(text: str) -> str:
    """Return the word that is added to the name of a folder of results, checked."""
    # argparse sends the default, no label, through here as well.
    if text and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError("must be small letters, digits and dashes")
    return text


def _method(name: str) -> str:
    """Return the label of a method: one of ours, an installed one, or module:Class.

    Raises
    ------
    Refused
        If there is no such method.
    """
    from fedpsa_strategy.methods.registry import MethodError, find_method
    from simulation.experiments.cells import METHODS

    known = {label.lower(): label for label in METHODS}
    if name.lower() in known:
        return known[name.lower()]
    try:
        label = find_method(name).label
    except MethodError as error:
        if ":" in name:
            raise Refused(f"{error}.") from None
        raise Refused(
            f"There is no method {name!r}; there are {', '.join(METHODS)}, and methods of others as"
            " module:Class."
        ) from None
    label = name if label in METHODS else label
    METHODS[label] = {"strategy": name}
    return label


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


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


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
