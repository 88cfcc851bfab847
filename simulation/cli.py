"""The commands of this repository: ``python -m simulation``, and ``fedpsa`` in a checkout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from fedpsa_strategy.cli import main as library
from fedpsa_strategy.cli.main import INTERRUPTED, examples
from simulation import launch
from simulation.app_config import check_keys, default_run_config, read_config
from simulation.arguments import (
    FiniteRange,
    Setting,
    folded,
    parse_value,
    ray_address_option,
    together,
)
from simulation.combinations import combinations, is_sweep
from simulation.command import LaunchCommand
from simulation.environment import APP, ConfigValue, RunConfig
from simulation.errors import Refused
from simulation.experiments import commands as experiments
from simulation.experiments.choices import SEEDS, jobs_option
from simulation.launch import Launch, Resources
from simulation.presets import PRESETS, preset_config

__all__ = ["COMMANDS", "INTERRUPTED", "build_run_config", "main"]

COUNT = click.IntRange(1, 1024)


_common = together(
    click.option(
        "--set",
        "settings",
        type=Setting(),
        multiple=True,
        help="Change a value of the run config, the keys of which are listed under"
        " [tool.flwr.app.config] in pyproject.toml; may be repeated.",
    ),
    click.option(
        "--config",
        "config_file",
        type=Path,
        metavar="FILE.toml",
        help="Settings from a file, as --show-config prints them, or the config.toml of"
        " an earlier run. --set overrides it.",
    ),
    click.option(
        "--preset",
        "presets",
        multiple=True,
        type=click.Choice([*PRESETS]),
        metavar="NAME",
        help=f"Settings by name; may be repeated: {', '.join(PRESETS)}.",
    ),
    click.option(
        "--name", metavar="NAME", help="Name of the run's folder in runs, or of the sweep."
    ),
    click.option("--tag", "tags", multiple=True, metavar="WORD", help="A word to find the run by."),
    click.option(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="Folder for all results of this run (default: runs/<time>-<strategy>-<dataset>).",
    ),
    click.option(
        "--show-config",
        is_flag=True,
        help="Print the settings as a file for --config, and run nothing.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, for scripts."),
    click.option(
        "--app",
        type=Path,
        default=APP,
        show_default="this repository",
        metavar="DIR",
        help="Folder of the Flower app.",
    ),
    click.option("--quiet", is_flag=True, help="Do not show the log of the run."),
)


@click.command(
    "run",
    cls=LaunchCommand,
    short_help="train with simulated clients on this machine",
    epilog=examples(
        "fedpsa run --clients 50 --set virtual-days=0.25",
        "fedpsa run --engine local --set strategy=fedbuff --set dataset=fmnist",
        "fedpsa run --run-dir runs/mine --set resume=true      # resume where it was stopped",
        "fedpsa run --preset paper-fmnist --preset skew-strong --name skewed --tag report",
        "fedpsa run --preset quick --set lr=0.01,0.1 --seeds 0-2 --jobs 2      # a sweep",
        "fedpsa run --preset quick --show-config > my.toml",
        "fedpsa run --config my.toml",
        "fedpsa run --ray-address auto --clients 500           # on all machines of a Ray cluster",
    ),
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    show_default="ray; local for sweeps",
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
@ray_address_option("ray: the cluster whose machines train")
@click.option(
    "--seeds", type=SEEDS, help="One run for each; together with lists behind --set, a sweep."
)
@jobs_option
@_common
def run(engine: str | None, seeds: tuple[int, ...] | None, **given: Any) -> int:
    """Train with simulated clients on this machine.

    The clients' speeds follow a virtual clock, so that fifty slow devices cost no more than their
    computing time.

    Lists of values (--set lr=0.01,0.1) and of seeds make a sweep: every combination is run once,
    several side by side, in runs/cells or runs/NAME. The same command goes on where it was stopped.
    A value that is allowed as it stands, such as a path with a comma, is no list.
    """
    arguments = SimpleNamespace(**given, clock="virtual", default_clients=50)
    if seeds is not None:
        arguments.settings = (*arguments.settings, ("seed", ",".join(map(str, seeds))))
    if seeds is not None or is_sweep(arguments.settings):
        return _sweep(arguments, engine or "local")
    names = ("workers", "train_here", "cpus", "client_cpus", "client_gpus", "ray_address")
    return _launch(arguments, engine or "ray", Resources(**{name: given[name] for name in names}))


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


@click.command(
    "unattended",
    cls=LaunchCommand,
    short_help="run on a SuperLink, again and again until the run is complete",
    epilog=examples(
        "fedpsa unattended --superlink mine --run-dir runs/long --set clock=wall --clients 20"
    ),
)
@click.option(
    "--superlink",
    default="",
    metavar="NAME",
    show_default="Flower's default",
    help="The SuperLink, by its name in Flower's configuration.",
)
@click.option("--clients", type=click.IntRange(1, 1_000_000), metavar="N", help="How many nodes.")
@click.option(
    "--attempts",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    metavar="N",
    help="Give up after so many submissions in a row without a new checkpoint.",
)
@click.option(
    "--pause",
    type=FiniteRange(0, 86_400),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Before the first resubmission; doubled with each in a row, up to ten minutes.",
)
@_common
def unattended(**given: Any) -> int:
    """Run on a SuperLink that is there already, and submit the run again after it died.

    Each attempt goes on from the newest checkpoint, whether the server or the SuperLink died. Start
    it where the run's folder is seen: on the SuperLink's machine, or where it is shared.
    """
    from simulation.unattended import Unattended

    names = ("superlink", "attempts", "pause")
    options = {name: given.pop(name) for name in names}
    arguments = SimpleNamespace(**given, clock="wall", default_clients=1)
    app = arguments.app.resolve()
    run_config = build_run_config(arguments, default_run_config(app), datetime.now(UTC))
    if "run-dir" not in run_config:
        raise Refused("--app: an app without the setting 'run-dir' cannot go on where it was.")
    if arguments.show_config or arguments.as_json:
        raise Refused("--show-config and --json go with `run` and `deploy`.")
    print(f"Results go to {run_config['run-dir']}", flush=True)
    Unattended(app, run_config, **options).run()
    print(f"Completed; the results are in {run_config['run-dir']}", flush=True)
    return 0


COMMANDS: dict[str, click.Command] = {
    command.name or "": command
    for command in (
        run,
        deploy,
        unattended,
        experiments.reproduce,
        experiments.list_,
        experiments.report,
    )
}


def build_run_config(
    arguments: SimpleNamespace, defaults: Mapping[str, ConfigValue], now: datetime
) -> RunConfig:
    """Put together the run config of a launch from its command line."""
    settings = _settings(arguments, defaults)
    folder = launch.named_folder(arguments.name, arguments.run_dir)
    return launch.with_places(settings, defaults, folder, now)


def _settings(arguments: SimpleNamespace, defaults: Mapping[str, ConfigValue]) -> RunConfig:
    """Return what presets, file and options say; later ones override earlier ones."""
    given: RunConfig = {k: parse_value(v, defaults.get(k)) for k, v in folded(arguments.settings)}
    for key, option in (("num-clients", arguments.clients), ("run-dir", arguments.run_dir)):
        if key in given and option is not None and str(given[key]) != str(option):
            raise Refused(f"--set {key} contradicts the option for the same value.")
    if "run-dir" in given and arguments.name:
        raise Refused("--set run-dir contradicts --name.")
    usual: RunConfig = {"num-clients": arguments.default_clients, "clock": arguments.clock}
    # Another app need not have these.
    settings: RunConfig = {k: v for k, v in usual.items() if k in defaults}
    settings |= preset_config(arguments.presets)
    if arguments.config_file is not None:
        settings |= read_config(arguments.config_file)
    if arguments.clients is not None and "num-clients" in defaults:
        settings["num-clients"] = arguments.clients
    if arguments.tags:
        settings["tags"] = ",".join(arguments.tags)
    settings |= given
    check_keys(settings, defaults)
    return settings


def _launch(arguments: SimpleNamespace, engine: str, resources: Resources) -> int:
    app = arguments.app.resolve()
    defaults = default_run_config(app)
    if arguments.show_config:
        return _show(arguments, _settings(arguments, defaults), defaults)
    run_config = build_run_config(arguments, defaults, datetime.now(UTC))
    clients, talk = arguments.clients or arguments.default_clients, not arguments.as_json
    stream = talk and not arguments.quiet
    summary = launch.run(Launch(engine, run_config, clients, app, resources, stream, talk))
    run_dir = run_config.get("run-dir")
    if arguments.as_json:
        from fedpsa_strategy.watch.event_log import plain

        click.echo(json.dumps(plain({"run-dir": run_dir, **summary}), indent=2))
    else:
        print(f"Completed; the results are in {run_dir}" if run_dir else "Completed.", flush=True)
    return 0


def _show(
    arguments: SimpleNamespace, settings: RunConfig, defaults: Mapping[str, ConfigValue]
) -> int:
    import tomli_w

    if arguments.app.resolve() == APP:
        from server_app.settings import Settings

        settings = Settings.from_run_config(settings).to_run_config()
    whole = {**defaults, **settings}
    click.echo(json.dumps(whole, indent=2) if arguments.as_json else tomli_w.dumps(whole), nl=False)
    return 0


def _sweep(arguments: SimpleNamespace, engine: str) -> int:
    from simulation.sweeps import run_sweep

    if arguments.app.resolve() != APP:
        raise Refused("a sweep runs this repository's app: --app goes with single runs.")
    if arguments.run_dir is not None or arguments.show_config:
        raise Refused(
            "a sweep has many runs: --run-dir and --show-config go with single ones; --name names"
            " the folder of all of them."
        )
    defaults = default_run_config(APP)
    folder = launch.named_folder(arguments.name, None) or arguments.cells
    configs = [
        _settings(SimpleNamespace(**{**vars(arguments), "settings": pairs}), defaults)
        for pairs in combinations(arguments.settings)
    ]
    return run_sweep(configs, folder, engine, arguments.jobs, as_json=arguments.as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `fedpsa_strategy.cli.main.main`."""
    return library.main(arguments, prog_name="python -m simulation", given=COMMANDS)
