"""The audit of sketches on a real engine: honest clients pass it, who copies a sketch does not."""

import sys

import pytest

from server_app.app import run_settings
from server_app.settings import Settings
from simulation.engines.grpc import run_on_processes
from simulation.engines.local.grid import LocalGrid
from simulation.engines.local.run import run_locally
from simulation.engines.ray import run_on_ray
from support.engines import APP, config, events

pytestmark = pytest.mark.engine

FULL = {"num-server-rounds": 5, "audit-fraction": 1.0, "audit-tolerance": 1e-6}

# Client 1 trains, but answers with the sketch of the model as the server sent it.
FORGER = """
from flwr.clientapp import ClientApp

from client_app.app import node_task, query
from client_app.app import train as honest_train
from fedpsa_strategy import make_reply

app = ClientApp()
app.query()(query)


@app.train()
def train(message, context):
    reply = honest_train(message, context)
    if context.node_config["partition-id"] == 1:
        model = node_task(context).make_model(0)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        copied = make_reply(message, model, num_examples=1, context=context)
        reply.content["metrics"]["sketch"] = copied.content["metrics"]["sketch"]
    return reply
"""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int4"])
def test_honest_clients_pass_a_full_audit_however_updates_travel(tmp_path, dtype):
    settings = config(tmp_path, **FULL, **{"update-dtype": dtype})
    summary = run_locally(settings, workers=0, stream=False)
    assert (summary["uploads"], summary["rejected"]) == (10, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_honest_clients_pass_a_full_audit_in_fewer_bits_on_every_engine(tmp_path, dtype):
    def short(name):
        return config(tmp_path, name, **FULL, **{"update-dtype": dtype})

    summaries = {
        "local": run_locally(short("local"), workers=2, stream=False),
        "ray": run_on_ray(APP, short("ray"), num_clients=3, num_cpus=2),
        "grpc": run_on_processes(APP, short("grpc"), num_nodes=3),
    }
    for name, summary in summaries.items():
        assert (summary["uploads"], summary["rejected"]) == (10, 0), name
    assert len({summary["model_sha256"] for summary in summaries.values()}) == 1


def forged_run(folder, monkeypatch, audit_fraction):
    (folder / "forging_client.py").write_text(FORGER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "forging_client", raising=False)
    run_config = config(folder, **FULL | {"audit-fraction": audit_fraction, "failure-pause": 1e9})
    settings = Settings.from_run_config(run_config)
    with LocalGrid(3, settings.to_run_config(), workers=0, app="forging_client:app") as grid:
        run_settings(grid, settings)
    return run_config["run-dir"]


def test_a_client_that_copies_the_servers_sketch_is_caught_and_left_out(tmp_path, monkeypatch):
    run_dir = forged_run(tmp_path, monkeypatch, 1.0)
    (rejection,) = events(run_dir, "reject")
    assert rejection["client"] == 1
    assert "sketch is not that of the model" in rejection["reason"]
    assert [event["client"] for event in events(run_dir, "quarantine")] == [1]
    assert {event["client"] for event in events(run_dir, "upload")} == {0, 2}


def test_without_an_audit_it_gets_all_the_weight_it_claims(tmp_path, monkeypatch):
    run_dir = forged_run(tmp_path, monkeypatch, 0.0)
    assert not events(run_dir, "reject")
    fresh = [event for event in events(run_dir, "upload") if event["staleness"] == 0]
    forged = [event["report"]["kappa"] for event in fresh if event["client"] == 1]
    assert forged
    assert min(forged) == pytest.approx(1.0, abs=1e-6)
