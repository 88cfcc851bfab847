"""The command line: ``python -m simulation``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from server_app.places import run_name, unused
from simulation.app_config import check_keys, default_run_config
from simulation.arguments import folded, parse_value, setting, share_of_gpus, whole_number
from simulation.engines.grpc import run_on_processes
from simulation.engines.ray import run_on_ray
from simulation.environment import ConfigValue
from simulation.errors import Refused, RunFailed
from simulation.experiments.commands import add_list, add_report, add_reproduce

INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell would show it."""
REFUSED = 2
"""The exit code of a command that cannot be carried out, as argparse has it."""

Subparsers = Any  # argparse's own type for this is private
RunConfig = dict[str, ConfigValue]
Engine = Callable[[argparse.Namespace, RunConfig, int], dict[str, Any]]

_APP_DIR = Path(__file__).resolve().parents[1]
_PATHS = {"run-dir", "data-dir", "cache-dir", "resume"}


def _ray(arguments: argparse.Namespace, run_config: RunConfig, clients: int) -> dict[str, Any]:
    print(f"Starting {clients} simulated clients on Ray; this takes about 20 seconds.", flush=True)
    return run_on_ray(
        arguments.app,
        run_config,
        num_clients=clients,
        num_cpus=arguments.cpus,
        client_cpus=arguments.client_cpus,
        client_gpus=arguments.client_gpus,
        stream=not arguments.quiet,
    )


def _local(arguments: argparse.Namespace, run_config: RunConfig, clients: int) -> dict[str, Any]:
    # Not at the top: it loads torch, for which nobody should wait who asks for --help.
    from simulation.engines.local.app import run_app_locally
    from simulation.engines.local.run import num_cores, run_locally

    here = arguments.train_here
    workers = num_cores() - here if arguments.workers is None else arguments.workers
    places = [f"{workers} worker process{'es' if workers > 1 else ''}"] if workers else []
    places += ["this process"] if here or not workers else []
    print(f"Simulating {clients} clients in {' and '.join(places)}.", flush=True)
    options: dict[str, Any] = {"workers": workers, "train_here": here}
    options["stream"] = not arguments.quiet
    if arguments.app == _APP_DIR:
        return run_locally(run_config, **options)
    return run_app_locally(arguments.app, run_config, num_clients=clients, **options)


def _processes(
    arguments: argparse.Namespace, run_config: RunConfig, clients: int
) -> dict[str, Any]:
    print(f"Starting a SuperLink and {clients} SuperNodes as processes.", flush=True)
    return run_on_processes(
        arguments.app, run_config, num_nodes=clients, stream=not arguments.quiet
    )


ENGINES: dict[str, Engine] = {"local": _local, "ray": _ray}
"""What ``run --engine`` offers."""


def add_run(subparsers: Subparsers) -> None:
    """Add ``python -m simulation run``."""
    parser = subparsers.add_parser(
        "run",
        help="train with simulated clients on this machine",
        description="Train with simulated clients on this machine. The clients' speeds follow a"
        " virtual clock, so that fifty slow devices cost no more than their computing time.",
    )
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default="ray",
        help="what simulates the clients: Flower's engine on Ray, or local worker processes without"
        " it, which is faster and gives the same results (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        type=whole_number(1, 1_000_000),
        metavar="N",
        help="how many clients (default: 50)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(0, 1024),
        metavar="N",
        help="local: processes that train, 0 for none but the server's (default: all cores)",
    )
    parser.add_argument(
        "--train-here",
        action="store_true",
        help="local: the server's process trains too, beside the workers, of which there is one"
        " less by default: quicker where tasks take milliseconds; a client that takes its process"
        " down then ends the run",
    )
    parser.add_argument(
        "--cpus",
        type=whole_number(1, 1024),
        metavar="N",
        help="ray: CPU cores for all clients: with 2, two train at a time (default: all cores)",
    )
    parser.add_argument(
        "--client-cpus",
        type=whole_number(1, 1024),
        default=1,
        metavar="N",
        help="ray: CPU cores for one client (default: 1)",
    )
    parser.add_argument(
        "--client-gpus",
        type=share_of_gpus,
        default=0.0,
        metavar="X",
        help="ray: GPUs, or the part of one, for one client (default: 0)",
    )
    _add_common(parser)
    parser.set_defaults(
        handler=lambda arguments: _launch(arguments, ENGINES[arguments.engine]),
        default_clients=50,
        clock="virtual",
    )


