"""Command lines, read without being carried out."""

from collections.abc import Sequence
from types import SimpleNamespace

from simulation.cli import COMMANDS


def parsed(words: Sequence[str]) -> SimpleNamespace:
    """Return the options of a command line: the command, then its words."""
    name, *rest = words
    context = COMMANDS[name].make_context(name, rest)
    usual = {"run": ("virtual", 50), "deploy": ("wall", 4)}
    clock, clients = usual.get(name, ("", 0))
    return SimpleNamespace(**context.params, clock=clock, default_clients=clients)
