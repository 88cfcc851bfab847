"""`fedpsa new`: an app made by the built wheel, outside the repository, that runs."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedpsa_strategy import compare, load
from fedpsa_strategy.cli import new
from fedpsa_strategy.cli.main import main
from simulation.engines.local.run import run_locally
from support.wheel import LIBRARY, make_environment

REFERENCE = "git+https://host.example/fedpsa.git#subdirectory=fedpsa_strategy"


def dependencies(app):
    table = tomllib.loads((app / "pyproject.toml").read_text())
    return {each.name: each for each in map(Requirement, table["project"]["dependencies"])}


def check_run(app):
    """Check what a run of the app has to leave behind."""
    (folder,) = (app / "runs").iterdir()
    run = load(folder)
    assert run.status == "completed"
    assert run.accuracy > 0.9
    assert run.summary["versions"] == 30
    assert len(run.curve) > 10
    assert len(run.events) > 100
    assert {name.split(".")[0] for name in run.model} == {"0", "2"}
    assert "fedpsa" in str(compare([folder]))


def test_an_app_made_by_the_wheel_runs_on_the_local_engine(wheel, tmp_path, monkeypatch):
    python = make_environment(tmp_path / "environment", wheel, ["flwr"])
    command = [python, "-I", "-m", "fedpsa_strategy"]
    done = subprocess.run(
        [*command, "new", "my-app"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "my_app/task.py" in done.stdout
    app = tmp_path / "my-app"
    library = dependencies(app)["fedpsa-strategy"]
    assert library.url == wheel.as_uri()
    # Where there is no checkout, the others say so.
    done = subprocess.run([*command, "run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "`fedpsa new my-app`" in done.stderr
    done = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True)
    findings = {each["subject"]: each for each in json.loads(done.stdout)}
    assert "torch is not installed" in findings["extra torch"]["text"]
    monkeypatch.syspath_prepend(str(app))
    run_locally({}, app_dir=app, num_clients=4, workers=0, stream=False)
    check_run(app)


@pytest.mark.slow
@pytest.mark.engine
def test_flwr_run_runs_it_in_an_environment_of_its_own(wheel, tmp_path):
    requirements = ["flwr[simulation]", "torch", "matplotlib", "starlette", "uvicorn", "psutil"]
    python = make_environment(
        tmp_path / "environment", wheel, [*requirements, "safetensors", "hatchling"]
    )
    fedpsa, flwr = (python.parent / name for name in ("fedpsa", "flwr"))
    subprocess.run([fedpsa, "new", "my-app"], cwd=tmp_path, check=True)
    app = tmp_path / "my-app"
    # The environment is as it should be; Flower would make another one, over the network.
    variables = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "28391",
        "FLWR_LOCAL_CONTROL_API_PORT": "28393",
        "FEDPSA_TEST": str(tmp_path),
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    try:
        subprocess.run(
            [flwr, "run", ".", "--stream", "--federation-config", "num-supernodes=4"],
            cwd=app,
            env=environment,
            timeout=500,
            check=True,
        )
    finally:
        end_processes_with("FEDPSA_TEST", str(tmp_path))
    check_run(app)


def end_processes_with(variable, value):
    from simulation.engines.flower.process_table import end_processes, find_launched

    end_processes(lambda: find_launched(variable, value), grace=5.0)


@pytest.mark.parametrize("name", ["json", "flwr", "my app", "-x", "1st", "class", "ü"])
def test_names_that_cannot_be_an_apps_are_refused(name, tmp_path, capsys):
    assert main(["new", "--library", REFERENCE, "--", str(tmp_path / name)]) == 2
    assert repr(name) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine.txt").write_text("precious")
    assert main(["new", str(tmp_path / "app"), "--library", REFERENCE]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", ["fedpsa-strategy", "fedpsa-strategy==1.0", "", "no/such.whl"])
def test_the_library_is_never_a_bare_name(text, tmp_path, capsys):
    assert main(["new", str(tmp_path / "app"), "--library", text]) == 2
    assert "neither a wheel, nor a checkout, nor an address" in capsys.readouterr().err


def test_the_library_may_be_an_address_a_wheel_or_a_checkout(tmp_path, wheel):
    assert new.checked_reference(REFERENCE) == REFERENCE
    assert new.checked_reference(str(wheel)) == wheel.as_uri()
    assert new.checked_reference(str(LIBRARY.parent)) == LIBRARY.as_uri()
    assert main(["new", str(tmp_path / "an-app"), "--library", REFERENCE]) == 0
    assert dependencies(tmp_path / "an-app")["fedpsa-strategy"].url == REFERENCE


@pytest.mark.parametrize(
    ("noted", "reference"),
    [
        (
            {
                "url": "https://host.example/fedpsa.git",
                "subdirectory": "fedpsa_strategy",
                "vcs_info": {"vcs": "git", "commit_id": "abc123"},
            },
            "git+https://host.example/fedpsa.git@abc123#subdirectory=fedpsa_strategy",
        ),
        ({"url": "https://host.example/x.whl"}, "https://host.example/x.whl"),
        ({"url": LIBRARY.as_uri(), "dir_info": {}}, LIBRARY.as_uri()),
    ],
)
def test_what_the_installer_noted_becomes_a_reference(noted, reference):
    assert new._reference(noted, "") == reference


def test_an_unknown_or_lost_origin_is_asked_for(monkeypatch):
    with pytest.raises(new.NoReferenceError, match=r"no longer there.*--library"):
        new._reference({"url": "file:///no/such.whl"}, "")

    class Noted:
        def read_text(self, _):
            return None

    monkeypatch.setattr(new, "distribution", lambda _: Noted())
    with pytest.raises(new.NoReferenceError, match="say it with --library"):
        new.installed_reference()


def test_a_folder_of_any_name_may_be_around_it(tmp_path):
    folder = tmp_path / 'my "runs" ü' / "some-app"
    new.write_app(folder, REFERENCE)
    table = tomllib.loads((folder / "pyproject.toml").read_text())
    assert table["tool"]["flwr"]["app"]["config"]["runs-dir"] == str(folder / "runs")


def test_the_apps_files_are_as_tidy_as_ours(tmp_path):
    new.write_app(tmp_path / "some-app", REFERENCE)
    config = LIBRARY.parent / "pyproject.toml"
    files = list((tmp_path / "some-app").rglob("*.py"))
    assert len(files) == 4
    ruff = Path(sys.executable).parent / "ruff"
    subprocess.run([ruff, "format", "--check", "--config", config, *files], check=True)
    select = ["--select", "E,F,W,N,UP,B"]
    subprocess.run([ruff, "check", "--config", config, *select, *files], check=True)
