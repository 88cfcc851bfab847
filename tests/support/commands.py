"""Command lines, read without being carried out."""

from collections.abc import Sequence
from types import SimpleNamespace

import click

from fedpsa_strategy.cli.main import commands
from simulation.cli import COMMANDS


def parsed(words: Sequence[str]) -> SimpleNamespace:
    """Return the options of a command line: the command, then its words."""
    name, *rest = words
    group = commands(COMMANDS)
    command = group.get_command(click.Context(group), name)
    assert command is not None, name
    context = command.make_context(name, rest)
    usual = {"run": ("virtual", 50), "deploy": ("wall", 4)}
    clock, clients = usual.get(name, ("", 0))
    return SimpleNamespace(**context.params, clock=clock, default_clients=clients)
