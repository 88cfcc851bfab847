"""Every command in README and docs exists, takes these options, and is run by some test."""

import os
import re
import subprocess
import tomllib
from collections import Counter
from datetime import UTC, datetime

import pytest
from flwr.common.config import parse_config_args

from server_app.settings import Settings
from simulation.cli import build_run_config
from simulation.combinations import is_sweep
from support.commands import parsed
from support.doc_commands import PAGES, ROOT, commands
from support.doc_coverage import AFTER_SCALED, BY_TEST, HERE, NO_COMMANDS, SCALED, TESTS
from support.own_method import write_example


def check_settings(config):
    known = Settings().to_run_config()
    Settings.from_run_config(
        {"run-dir": "/tmp/x"} | {k: v for k, v in config.items() if k in known}
    )
    assert config.keys() <= known.keys()


def listed():
    """Return how often each command is listed in the tables, by text or by its beginning."""
    count = Counter([*HERE, *SCALED, *AFTER_SCALED, *TESTS, *NO_COMMANDS])
    for command in commands():
        count[command.text] += any(command.text.startswith(begin) for begin in BY_TEST)
    return +count


def test_every_command_is_run_by_exactly_one_test():
    count = listed()
    for command in commands():
        assert count[command.text] == 1, f"{command.page}: {command.text}: see doc_coverage.py"


def test_no_table_lists_what_is_no_longer_documented():
    texts = [command.text for command in commands()]
    assert [text for text in listed() if text not in texts] == []
    for begin in BY_TEST:
        assert any(text.startswith(begin) for text in texts), begin


def test_the_named_tests_exist():
    for name in set(BY_TEST.values()):
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{command.page}: {command.text[:60]}")
        for command in commands()
        if command.text not in NO_COMMANDS
    ],
)
def test_the_command_exists(command, tmp_path, monkeypatch):
    write_example(tmp_path)  # the method of docs/METHODS.md
    monkeypatch.syspath_prepend(str(tmp_path))
    words = command.words
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:3] == ["python", "-m", "simulation"] or words[0] == "fedpsa":
        words = words[1:] if words[0] == "fedpsa" else words[3:]
        words = words[: words.index(">")] if ">" in words else words
        monkeypatch.setattr("simulation.cli.read_config", lambda _: {})
        arguments = parsed(words)
        if words[0] in ("run", "deploy") and not is_sweep(arguments.settings):
            defaults = Settings().to_run_config()
            check_settings(build_run_config(arguments, defaults, datetime.now(UTC)))
    elif words[:2] == ["flwr", "run"]:
        check_settings(parse_config_args([words[words.index("--run-config") + 1]]))


def test_the_tutorials_superlink_may_be_added_twice(tmp_path):
    page = (ROOT / "docs" / "TUTORIAL.md").read_text()
    lines = [line for line in page.splitlines() if "~/.flwr" in line and not line.startswith("And")]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for _ in range(2):
        for line in lines:
            subprocess.run(["bash", "-euc", line], env=environment, check=True)
    config = tomllib.loads((tmp_path / ".flwr" / "config.toml").read_text())
    assert config == {"superlink": {"mine": {"address": "127.0.0.1:8000", "insecure": True}}}


def test_links_between_the_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