def add_deploy(subparsers: Subparsers) -> None:
    """Add ``python -m simulation deploy``."""
    parser = subparsers.add_parser(
        "deploy",
        help="train on real Flower processes that talk gRPC",
        description="Train on real Flower processes on this machine: one SuperLink, and one"
        " SuperNode for each client, that talk gRPC as they would between machines. Every update"
        " takes seconds, because Flower starts a new process for it.",
    )
    parser.add_argument(
        "--nodes",
        dest="clients",
        type=whole_number(1, 1000),
        metavar="N",
        help="how many SuperNodes (default: 4)",
    )
    _add_common(parser)
    parser.set_defaults(
        handler=lambda arguments: _launch(arguments, _processes),
        default_clients=4,
        clock="wall",
    )


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    add_run,
    add_deploy,
    add_reproduce,
    add_list,
    add_report,
)
"""Each adds one subcommand, and sets `handler`, which takes the arguments and returns the exit
code."""


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="change a value of the run config, the keys of which are listed under"
        " [tool.flwr.app.config] in pyproject.toml; may be repeated",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder for all results of this run (default: runs/<time>-<strategy>-<dataset>)",
    )
    parser.add_argument(
        "--app",
        type=Path,
        default=_APP_DIR,
        metavar="DIR",
        help="folder of the Flower app (default: this repository)",
    )
    parser.add_argument("--quiet", action="store_true", help="do not show the log of the run")


def build_run_config(
    arguments: argparse.Namespace, defaults: Mapping[str, ConfigValue], now: datetime
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
    if "run-dir" in defaults:
        run_dir = (
            settings.get("run-dir") or arguments.run_dir or _new_run_dir(settings, defaults, now)
        )
        settings["run-dir"] = str(run_dir)
    elif arguments.run_dir is not None:
        raise Refused("--run-dir: this app has no setting 'run-dir'.")
    # The ServerApp runs elsewhere, where a relative path means another folder.
    for key in _PATHS & settings.keys():
        text = str(settings[key])
        if text and not (key == "resume" and text.lower() in ("true", "false")):
            settings[key] = str(Path(text).absolute())
    return settings


def _new_run_dir(settings: RunConfig, defaults: Mapping[str, ConfigValue], now: datetime) -> Path:
    merged = {**defaults, **settings}
    data = str(merged.get("task") or merged.get("dataset") or "")
    return unused(Path("runs") / run_name(str(merged.get("strategy") or ""), data, now))


def _launch(arguments: argparse.Namespace, engine: Engine) -> int:
    arguments.app = arguments.app.resolve()
    defaults = default_run_config(arguments.app)
    run_config = build_run_config(arguments, defaults, datetime.now(UTC))
    _check(arguments.app, run_config)
    clients = run_config.get("num-clients", arguments.clients or arguments.default_clients)
    if type(clients) is not int:
        raise Refused(f"num-clients = {clients!r}: must be a whole number")
    run_dir = run_config.get("run-dir")
    if run_dir:
        print(f"Results go to {run_dir}", flush=True)
    engine(arguments, run_config, clients)
    print(f"Completed; the results are in {run_dir}" if run_dir else "Completed.", flush=True)
    return 0


def _check(app: Path, run_config: RunConfig) -> None:
    """Refuse what cannot run, and warn of what has no effect, before anything is started."""
    # Not at the top: it loads Flower, for which nobody should wait who asks for --help.
    from simulation.preflight import check_folder, check_launch

    if app == _APP_DIR:
        for warning in check_launch(run_config):
            print(f"Warning: {warning}", file=sys.stderr, flush=True)
    elif "run-dir" in run_config:
        check_folder("run-dir", Path(str(run_config["run-dir"])))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation",
        description="Run asynchronous federated learning on Flower. A launch starts the Flower"
        " processes it needs, and ends them all, also after Ctrl-C.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 means that the run completed, 1 that it failed, 2 that it was refused before it started, 130
    that it was interrupted.
    """
    parsed = build_parser().parse_args(arguments)
    try:
        return int(parsed.handler(parsed))
    except KeyboardInterrupt:
        print("Interrupted; everything that was started has ended.", file=sys.stderr)
        return INTERRUPTED
    except Refused as refusal:
        print(f"Error: {refusal}", file=sys.stderr)
        return REFUSED
    except RunFailed as failure:
        # Whoever followed the log has seen its end already.
        shown = failure.reason if _was_streamed(parsed, failure) else str(failure)
        print(f"Error: {shown}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output left. Python would complain about that once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _was_streamed(parsed: argparse.Namespace, failure: RunFailed) -> bool:
    return not getattr(parsed, "quiet", False) and type(failure) is RunFailed
