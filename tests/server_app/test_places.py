from datetime import UTC, datetime
from pathlib import Path

from server_app.places import run_name, runs_folder, unused
from simulation.cli import build_run_config
from support.commands import parsed

APP = Path(__file__).parents[2]
NOW = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)


def test_runs_go_to_the_apps_own_folder_or_to_the_users(tmp_path, monkeypatch):
    assert runs_folder(APP) == APP / "runs"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    own = tmp_path / ".local" / "state" / "fedpsa" / "runs"
    other = tmp_path / "other"
    other.mkdir()
    assert runs_folder(other) == own  # no app at all
    text = (APP / "pyproject.toml").read_text()
    for foreign in (
        "not toml [",
        "[project]\nname = 'fedpsa'\n",
        text.replace('name = "fedpsa"', 'name = "other"'),
        text.replace('publisher = "fedpsa"', 'publisher = "somebody"'),
    ):
        (other / "pyproject.toml").write_text(foreign)
        assert runs_folder(other) == own
    (other / "pyproject.toml").write_text(text)
    assert runs_folder(other) == other / "runs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert runs_folder() == Path("/var/state/fedpsa/runs")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert runs_folder() == own


def test_names_have_one_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_name("fedpsa", "my.tasks:digits", NOW) == "20260131T235959Z-fedpsa-my.tasks.digits"
    arguments = parsed(["run"])
    defaults = {"strategy": "fedpsa", "dataset": "digits", "num-clients": 1, "run-dir": ""}
    defaults |= {"clock": "virtual"}
    config = build_run_config(arguments, defaults, NOW)
    name = run_name("fedpsa", "digits", NOW)
    assert config["run-dir"] == str(tmp_path / "runs" / name)


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    assert unused(tmp_path / "x") == tmp_path / "x"
    (tmp_path / "x").mkdir()
    (tmp_path / "x-2").mkdir()
    assert unused(tmp_path / "x") == tmp_path / "x-3"
