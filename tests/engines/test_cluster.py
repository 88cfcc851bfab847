"""Runs on a Ray cluster of two nodes, which are processes on this machine."""

import json
import sysconfig
import threading
import venv
from pathlib import Path

import pytest

from simulation import cli
from simulation.engines.cluster.run import run_on_cluster
from simulation.engines.local.run import run_locally
from simulation.errors import LaunchFailed, RunFailed
from support.datasets import write_idx_dataset
from support.engines import config, events, uploads, wait_for
from support.ray_cluster import ray_cluster
from support.tiny_app import write_app

pytestmark = pytest.mark.engine

APP = Path(__file__).parents[2]


def run(cluster, settings, **options):
    return run_on_cluster(
        APP, settings, address=cluster.address, num_clients=settings["num-clients"], **options
    )


def test_two_machines_make_the_model_that_one_makes(tmp_path, capfd):
    settings = {"num-clients": 6, "num-server-rounds": 8, "checkpoint-versions": 0}
    alone = run_locally(config(tmp_path, "alone", **settings), workers=0)
    with ray_cluster() as cluster:
        cluster.add()
        cluster.add()
        summary = run(cluster, config(tmp_path, "two", **settings))
    assert summary["model_sha256"] == alone["model_sha256"]
    assert uploads(tmp_path / "two") == uploads(tmp_path / "alone")
    assert "2 machines with room for 2 clients" in capfd.readouterr().out


LONG = {"num-clients": 6, "num-server-rounds": 400, "checkpoint-versions": 0, "evaluate-every": 50}


@pytest.mark.slow
def test_what_a_killed_machine_worked_on_is_done_again_by_another(tmp_path, caplog):
    alone = run_locally(config(tmp_path, "alone", **LONG), workers=0)
    with ray_cluster() as cluster:
        cluster.add()
        second = cluster.add()

        def kill():
            wait_for(lambda: len(events(tmp_path / "two", "upload")) > 200)
            cluster.kill(second)

        killer = threading.Thread(target=kill)
        killer.start()
        summary = run(cluster, config(tmp_path, "two", **LONG))
        killer.join()
    assert summary["model_sha256"] == alone["model_sha256"]
    assert summary["rejected"] == 0
    assert uploads(tmp_path / "two") == uploads(tmp_path / "alone")
    assert "room for 1 client at a time now, not 2" in caplog.text


@pytest.mark.slow
def test_a_machine_that_joins_gets_work(tmp_path, caplog):
    """The run goes on until the machine is noticed, however long it takes to start."""
    endless = LONG | {"num-server-rounds": 1_000_000, "virtual-days": 0.0, "time-limit": 300.0}
    more = "room for 2 clients at a time now, not 1"
    with ray_cluster() as cluster:
        cluster.add()

        def add():
            wait_for(lambda: len(events(tmp_path / "run", "upload")) > 50)
            cluster.add()
            wait_for(lambda: more in caplog.text)
            (tmp_path / "run" / "stop-requested").touch()

        adder = threading.Thread(target=add)
        adder.start()
        with pytest.raises(RunFailed, match=r"The run was stopped\."):
            run(cluster, config(tmp_path, "run", **endless))
        adder.join()
    assert more in caplog.text


@pytest.mark.slow
def test_data_that_a_machine_lacks_are_named_before_anything_runs(tmp_path, monkeypatch):
    settings = config(tmp_path, dataset="mnist", **{"num-server-rounds": 1})
    settings.pop("cache-dir")
    here, there = tmp_path / "here", tmp_path / "there"
    write_idx_dataset(here, (250, 50))
    there.mkdir()
    with ray_cluster() as cluster:
        cluster.add(environment={"FEDPSA_DATA": str(here), "XDG_CACHE_HOME": str(here)})
        cluster.add(environment={"FEDPSA_DATA": str(there), "XDG_CACHE_HOME": str(there)})
        with pytest.raises(LaunchFailed) as caught:
            run(cluster, settings)
    text = str(caught.value)
    assert text.count("node ") == 1
    assert "the dataset 'mnist' was not found" in text
    assert str(there) in text
    assert str(here) not in text
    assert not (tmp_path / "run").exists()


def python_without(folder, package):
    """Return an interpreter that has all packages but one."""
    venv.create(folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith((package, "__editable__", "_editable")):
            (site_packages / path.name).symlink_to(path)
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_a_package_that_a_machine_lacks_is_named(tmp_path):
    with ray_cluster() as cluster:
        cluster.add()
        cluster.add(python=python_without(tmp_path / "venv", "flwr"))
        with pytest.raises(LaunchFailed, match="the package flwr is not installed") as caught:
            run(cluster, config(tmp_path, **{"num-server-rounds": 1}))
    assert str(caught.value).count("node ") == 1


@pytest.mark.slow
def test_code_comes_from_the_launcher_to_a_machine_that_has_none(tmp_path, capfd):
    settings = {"num-clients": 6, "num-server-rounds": 8, "checkpoint-versions": 0}
    alone = run_locally(config(tmp_path, "alone", **settings), workers=0)
    python = python_without(tmp_path / "venv", "fedpsa")
    with ray_cluster() as cluster:
        # The head has nothing to offer to clients, so that all work is the other's.
        cluster.add("--num-cpus=0")
        cluster.add(python=python, environment={"PYTHONPATH": ""}, cwd=tmp_path)
        summary = run(cluster, config(tmp_path, "two", **settings))
    assert summary["model_sha256"] == alone["model_sha256"]
    assert "1 machine with room for 1 client " in capfd.readouterr().out


@pytest.mark.slow
def test_clients_share_a_gpu_and_go_where_one_is(tmp_path, capfd):
    settings = config(tmp_path, device="cpu", **{"num-server-rounds": 4})
    with ray_cluster() as cluster:
        cluster.add()
        cluster.add("--num-cpus=4", "--num-gpus=1")
        summary = run(cluster, settings, client_gpus=0.5)
        assert "1 machine with room for 2 clients" in capfd.readouterr().out
        with pytest.raises(LaunchFailed, match=r"No machine of the cluster has .* 2 GPUs for one"):
            run(cluster, config(tmp_path, "more"), client_gpus=2)
    assert summary["status"] == "completed"


@pytest.mark.slow
def test_an_app_of_somebody_else_runs_on_a_cluster(tmp_path):
    app = write_app(tmp_path)
    folder = tmp_path / "results"
    with ray_cluster() as cluster:
        cluster.add()
        cluster.add()
        command = ["run", "--app", str(app), "--ray-address", cluster.address, "--clients", "3"]
        assert cli.main([*command, "--run-dir", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["answers"] == [0, 1, 2]
