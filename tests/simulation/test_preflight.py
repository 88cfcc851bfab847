"""What cannot run is said before anything is started."""

import io
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_app.settings import Settings, key_of
from simulation import cli, launch
from simulation.environment import format_run_config

REPOSITORY = Path(cli.__file__).parents[1]


@pytest.fixture
def engine(monkeypatch):
    """Replace all engines; what they are given is noted."""
    started = []

    def run(given):
        started.append(dict(given.run_config))
        return {"status": "completed"}

    for name in launch.ENGINES:
        monkeypatch.setitem(launch.ENGINES, name, run)
    return started


def refused(capsys, *arguments):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr=-1", "Error: lr = -1.0: must be above 0, or 0 for the task's own"),
        ("lr=1" + 400 * "0", "Error: lr = inf: must be a finite number above 0"),
        ("seed=" + 5000 * "9", "Error: seed = '999"),
        ("gamma=" + 2000 * "[", "Error: gamma = '[[["),
        ("dirichlet-alpha=1e20", "Error: dirichlet-alpha = 1e+20: must be at most 1,000,000,000"),
        ("num-clients=1000000000", "Error: num-clients = 1000000000: must be at least 1"),
        ("learning-rate=0.1", "Error: there is no setting 'learning-rate': did you mean lr?"),
        ("batch_size=1", "Error: there is no setting 'batch_size': did you mean batch-size?"),
        ("task=task", "Error: task = 'task': 'task' is a package of this repository"),
        ("run-dir=/dev/null/x", "Error: run-dir = '/dev/null/x': /dev/null is not a folder"),
        ("run-dir=/" + 300 * "x", "File name too long"),
        ("cache-dir=/dev/null", "Error: cache-dir = '/dev/null': /dev/null is not a folder"),
        ("data-dir=/no/such", "Error: data-dir = '/no/such': there is no such folder"),
        ("resume=/no/such", "Error: resume = '/no/such': there is no such run or checkpoint"),
    ],
)
@pytest.mark.parametrize("command", ["run", "deploy"])
def test_what_cannot_run_is_one_sentence(
    text, sentence, command, tmp_path, monkeypatch, engine, capsys
):
    monkeypatch.chdir(tmp_path)
    bounds = ["--set", "num-server-rounds=1"]
    assert sentence in refused(capsys, command, "--set", text, *bounds)
    assert not engine
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_refused_after_its_settings(tmp_path, engine, capsys):
    (tmp_path / "events.jsonl").touch()
    here = ["run", "--run-dir", str(tmp_path)]
    assert "lr = -1.0: must be above 0" in refused(capsys, *here, "--set", "lr=-1")
    assert "already holds a run" in refused(capsys, *here)
    assert "no usable checkpoint" in refused(capsys, *here, "--set", "resume=true")
    elsewhere = ["run", "--run-dir", str(tmp_path / "new"), "--set", "resume=true"]
    assert "holds no run to go on from" in refused(capsys, *elsewhere)
    assert not engine


def test_what_has_no_effect_is_warned_of(tmp_path, engine, capsys):
    assert cli.main(["run", "--run-dir", str(tmp_path / "a"), "--set", "mixing=0.2"]) == 0
    assert "Warning: mixing = 0.2 has no effect: strategy 'fedpsa'" in capsys.readouterr().err
    assert cli.main(["run", "--run-dir", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""


def test_relative_folders_are_those_of_the_caller(tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    places = ["--set", "data-dir=data", "--set", "cache-dir=cache"]
    assert cli.main(["run", "--run-dir", "here", *places]) == 0
    keys = ("run-dir", "data-dir", "cache-dir")
    assert [engine[0][key] for key in keys] == [
        str(tmp_path / name) for name in ("here", "data", "cache")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--clients", "1000000000"],
        ["run", "--clients", 5000 * "9"],
        ["deploy", "--nodes", "100000"],
        ["run", "--workers", "1000000"],
        ["run", "--client-gpus", "nan"],
        ["run", "--client-gpus", "-1"],
        ["run", "--client-gpus", "inf"],
        ["reproduce", "table-accuracy", "--seeds", "0-99999999999999999999"],
        ["reproduce", "table-accuracy", "--days", "inf"],
        ["reproduce", "table-accuracy", "--days", "nan"],
    ],
)
def test_impossible_options_are_refused(arguments, engine, capsys):
    assert cli.main(arguments) == 2
    assert "Error: Invalid value for '--" in capsys.readouterr().err
    assert not engine


_NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 2**63, 1e308, 1e-320])
_TEXTS = st.text(max_size=300) | st.sampled_from(
    ["true", "''", "1e", "{}", "[1]", "\0", "/dev/null"]
)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_command_starts_a_run_that_flower_takes_or_is_refused(data):
    """For every setting, whatever is written behind its name."""
    key = key_of(data.draw(st.sampled_from(fields(Settings))).name)
    value = data.draw(_NUMBERS.map(str) | _TEXTS | st.booleans().map(str))
    started = []

    def run(given):
        started.append(dict(given.run_config))
        return {"status": "completed"}

    errors = io.StringIO()
    before, launch.ENGINES["ray"] = launch.ENGINES["ray"], run
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            code = cli.main(["run", "--set", f"{key}={value}"])
    finally:
        launch.ENGINES["ray"] = before
    lines = [line for line in errors.getvalue().split("\n") if line and "Warning" not in line]
    if code == 0:
        assert not lines
        format_run_config(started[0])
        Settings.from_run_config(started[0])
    else:
        assert code == 2
        assert len(lines) == 1
        assert lines[0].startswith("Error: ")
        assert not started


def test_a_bad_setting_is_refused_within_moments(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "simulation", "run", "--set", "lr=-1"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("Error: lr = -1.0: must be above 0")
    assert " torch\n" not in done.stderr
    assert " ray\n" not in done.stderr
    assert time.monotonic() - began < 20  # 0.8 s alone
