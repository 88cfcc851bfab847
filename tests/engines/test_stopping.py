"""Runs that are told to stop: a last checkpoint, results so far, and nothing done twice after."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from simulation import cli
from simulation.engines.grpc import Deployment
from simulation.engines.local.run import run_locally
from simulation.engines.ray import run_on_ray
from simulation.errors import RunFailed
from simulation.experiments.processes import set_options
from support.engines import (
    APP,
    check_same,
    check_stopped,
    config,
    events,
    launch,
    newest_checkpoint,
    processes_named,
    wait_for,
)

pytestmark = pytest.mark.engine

# Nothing is saved on the way: what a stopped run goes on from was written because it was stopped.
ONLY_THE_LAST = {"checkpoint-versions": 0, "checkpoint-seconds": 0.0}


# Nobody reads what it prints while it runs.
QUIETLY = {"cwd": APP, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}

# Long enough: between two questions whether to stop there may be hundreds of uploads.
LONG = {"num-server-rounds": 300, "num-clients": 6, "evaluate-every": 100, **ONLY_THE_LAST}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return run_locally(config(folder, **LONG), workers=0, stream=False)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_the_local_engine_stops_with_a_checkpoint_and_results(
    tmp_path, number, workers, whole, marked
):
    settings = config(tmp_path, **LONG)
    command = ["run", "--engine", "local", "--workers", str(workers), *set_options(settings)]
    process = launch(*command, **QUIETLY)
    wait_for(lambda: len(events(settings["run-dir"], "upload")) > 10, what="ten uploads")
    assert len(marked()) == 1 + workers
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert not marked()
    assert process.returncode == (cli.INTERRUPTED if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in errors
    assert 10 < check_stopped(settings["run-dir"]) < whole["uploads"]
    for name in ("model.safetensors", "curve.png"):
        assert (Path(settings["run-dir"]) / name).stat().st_size > 0
    resumed = run_locally(settings | {"resume": "true"}, workers=0, stream=False)
    check_same(resumed, whole)


@pytest.mark.slow
def test_a_deployed_run_that_is_stopped_in_every_way_goes_on_where_it_stopped(tmp_path):
    # The command's own clock would be the wall's.
    rounds = {"num-server-rounds": 8, "clock": "virtual", **ONLY_THE_LAST}
    whole = run_locally(config(tmp_path, "whole", **rounds), workers=0)
    settings = config(tmp_path, **rounds)
    run_dir = settings["run-dir"]
    resume = settings | {"resume": "true"}

    def more_than(number, alive):
        def there():
            found = len(events(run_dir, "upload")) > number
            assert found or alive(), "the run ended before it was stopped"
            return found

        wait_for(there, what="uploads")

    # Ctrl-C on the command.
    process = launch("deploy", "--nodes", "3", *set_options(settings), **QUIETLY)
    more_than(1, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == cli.INTERRUPTED, errors
    done = check_stopped(run_dir)

    with Deployment(APP, num_nodes=3) as deployment:
        # Flower's own command, which nobody has prepared the ServerApp for.
        run = deployment.submit(resume)
        more_than(done, lambda: run._summary() is None)
        deployment.superlink.flwr("stop", run.run_id, deployment.superlink.connection)
        with pytest.raises(RunFailed, match="stopped"):
            run.wait(timeout=120)
        wait_for(lambda: not processes_named(deployment, "flwr-serverapp"), what="its end")
        done = check_stopped(run_dir)

        # A signal to the process.
        run = deployment.submit(resume)
        more_than(done, lambda: run._summary() is None)
        (pid,) = processes_named(deployment, "flwr-serverapp")
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(RunFailed, match="stopped"):
            run.wait(timeout=120)
        check_stopped(run_dir)

        check_same(deployment.run(resume), whole)


@pytest.mark.slow
def test_a_run_on_ray_that_is_interrupted_goes_on_from_its_newest_checkpoint(tmp_path):
    rounds = {"num-server-rounds": 40, "checkpoint-versions": 2, "evaluate-every": 20}
    whole = run_locally(config(tmp_path, "whole", **rounds), workers=0)
    settings = config(tmp_path, **rounds)
    process = launch("run", "--engine", "ray", "--cpus", "2", *set_options(settings), **QUIETLY)

    def there():
        assert process.poll() is None, "the run ended before it was stopped"
        return len(events(settings["run-dir"], "aggregate")) >= 3

    wait_for(there, what="version 3")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == cli.INTERRUPTED, errors
    assert 2 <= newest_checkpoint(settings["run-dir"])["version"] < 40
    resumed = run_on_ray(APP, settings | {"resume": "true"}, num_clients=3, num_cpus=2)
    check_same(resumed, whole)
