"""The app on Flower's real engines: it learns, and gives the same model everywhere."""

import json
import tomllib
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from simulation.engines.grpc import run_on_processes
from simulation.engines.local.run import run_locally
from simulation.engines.ray import run_on_ray
from support.engines import events, uploads

pytestmark = pytest.mark.engine

APP = Path(__file__).parents[2]
NUM_CLIENTS = 3
SMALL = {
    "num-clients": NUM_CLIENTS,
    "clock": "virtual",
    "num-server-rounds": 3,
    "buffer-size": 2,
    "queue-size": 3,
    "max-in-flight": 2,
    "lr": 0.1,
    "batch-size": 64,
    "evaluate-every": 1,
    "audit-fraction": 1.0,
}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    """The same settings on the local engine, on two Ray actors, and on real processes."""
    folder = tmp_path_factory.mktemp("runs")

    def config(name):
        return SMALL | {"run-dir": str(folder / name), "cache-dir": str(folder / "cache")}

    return {
        "local-0": run_locally(config("local-0"), workers=0),
        "local-2": run_locally(config("local-2"), workers=2),
        "ray": run_on_ray(APP, config("ray"), num_clients=NUM_CLIENTS, num_cpus=2),
        "grpc": run_on_processes(APP, config("grpc"), num_nodes=NUM_CLIENTS),
    }


def test_the_same_seed_gives_the_same_model_bit_for_bit_on_every_engine(summaries):
    hashes = {name: summary["model_sha256"] for name, summary in summaries.items()}
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
def test_the_number_of_rays_actors_does_not_change_the_model(summaries, tmp_path):
    config = SMALL | {"run-dir": str(tmp_path / "ray-1")}
    one = run_on_ray(APP, config, num_clients=NUM_CLIENTS, num_cpus=1)
    assert one["model_sha256"] == summaries["ray"]["model_sha256"]


def test_every_engine_makes_the_same_uploads_in_the_same_order(summaries):
    first, *others = [uploads(summary["settings"]["run-dir"]) for summary in summaries.values()]
    assert len(first) == 6
    assert all(other == first for other in others)


def test_the_run_folder_is_complete(summaries):
    for summary in summaries.values():
        folder = Path(summary["settings"]["run-dir"])
        assert tomllib.loads((folder / "config.toml").read_text()) == summary["settings"]
        assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert {"encoder", "head"} == {
            key.split(".")[0] for key in load_file(folder / "model.safetensors")
        }
        assert json.loads((folder / "summary.json").read_text()) == summary
        assert summary["status"] == "completed"
        assert summary["rejected"] == 0


def test_honest_clients_pass_a_full_audit_on_every_engine(summaries):
    for name, summary in summaries.items():
        assert summary["settings"]["audit-fraction"] == 1.0
        assert (summary["uploads"], summary["rejected"]) == (6, 0), name


def test_it_learns(summaries):
    found = events(summaries["ray"]["settings"]["run-dir"], "evaluate")
    losses = [event["metrics"]["loss"] for event in found]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_compiled_step_gives_the_same_model_on_every_engine(summaries, tmp_path):
    def config(name):
        return SMALL | {"step": "compiled", "run-dir": str(tmp_path / name)}

    compiled = {
        "local-0": run_locally(config("local-0"), workers=0),
        "local-1": run_locally(config("local-1"), workers=1, train_here=True),
        "ray": run_on_ray(APP, config("ray"), num_clients=NUM_CLIENTS, num_cpus=1),
        "grpc": run_on_processes(APP, config("grpc"), num_nodes=NUM_CLIENTS),
    }
    hashes = {name: summary["model_sha256"] for name, summary in compiled.items()}
    assert len(set(hashes.values())) == 1, hashes
    # Not that of the eager step: else training would have run eagerly.
    assert hashes["ray"] != summaries["ray"]["model_sha256"]
    kappas = [summary["mean_kappa"] for summary in (compiled["grpc"], summaries["grpc"])]
    assert kappas[0] == pytest.approx(kappas[1], rel=1e-3)
