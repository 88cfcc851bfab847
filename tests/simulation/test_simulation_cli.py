"""The command line, with a stand-in for the engines."""

from datetime import UTC, datetime

import pytest

from simulation import cli, launch
from simulation.errors import LaunchFailed, Refused, RunFailed
from support.commands import parsed
from support.programs import printed_by

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEFAULTS = {
    "run-dir": "",
    "num-clients": 2,
    "clock": "wall",
    "strategy": "fedpsa",
    "dataset": "digits",
    "task": "",
    "lr": 0.01,
}


def config(*arguments):
    return cli.build_run_config(parsed(arguments), DEFAULTS, NOW)


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", None, 3),
        ("3", 0.5, 3.0),
        ("3", "text", "3"),
        ("1e-3", 0.5, 0.001),
        ("inf", 0.5, float("inf")),
        ("true", False, True),
        ("true", "text", "true"),
        ("fedbuff", "fedpsa", "fedbuff"),
        ('"two words"', "text", "two words"),
        ("two words", "text", "two words"),
        ("'single'", None, "single"),
        ("[1, 2]", None, "[1, 2]"),
        ("2026-01-02", None, "2026-01-02"),
        ("a = 1\nb", None, "a = 1\nb"),
        ("1\nvalue2 = 2", "text", "1\nvalue2 = 2"),
        ("", "text", ""),
    ],
)
def test_values_are_toml_or_plain_text(text, default, value):
    found = cli.parse_value(text, default)
    assert found == value
    assert type(found) is type(value)


def test_defaults_of_run_and_deploy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "20260102T030405Z-fedpsa-digits"
    assert config("run") == {
        "num-clients": 50,
        "clock": "virtual",
        "run-dir": str(tmp_path / "runs" / name),
    }
    assert config("deploy") == {
        "num-clients": 4,
        "clock": "wall",
        "run-dir": str(tmp_path / "runs" / name),
    }
    (tmp_path / "runs" / name).mkdir(parents=True)
    assert config("run")["run-dir"].endswith(f"{name}-2")


def test_the_folder_is_named_after_an_own_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built = config("run", "--set", "task=my_module:my_task")
    assert built["run-dir"].endswith("-fedpsa-my_module.my_task")


def test_settings_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "strategy=fedbuff", "--set", "lr=1", "--set", "clock=wall"]
    built = config("run", *settings, "--set", "num-clients=7", "--run-dir", "here")
    assert built == {
        "strategy": "fedbuff",
        "lr": 1.0,
        "clock": "wall",
        "num-clients": 7,
        "run-dir": str(tmp_path / "here"),
    }
    assert config("deploy", "--nodes", "3")["num-clients"] == 3
    assert config("run", "--set", "run-dir=there")["run-dir"] == str(tmp_path / "there")
    assert "-fedbuff-" in config("run", *settings)["run-dir"]


def test_contradictions_and_unknown_keys_are_refused():
    with pytest.raises(Refused, match="--set num-clients contradicts"):
        config("run", "--clients", "3", "--set", "num-clients=4")
    with pytest.raises(Refused, match="did you mean strategy"):
        config("run", "--set", "stratgy=fedpsa")


@pytest.mark.parametrize(
    "arguments", [["run", "--set", "lr"], ["run", "--clients", "0"], ["walk"], []]
)
def test_nonsense_is_refused_by_the_parser(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "Usage:" in capsys.readouterr().err


def run_with(engine, tiny_app, tmp_path, monkeypatch, *more):
    monkeypatch.setitem(launch.ENGINES, "ray", engine)
    return cli.main(["run", "--app", str(tiny_app), "--run-dir", str(tmp_path / "run"), *more])


def test_a_completed_run_exits_with_0(tiny_app, tmp_path, monkeypatch):
    seen = []

    def engine(given):
        seen.append((dict(given.run_config), given.clients))
        return {"status": "completed"}

    assert run_with(engine, tiny_app, tmp_path, monkeypatch, "--clients", "5") == 0
    run_config = {"num-clients": 5, "clock": "virtual", "run-dir": str(tmp_path / "run")}
    assert seen == [(run_config, 5)]


@pytest.mark.parametrize(
    ("error", "quiet", "shown"),
    [
        (RunFailed("It failed.", log_tail="trace"), False, "Error: It failed.\n"),
        (RunFailed("It failed.", log_tail="trace"), True, "Error: It failed.\ntrace\n"),
        (LaunchFailed("No start.", log_tail="trace"), False, "Error: No start.\ntrace\n"),
        (ValueError("Bad value."), False, "Error: Bad value.\n"),
    ],
)
def test_a_failed_run_exits_with_1_and_without_a_traceback(
    error, quiet, shown, tiny_app, tmp_path, monkeypatch, capsys
):
    def engine(*_):
        raise error

    more = ["--quiet"] if quiet else []
    assert run_with(engine, tiny_app, tmp_path, monkeypatch, *more) == 1
    assert capsys.readouterr().err == shown


def test_an_interrupted_run_exits_with_130(tiny_app, tmp_path, monkeypatch):
    def engine(*_):
        raise KeyboardInterrupt

    assert run_with(engine, tiny_app, tmp_path, monkeypatch) == 130


def test_deploy_runs_on_processes(tiny_app, tmp_path, monkeypatch):
    seen = {}

    class FakeDeployment:
        def __init__(self, app_dir, **options):
            seen.update(options, app_dir=app_dir)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen["ended"] = True

        def run(self, run_config, *, stream):
            seen.update(run_config=run_config, stream=stream)
            return {"status": "completed"}

    monkeypatch.setattr("simulation.engines.grpc.Deployment", FakeDeployment)
    run_dir = tmp_path / "run"
    arguments = ["deploy", "--app", str(tiny_app), "--run-dir", str(run_dir), "--quiet"]
    assert cli.main([*arguments, "--nodes", "3"]) == 0
    assert seen == {
        "app_dir": tiny_app,
        "num_nodes": 3,
        "warm": True,
        "log_dir": run_dir / "engine-logs",
        "run_config": {"num-clients": 3, "clock": "wall", "run-dir": str(run_dir)},
        "stream": False,
        "ended": True,
    }


def test_a_folder_without_an_app_is_named(tmp_path, capsys):
    assert cli.main(["run", "--app", str(tmp_path)]) == 2
    assert "is not the folder of a Flower app" in capsys.readouterr().err


def test_the_command_line_is_light():
    loaded = "{'torch', 'ray', 'flwr', 'numpy', 'rich'} & {*sys.modules}"
    heavy = f"import sys, simulation.cli; print({loaded})"
    assert printed_by(heavy).strip() == "set()"
