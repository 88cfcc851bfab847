"""Experiments whose cells are Ray tasks, on real clusters of two nodes."""

import json
import os
import signal
import threading

import pytest

from simulation import cli
from simulation.experiments.cell_task import pack, unpack
from support.engines import (
    APP,
    assert_no_upload_twice,
    events,
    launch,
    num_uploads,
    wait_for,
)
from support.ray_cluster import ray_cluster

SMALL = ["--datasets", "digits", "--alphas", "0.5", "--seeds", "0"]


def command(cluster, *options):
    start = ["reproduce", "table-accuracy", *SMALL, "--on", "ray", *options]
    return [*start, "--ray-address", cluster.address]


def first_wall(folder):
    return events(folder, "upload")[0]["wall"]


def hashes(folder, name="table-accuracy"):
    lines = (folder / "results" / name / "cells.jsonl").read_text().splitlines()
    return [json.loads(line)["model_sha256"] for line in lines]


def test_a_folder_comes_back_as_it_was(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "events.jsonl").write_text("new")
    here.mkdir()
    (here / "old").touch()
    unpack(pack(there), here)
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [("events.jsonl", "new")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_cell_whose_machine_is_lost_goes_on_elsewhere(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    options = ["--methods", "FedPSA,Uniform", "--days", "0.4", "--set", "checkpoint-seconds=1"]
    begun = {}
    with ray_cluster() as cluster:
        cluster.add()
        second = cluster.add()

        def kill():
            wait_for(lambda: len(list(tmp_path.glob("runs/cells/*/checkpoints/*"))) >= 2)
            cluster.kill(second)
            for path in tmp_path.glob("runs/cells/*/events.jsonl"):
                begun[path.parent.name] = first_wall(path.parent)

        killer = threading.Thread(target=kill)
        killer.start()
        assert cli.main(command(cluster, *options)) == 0
        killer.join()
        output = capfd.readouterr().out
        assert "2 machines with room for 2 cells" in output
        assert output.count("finished ") == 2
        # The same command has nothing left to do.
        assert cli.main(command(cluster, *options)) == 0
        assert "All 2 cells of table-accuracy are finished" in capfd.readouterr().out
    again = ["reproduce", "table-accuracy", *SMALL, *options, "--cells", "alone"]
    assert cli.main([*again, "--label", "alone"]) == 0
    assert hashes(tmp_path) == hashes(tmp_path, "table-accuracy-alone")
    assert len(begun) == 2
    for folder in tmp_path.glob("runs/cells/[0-9a-f]*"):
        # What was lost went on from its checkpoint: its beginning is the old one.
        assert first_wall(folder) == begun.get(folder.name, first_wall(folder))
        assert_no_upload_twice(folder)


@pytest.mark.engine
@pytest.mark.slow
def test_an_interrupted_experiment_on_ray_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--methods", "Uniform", "--days", "0.4", "--seeds", "0"]
    with ray_cluster() as cluster:
        cluster.add()
        environment = os.environ | {"PYTHONPATH": str(APP)}
        process = launch(*command(cluster, *options), cwd=tmp_path, env=environment)
        wait_for(lambda: num_uploads(tmp_path) > 50 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        (folder,) = tmp_path.glob("runs/cells/[0-9a-f]*")
        assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
        kept = len(events(folder, "upload"))
        assert cli.main(command(cluster, *options)) == 0
    assert_no_upload_twice(folder, kept)
    assert not list(tmp_path.glob("runs/cells/.shared-*"))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a machine with other folders")
def test_results_come_back_from_a_machine_that_does_not_share_the_folder(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    options = ["--methods", "FedPSA,Uniform", "--days", "0.02"]
    cells = tmp_path / "runs" / "cells"
    cells.mkdir(parents=True)
    hide = f'mount -t tmpfs none {cells} && exec "$@"'
    with ray_cluster() as cluster:
        cluster.add("--num-cpus=0")
        cluster.add(before=["unshare", "--mount", "sh", "-c", hide, "sh"])
        assert cli.main(command(cluster, *options)) == 0
    assert "is not shared with" in capfd.readouterr().err
    again = ["reproduce", "table-accuracy", *SMALL, *options, "--cells", "alone"]
    assert cli.main([*again, "--label", "alone"]) == 0
    assert hashes(tmp_path) == hashes(tmp_path, "table-accuracy-alone")
    assert all(hashes(tmp_path))
    folders = sorted(path.name for path in cells.iterdir() if not path.name.startswith("."))
    assert len(folders) == 2
    assert not list(cells.glob(".*-*"))


@pytest.mark.engine
@pytest.mark.slow
def test_without_a_cluster_ray_is_started_here(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start = ["reproduce", "table-accuracy", *SMALL, "--methods", "Uniform", "--days", "0.005"]
    assert cli.main([*start, "--on", "ray"]) == 0
    output = capfd.readouterr().out
    assert "started Ray on this machine alone: 1 machine with room for" in output
    assert output.count("finished ") == 1
    assert cli.main([*start, "--on", "ray", "--engine", "ray", "--cells", "other"]) == 2
    assert "--on ray: each run simulates" in capfd.readouterr().err
