"""The command `fedpsa`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import click
from click.shell_completion import get_completion_class

GROUP = "fedpsa.commands"
"""The group of entry points by which a checkout offers its commands."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell would show it."""

# Each is a module of this package.
_EVERYWHERE = ("new", "doctor", "dashboard", "compare")
_IN_CHECKOUT = {
    "run": "train with simulated clients on this machine",
    "deploy": "train on real Flower processes that talk gRPC",
    "unattended": "run on a SuperLink, again and again until the run is complete",
    "reproduce": "make a table or a figure of the paper",
    "list": "show the tables and figures that `reproduce` makes",
    "report": "put all results into one page",
}


def examples(*lines: str) -> str:
    """Return the end of a command's help: commands to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Commands(click.Group):
    """All commands, imported when they are asked for.

    Parameters
    ----------
    given : Mapping[str, click.Command]
        Those of a checkout; by default the ones that are installed as entry points.
    """

    def __init__(self, given: Mapping[str, click.Command] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._given = given

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return [*_EVERYWHERE, *_IN_CHECKOUT, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name in _EVERYWHERE:
            module = import_module(f"fedpsa_strategy.cli.{cmd_name}")
            command: click.Command = module.command
            return command
        if cmd_name in _IN_CHECKOUT:
            return self._of_checkout(cmd_name)
        return super().get_command(ctx, cmd_name)

    def _of_checkout(self, name: str) -> click.Command:
        if self._given is not None:
            return self._given[name]
        for entry in entry_points(group=GROUP, name=name):
            try:
                loaded: click.Command = entry.load()
            except (ImportError, AttributeError):  # of a checkout that has moved, or is older
                continue
            return loaded
        return _elsewhere(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in two groups."""
        everywhere = [*_EVERYWHERE, *self.commands]
        for title, names in (("Everywhere", everywhere), ("In a checkout", _IN_CHECKOUT)):
            with formatter.section(title):
                found = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [(name, each.get_short_help_str(80)) for name, each in found if each]
                )


def _elsewhere(name: str) -> click.Command:
    """Return what stands for a command of a checkout where there is none."""

    def refuse(words: tuple[str, ...]) -> None:  # noqa: ARG001
        raise click.UsageError(
            f"`fedpsa {name}` needs a checkout of the fedpsa repository, and the environment that"
            " `make install` makes there. `fedpsa new my-app` writes an app of your own, which"
            " `flwr run` runs."
        )

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        help=f"{_IN_CHECKOUT[name].capitalize()} (needs a checkout of the fedpsa repository).",
        context_settings={"ignore_unknown_options": True},
    )


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"fedpsa {library_version()} (Flower {version('flwr')})")
        ctx.exit()


def library_version() -> str:
    """Return the version of this library, however it was installed."""
    for name in ("fedpsa-strategy", "fedpsa"):  # by itself, or with the app of a checkout
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def commands(given: Mapping[str, click.Command] | None = None) -> Commands:
    """Return the command with all subcommands; see `Commands`."""
    group = Commands(
        given,
        help="Asynchronous federated learning on Flower that really runs.",
        epilog=examples(
            "fedpsa doctor                 # what can run here",
            "fedpsa new my-app             # an app of your own",
            "fedpsa dashboard runs         # a live page of all runs in a folder",
            "fedpsa COMMAND --help         # examples of each command",
        ),
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Show the versions of this library and of Flower.",
            )
        ],
        context_settings={"max_content_width": 100},
    )
    group.add_command(_completion)
    return group


@click.command(
    "completion",
    short_help="print what makes a shell complete these commands",
    epilog=examples(
        'eval "$(fedpsa completion bash)"     # in ~/.bashrc',
        "fedpsa completion fish > ~/.config/fish/completions/fedpsa.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> None:
    """Print what makes a shell complete commands, options and settings."""
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"{shell} is not known to this version of click")
    click.echo(found(commands(), {}, "fedpsa", "_FEDPSA_COMPLETE").source())


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog_name: str = "fedpsa",
    given: Mapping[str, click.Command] | None = None,
) -> int:
    """Run a command, by default that of this process, and return its exit code.

    0 means that it did what it was asked for, 1 that it failed, 2 that it was refused before
    anything happened, 130 that it was interrupted. `given` are the commands of a checkout, by
    default those that are installed.
    """
    words = None if arguments is None else [*arguments]
    try:
        code = commands(given).main(words, prog_name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        print("Interrupted; everything that was started has ended.", file=sys.stderr)
        return INTERRUPTED
    return code if isinstance(code, int) else 0
