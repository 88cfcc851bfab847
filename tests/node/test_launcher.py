"""The command `fedpsa-node`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedpsa_strategy.node import launcher
from fedpsa_strategy.node.flower import POLL_VARIABLE, interpreter_of, why_ordinary

SUPERNODE = """#!/bin/sh
echo "pid $$ arguments $# $@"
echo "poll $FLWR_SUPEREXEC_TASK_POLL_INTERVAL path $PATH folder $FEDPSA_NODE_FOLDER"
if [ -n "$FEDPSA_NODE_FOLDER" ]; then
  until [ "$(cat $FEDPSA_NODE_FOLDER/state)" = ready ]; do sleep 0.05; done
  flwr-clientapp --token 1
fi
exit 5
"""
CLIENTAPP = f"#!{sys.executable}\nimport os; print('parent', os.getppid())\n"


@pytest.fixture
def commands(tmp_path):
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in (("flower-supernode", SUPERNODE), ("flwr-clientapp", CLIENTAPP)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def start(commands, *arguments, **environment):
    environment = {"FEDPSA_NODE_PRELOAD": ""} | environment
    process = subprocess.Popen(
        [sys.executable, "-m", "fedpsa_strategy.node", *arguments],
        env=os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(launcher.__file__).parents[2],
    )
    out, errors = process.communicate(timeout=60)
    return process, out, errors


def test_it_becomes_the_supernode(commands):
    arguments = ["--insecure", "--node-config", "a=1 b='x y'"]
    process, out, errors = start(commands, *arguments)
    first, second, third = out.splitlines()
    assert first == f"pid {process.pid} arguments 3 --insecure --node-config a=1 b='x y'"
    assert second.startswith("poll 0.25 path ")
    folder = Path(second.rpartition(" ")[2])
    assert third != f"parent {process.pid}"
    assert process.returncode == 5
    assert "fedpsa-node: warm after" in errors
    assert "ordinary" not in errors
    assert not folder.exists()


def test_an_interval_that_was_chosen_is_kept(commands):
    assert "poll 0.05 " in start(commands, **{POLL_VARIABLE: "0.05"})[1]


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ([], {"FEDPSA_NODE_WARM": "0"}, "FEDPSA_NODE_WARM is 0"),
        (["--isolation", "process"], {}, "does not start ClientApps itself"),
        (["--isolation=process"], {}, "does not start ClientApps itself"),
        (["--allow-runtime-dependency-installation"], {}, "an environment of its own"),
        (["--allow-run"], {}, "an environment of its own"),
    ],
)
def test_the_ordinary_supernode(commands, arguments, environment, reason):
    process, out, errors = start(commands, *arguments, **environment)
    assert out.splitlines()[1].startswith(f"poll  path {commands}:")
    assert out.startswith(f"pid {process.pid} arguments {len(arguments)} {' '.join(arguments)}")
    [line] = errors.splitlines()
    assert line.startswith("INFO :      fedpsa-node: ordinary starts of ClientApps: ")
    assert reason in line
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"FEDPSA_NODE_WARM": "no"}, "FEDPSA_NODE_WARM is 'no'; it must be 0 or 1"),
        ({"FEDPSA_NODE_PRELOAD": "torch ../x"}, "FEDPSA_NODE_PRELOAD holds '../x'; it must be"),
    ],
)
def test_refused_settings(commands, environment, error):
    process, out, errors = start(commands, **environment)
    assert (process.returncode, out) == (1, "")
    assert error in errors


def test_help_is_that_of_both(commands):
    _, out, errors = start(commands, "--help")
    assert out.startswith("usage: fedpsa-node")
    assert "arguments 1 --help" in out
    assert not errors


def test_a_program_that_is_not_pythons(commands):
    (commands / "flwr-clientapp").write_text("#!/bin/sh\nexit 0\n")
    assert "is not a Python script" in start(commands)[2]


def test_systems_without_a_fork_that_libraries_survive(commands, monkeypatch, capfd):
    class BecameError(Exception):
        pass

    def become(*arguments):
        raise BecameError(arguments)

    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "execve", become)
    with pytest.raises(BecameError):
        launcher.main(["--insecure"])
    assert "warm nodes need Linux" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/opt/venv/bin/python\n", ["/opt/venv/bin/python"]),
        ("#!/opt/venv/bin/python3.12 -sP\n", ["/opt/venv/bin/python3.12", "-sP"]),
        ("#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\n", ["/a b/python"]),
        ("#!/bin/sh\n'''exec' /a/python -E \"$0\" \"$@\"\n' '''\n", ["/a/python", "-E"]),
        ("#!/bin/bash\nexec python\n", None),
        ("#!/usr/bin/env python3\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_interpreter_of_a_script(tmp_path, text, words):
    script = tmp_path / "script"
    script.write_text(text)
    assert interpreter_of(script) == words


def test_options_that_belong_to_flower():
    assert why_ordinary(["--isolation", "subprocess", "--superlink", "a:1", "--port=9"]) is None
    assert why_ordinary(["--isolation"]) is not None
