"""The commands of this repository: ``python -m simulation``, and ``fedpsa`` in a checkout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from fedpsa_strategy.cli import main as library
from fedpsa_strategy.cli.main import INTERRUPTED, examples
from simulation import launch
from simulation.app_config import check_keys, default_run_config
from simulation.arguments import FiniteRange, Setting, folded, parse_value
from simulation.command import LaunchCommand
from simulation.environment import ConfigValue
from simulation.errors import Refused
from simulation.experiments import commands as experiments
from simulation.launch import Launch, Resources, RunConfig

__all__ = ["COMMANDS", "INTERRUPTED", "build_run_config", "main"]

COUNT = click.IntRange(1, 1024)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what all launches take."""
    for add in reversed(
        [
            click.option(
                "--set",
                "settings",
                type=Setting(),
                multiple=True,
                help="Change a value of the run config, the keys of which are listed under"
                " [tool.flwr.app.config] in pyproject.toml; may be repeated.",
            ),
            click.option(
                "--run-dir",
                type=Path,
                metavar="DIR",
                help="Folder for all results of this run"
                " (default: runs/<time>-<strategy>-<dataset>).",
            ),
            click.option(
                "--app",
                type=Path,
                default=launch.APP,
                show_default="this repository",
                metavar="DIR",
                help="Folder of the Flower app.",
            ),
            click.option("--quiet", is_flag=True, help="Do not show the log of the run."),
        ]
    ):
        function = add(function)
    return function


@click.command(
    "run",
    cls=LaunchCommand,
    short_help="train with simulated clients on this machine",
    epilog=examples(
        "fedpsa run --clients 50 --set virtual-days=0.25",
        "fedpsa run --engine local --set strategy=fedbuff --set dataset=fmnist",
        "fedpsa run --run-dir runs/mine --set resume=true      # go on where it was stopped",
    ),
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="ray",
    show_default=True,
    help="What simulates the clients: Flower's engine on Ray, or local worker processes without"
    " it, which is faster and gives the same results.",
)
@click.option(
    "--clients", type=click.IntRange(1, 1_000_000), metavar="N", help="How many (default: 50)."
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    metavar="N",
    help="local: processes that train, 0 for none but the server's (default: all cores).",
)
@click.option(
    "--train-here",
    is_flag=True,
    help="local: the server's process trains too, beside the workers, of which there is one less"
    " by default: quicker where tasks take milliseconds; a client that takes its process down then"
    " ends the run.",
)
@click.option(
    "--cpus",
    type=COUNT,
    metavar="N",
    help="ray: CPU cores for all clients: with 2, two train at a time (default: all cores).",
)
@click.option(
    "--client-cpus",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="ray: CPU cores for one client.",
)
@click.option(
    "--client-gpus",
    type=FiniteRange(0, 1024),
    default=0.0,
    show_default=True,
    metavar="X",
    help="ray: GPUs, or the part of one, for one client.",
)
@_common
def run(engine: str, **given: Any) -> int:
    """Train with simulated clients on this machine.

    The clients' speeds follow a virtual clock, so that fifty slow devices cost no more than their
    computing time.
    """
    arguments = SimpleNamespace(**given, clock="virtual", default_clients=50)
    names = ("workers", "train_here", "cpus", "client_cpus", "client_gpus")
    return _launch(arguments, engine, Resources(**{name: given[name] for name in names}))


@click.command(
    "deploy",
    cls=LaunchCommand,
    short_help="train on real Flower processes that talk gRPC",
    epilog=examples("fedpsa deploy --nodes 4 --set num-server-rounds=6 --set buffer-size=2"),
)
@click.option(
    "--nodes",
    "clients",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="How many SuperNodes (default: 4).",
)
@click.option(
    "--cold",
    is_flag=True,
    help="Start every client as Flower does, with all its imports, and not from a warm process.",
)
@_common
def deploy(**given: Any) -> int:
    """Train on real Flower processes on this machine.

    One SuperLink, and one SuperNode for each client, that talk gRPC as they would between machines.
    An update takes seconds, because an idle node asks for work every three.
    """
    warm = not given.pop("cold")
    arguments = SimpleNamespace(**given, clock="wall", default_clients=4)
    return _launch(arguments, "processes", Resources(warm=warm))


COMMANDS: dict[str, click.Command] = {
    command.name or "": command
    for command in (run, deploy, experiments.reproduce, experiments.list_, experiments.report)
}


def build_run_config(
    arguments: SimpleNamespace, defaults: Mapping[str, ConfigValue], now: datetime
) -> RunConfig:
    """Put together the run config of a launch from its command line.

    Raises
    ------
    Refused
        If a key is unknown, or the command line contradicts itself.
    """
    settings: RunConfig = {
        k: parse_value(v, defaults.get(k)) for k, v in folded(arguments.settings)
    }
    check_keys(settings, defaults)
    for key, option in (("num-clients", arguments.clients), ("run-dir", arguments.run_dir)):
        if key in settings and option is not None and str(settings[key]) != str(option):
            raise Refused(f"--set {key} contradicts the option for the same value.")
    usual: RunConfig = {
        "num-clients": arguments.clients or arguments.default_clients,
        "clock": arguments.clock,
    }
    # An app of somebody else need not have these.
    settings = {**{k: v for k, v in usual.items() if k in defaults}, **settings}
    return launch.with_places(settings, defaults, arguments.run_dir, now)


def _launch(arguments: SimpleNamespace, engine: str, resources: Resources) -> int:
    app = arguments.app.resolve()
    defaults = default_run_config(app)
    run_config = build_run_config(arguments, defaults, datetime.now(UTC))
    launch.check(app, run_config)
    clients = run_config.get("num-clients", arguments.clients or arguments.default_clients)
    if type(clients) is not int:
        raise Refused(f"num-clients = {clients!r}: must be a whole number")
    run_dir = run_config.get("run-dir")
    if run_dir:
        print(f"Results go to {run_dir}", flush=True)
    launch.ENGINES[engine](Launch(run_config, clients, app, resources, not arguments.quiet))
    print(f"Completed; the results are in {run_dir}" if run_dir else "Completed.", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `fedpsa_strategy.cli.main.main`."""
    return library.main(arguments, prog_name="python -m simulation", given=COMMANDS)
