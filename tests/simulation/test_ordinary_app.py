"""Somebody's Flower app, which has none of our settings, on every engine."""

import sys

import pytest

from simulation import cli
from support.ordinary_app import write_app

SLOW = (pytest.mark.engine, pytest.mark.slow)
ENGINES = [
    pytest.param(("run", "--engine", "local", "--clients", "2", "--workers", "1"), id="local"),
    pytest.param(("run", "--engine", "local", "--clients", "2", "--workers", "0"), id="in process"),
    # On real processes quickly: test_simulation_engines.py, test_deployment.
    pytest.param(("run", "--clients", "2"), id="ray", marks=SLOW),
    pytest.param(("deploy", "--nodes", "2"), id="grpc", marks=SLOW),
]


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield write_app(tmp_path / "app")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ordinary"]:
        del sys.modules[name]


@pytest.mark.parametrize("engine", ENGINES)
def test_it_runs(engine, app, marked, capfd):
    assert cli.main([*engine, "--app", str(app), "--set", "learning-rate=0.25"]) == 0
    output = capfd.readouterr().out
    # Two rounds, each a step of 0.25 * (1 + 2) / 2.
    assert "final arrays: [0.75, 0.75, 0.75]" in output
    assert output.splitlines()[-1] == "Completed."
    assert "Results go to" not in output
    assert not (app.parent / "runs").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_its_failure_is_the_commands(engine, app, marked, capfd):
    assert cli.main([*engine, "--app", str(app), "--set", "learning-rate=2"]) == 1
    captured = capfd.readouterr()
    assert "the model is on fire" in captured.out + captured.err
    assert "Completed" not in captured.out


def test_its_settings_are_checked(app, capsys):
    assert cli.main(["run", "--app", str(app), "--set", "learning_rate=2"]) == 2
    assert "did you mean learning-rate?" in capsys.readouterr().err
    assert cli.main(["run", "--app", str(app), "--set", "lr=2"]) == 2
    assert "there is no setting 'lr'" in capsys.readouterr().err
    assert cli.main(["run", "--app", str(app), "--run-dir", "here"]) == 2
    assert "this app has no setting 'run-dir'" in capsys.readouterr().err
