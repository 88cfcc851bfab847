"""The command `fedpsa`: help, examples, refusals, completion."""

import re
import shlex
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from fedpsa_strategy.cli.main import commands, main
from simulation.cli import COMMANDS
from support.programs import printed_by

GROUP = commands(COMMANDS)
NAMES = GROUP.list_commands(click.Context(GROUP))


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_every_command_shows_examples_that_parse(name):
    command = GROUP.get_command(click.Context(GROUP), name)
    found = re.findall(r"fedpsa [^|#&\")\n]+", command.epilog or "")
    assert found, f"{name} has no example"
    for line in found:
        _, called, *words = shlex.split(line)
        example = GROUP.get_command(click.Context(GROUP), called)
        if called != "list":
            example.make_context(called, words[: words.index(">")] if ">" in words else words)


@pytest.mark.parametrize("name", ["run", "deploy", "reproduce", "list", "report"])
def test_elsewhere_the_commands_of_a_checkout_say_so(name, monkeypatch, capsys):
    monkeypatch.setattr("fedpsa_strategy.cli.main.entry_points", lambda **_: [])
    assert main([name, "--clients", "3"]) == 2
    error = capsys.readouterr().err
    assert "needs a checkout of the fedpsa repository" in error
    assert "`fedpsa new my-app`" in error
    assert main(["--help"]) == 0


def test_a_checkout_that_has_moved_is_no_checkout(monkeypatch, capsys):
    class Gone:
        def load(self):
            raise ImportError("no module named simulation")

    monkeypatch.setattr("fedpsa_strategy.cli.main.entry_points", lambda **_: [Gone()])
    assert main(["run"]) == 2
    assert "needs a checkout" in capsys.readouterr().err


def test_the_version_names_flowers_too(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"fedpsa \d+\.\d+\S* \(Flower \d+\.\d+\S*\)\n", capsys.readouterr().out)


def test_shells_complete_commands_and_settings():
    def completed(*words):
        code = "from fedpsa_strategy.cli.main import main; from simulation.cli import COMMANDS;"
        printed = printed_by(
            code + "main([], given=COMMANDS)",
            _FEDPSA_COMPLETE="bash_complete",
            COMP_WORDS=shlex.join(["fedpsa", *words]),
            COMP_CWORD=str(len(words)),
        )
        return [line.partition(",")[2] for line in printed.splitlines()]

    assert completed("re") == ["reproduce", "report"]
    assert "strategy=" in completed("run", "--set", "str")
    assert completed("run", "--set", "latency=l") == ["latency=long-tail"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_FEDPSA_COMPLETE" in capsys.readouterr().out


def test_both_distributions_bring_the_command_and_the_checkout_all_of_its_own():
    root = Path(__file__).parents[2]
    tables = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (root, root / "fedpsa_strategy")
    ]
    for table in tables:
        assert EntryPoint("fedpsa", table["scripts"]["fedpsa"], "").load() is main
    offered = tables[0]["entry-points"]["fedpsa.commands"]
    found = {name: EntryPoint(name, place, "").load() for name, place in offered.items()}
    assert found == COMMANDS
    (place,) = tables[0]["entry-points"]["fedpsa.checks"].values()
    assert callable(EntryPoint("", place, "").load())
