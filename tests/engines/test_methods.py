"""Every method on Flower's real engines, with both clocks."""

from pathlib import Path

import pytest

from fedpsa_strategy.methods.registry import METHODS
from simulation.engines.grpc import Deployment
from simulation.engines.ray import run_on_ray

pytestmark = [pytest.mark.engine, pytest.mark.slow]

APP = Path(__file__).parents[2]
NUM_CLIENTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("methods")


@pytest.fixture(scope="module")
def deployment():
    with Deployment(APP, num_nodes=NUM_CLIENTS) as running:
        yield running


def config(folder, method, name, **settings):
    return {
        "strategy": method,
        "num-clients": NUM_CLIENTS,
        "num-server-rounds": 3,
        "buffer-size": 2,
        "max-in-flight": 2,
        "lr": 0.1,
        "run-dir": str(folder / f"{method}-{name}"),
        "cache-dir": str(folder / "cache"),
        **settings,
    }


@pytest.mark.parametrize("method", METHODS)
def test_ray_and_grpc_give_the_same_model_with_the_virtual_clock(folder, deployment, method):
    on_ray = run_on_ray(APP, config(folder, method, "ray"), num_clients=NUM_CLIENTS)
    on_grpc = deployment.run(config(folder, method, "grpc"))
    assert on_ray["model_sha256"] == on_grpc["model_sha256"]
    assert on_ray["versions"] == on_grpc["versions"] == 3


@pytest.mark.parametrize("method", METHODS)
def test_real_processes_with_the_wall_clock(folder, deployment, method):
    settings = config(folder, method, "wall", clock="wall", **{"time-limit": 120.0})
    summary = deployment.run(settings)
    assert summary["versions"] == 3
    assert summary["rejected"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_ray_with_the_wall_clock(folder, method):
    settings = config(folder, method, "ray-wall", clock="wall", **{"time-limit": 120.0})
    summary = run_on_ray(APP, settings, num_clients=NUM_CLIENTS)
    assert summary["versions"] == 3
    assert summary["rejected"] == 0
