"""What the experiments' commands are told: which runs, how many, and where they are."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from simulation.app_config import check_keys
from simulation.arguments import Decorator, FiniteRange, Setting, folded, parse_value, together
from simulation.errors import Refused

if TYPE_CHECKING:
    from simulation.experiments.options import Options

_MOST_SEEDS = 1000
DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")


class _Words(click.ParamType):  # type: ignore[type-arg]
    """Words between commas, each read by a function that may raise ValueError."""

    def __init__(self, name: str, read: Callable[[str], Sequence[Any]] = lambda word: [word]):
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        """Return what the words stand for, each once."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        try:
            found = [each for word in words for each in self._read(word)]
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if not found:
            self.fail(f"{value!r} names nothing", param, ctx)
        return tuple(dict.fromkeys(found))


def _positive(word: str) -> list[float]:
    number = float(word)
    if not 0 < number < float("inf"):
        raise ValueError("must be above 0")
    return [number]


def _range(word: str) -> range:
    first, dash, last = word.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if len(found[: _MOST_SEEDS + 1]) > _MOST_SEEDS:
        raise ValueError(f"more than {_MOST_SEEDS} seeds")
    return found


NAMES, NUMBERS, SEEDS = (
    _Words("A,B"),
    _Words("X,Y", _positive),
    _Words("N,M-K", _range),
)


def out_option(what: str) -> Decorator:
    """Return the option that says where the results are."""
    return click.option(
        "--out", type=Path, default=Path("results"), show_default=True, metavar="DIR", help=what
    )


jobs_option = together(
    click.option(
        "--jobs",
        type=click.IntRange(1, 1024),
        metavar="N",
        help="Runs side by side, one thread each (default: the number of cores; 1 with --engine"
        " ray; with --on ray as many as the cluster has room for).",
    ),
    click.option(
        "--cells",
        type=Path,
        default=Path("runs") / "cells",
        show_default=True,
        metavar="DIR",
        help="Folder for the runs.",
    ),
)

choices = together(
    click.option(
        "--datasets",
        type=NAMES,
        default=("fmnist",),
        show_default="fmnist",
        help=f"What is learned: {', '.join(DATASETS)}, or own tasks as module:object.",
    ),
    click.option(
        "--alphas",
        type=NUMBERS,
        help="Concentrations of the Dirichlet partition (default: the experiment's own).",
    ),
    click.option(
        "--methods",
        type=NAMES,
        help="Methods to compare, those of others as module:Class (default: the experiment's own).",
    ),
    click.option(
        "--seeds",
        type=SEEDS,
        default=(0, 1, 2),
        show_default="0-2",
        help="One run for each.",
    ),
    click.option(
        "--days",
        type=FiniteRange(0, min_open=True),
        default=10.0,
        show_default="10, as in the paper",
        metavar="X",
        help="Virtual days of each run.",
    ),
    click.option(
        "--lr-decay-per",
        type=click.Choice(["version", "upload"]),
        default="version",
        show_default=True,
        help="What the decay of the learning rate counts; the paper's are versions.",
    ),
    click.option(
        "--set",
        "settings",
        type=Setting(),
        multiple=True,
        help="Change a value of the run config of all runs; may be repeated.",
    ),
    jobs_option,
)
"""Which runs an experiment consists of."""


def read_options(arguments: SimpleNamespace) -> Options:
    """Return the options of a command line; datasets, methods and settings must exist."""
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


def command_text(name: str, arguments: SimpleNamespace) -> str:
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


def label(_ctx: Any, _param: Any, text: str) -> str:
    """Return the word that is added to the name of a folder of results, checked."""
    if text and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise click.BadParameter("must be small letters, digits and dashes")
    return text


def _method(name: str) -> str:
    """Return the label of a method: one of ours, an installed one, or module:Class."""
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
    if METHODS.get(label) == {"strategy": name}:  # one of ours by the name that `strategy` takes
        return label
    label = name if label in METHODS else label
    METHODS[label] = {"strategy": name}
    return label


def _dataset(name: str) -> str:
    """Return the name of a dataset, or of an own task that exists."""
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
