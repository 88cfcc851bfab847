"""What a run on a Ray cluster consists of, without a cluster."""

import importlib
import os
import pickle
import sys
from pathlib import Path

import numpy
import pytest

from simulation import cli
from simulation.engines.cluster.code import code_for_machines
from simulation.engines.cluster.inspection import inspect, versions
from simulation.engines.cluster.joining import cluster_address, joined
from simulation.engines.cluster.machines import Machine, Resources, room_text
from simulation.engines.cluster.run import user_modules
from simulation.environment import APP
from simulation.errors import LaunchFailed, Refused
from support.tiny_app import write_app


def test_the_option_goes_before_the_variable(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_address(None) is None
    assert cluster_address("auto") == "auto"
    assert cluster_address("[::1]:6379") == "[::1]:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(None) == "10.0.0.1:6379"
    assert cluster_address("10.0.0.2:6379") == "10.0.0.2:6379"
    assert cluster_address("local") is None


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:x", "head:0", "head:70000"])
def test_what_is_no_address_is_refused(address, monkeypatch):
    with pytest.raises(Refused, match=r"--ray-address = .*must be HOST:PORT"):
        cluster_address(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(Refused, match="RAY_ADDRESS = "):
        cluster_address(None)


def test_rays_client_is_refused():
    with pytest.raises(Refused, match="run this command on a machine of the cluster"):
        cluster_address("ray://head:10001")


def test_nobody_waits_for_a_cluster_that_is_not_there():
    with (
        pytest.raises(LaunchFailed, match=r"No Ray cluster answers at 127\.0\.0\.1:9"),
        joined("127.0.0.1:9", {}),
    ):
        pass


def test_on_a_cluster_each_machine_has_its_own_processors(tmp_path, capsys):
    command = ["run", "--ray-address", "head:6379", "--cpus", "2", "--run-dir", str(tmp_path / "x")]
    assert cli.main(command) == 2
    assert "--cpus: on a cluster" in capsys.readouterr().err
    assert cli.main([*command[:1], "--cell-cpus", "2"]) == 2
    assert cli.main(["reproduce", "table-accuracy", "--cell-cpus", "1.5"]) == 2
    assert "neither a part of one nor a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpus", "gpus", "each", "slots"),
    [
        (8, 0, Resources(), 8),
        (8, 0, Resources(3), 2),
        (1, 0, Resources(0.1), 10),
        (8, 2, Resources(1, 0.25), 8),
        (16, 2, Resources(1, 0.25), 8),
        (8, 0, Resources(1, 0.25), 0),
        (0, 4, Resources(), 0),
    ],
)
def test_how_much_fits_on_a_machine(cpus, gpus, each, slots):
    assert Machine("id", "name", cpus, gpus).slots(each) == slots


def test_room_is_said_in_words():
    two = [Machine("1", "a", 2, 0), Machine("2", "b", 1, 0)]
    assert room_text(two, Resources(), "client") == "2 machines with room for 3 clients at a time"
    assert room_text(two[1:], Resources(), "cell") == "1 machine with room for 1 cell at a time"
    assert str(Resources(1, 0.5)) == "1 processor and 0.5 GPUs"


def test_a_machine_says_what_it_lacks():
    here = versions()
    assert here["numpy"] == numpy.__version__
    assert inspect(here, ["json"], "", b"") == ""
    other = here | {"torch": "0.1"}
    # The argument may be of a class that this machine does not have.
    problem = inspect(other, [], "json:loads", b"not to be read")
    assert problem == f"torch {here['torch']} is installed, but 0.1 is used here"
    problem = inspect(here, ["no_such_module"], "", b"")
    assert problem.startswith("no_such_module cannot be imported: ModuleNotFoundError")
    assert inspect(here, [], "json:loads", pickle.dumps("{}")) == ""
    assert inspect(here, [], "json:loads", pickle.dumps("{")).startswith("JSONDecodeError: ")


def test_the_code_of_a_run_is_put_together(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text("x = 1\n")
    package = tmp_path / "own_method"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    config = {"task": "own_task:task", "strategy": "own_method.rules:Mine"}
    modules = user_modules(config)
    assert modules == ["own_task", "own_method.rules"]
    assert user_modules({"task": "", "strategy": "fedpsa"}) == []
    with code_for_machines(APP, modules) as environment:
        code = Path(environment["working_dir"])
        names = {path.name for path in code.iterdir()}
        assert {"client_app", "server_app", "task", "fedpsa_strategy", "simulation"} < names
        assert {"own_task.py", "own_method"} < names
        assert not list(code.rglob("__pycache__"))
        size = sum(path.stat().st_size for path in code.rglob("*") if path.is_file())
        assert size < 10 * 2**20
        places = environment["env_vars"]["PYTHONPATH"].split(os.pathsep)
        assert str(tmp_path) in places
        assert not any(place.startswith(sys.prefix) for place in places)
    assert not code.exists()


def test_an_app_of_somebody_else_keeps_its_own_copies(tmp_path):
    app = write_app(tmp_path)
    (app / "fedpsa_strategy").mkdir()
    (app / "fedpsa_strategy" / "mine.py").touch()
    with code_for_machines(app) as environment:
        code = Path(environment["working_dir"])
        assert (code / "tinyapp" / "client.py").exists()
        assert (code / "simulation" / "engines" / "cluster" / "tasks.py").exists()
        assert [path.name for path in (code / "fedpsa_strategy").iterdir()] == ["mine.py"]
