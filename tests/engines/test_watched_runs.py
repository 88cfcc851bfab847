"""Runs of the app that MLflow, W&B and Prometheus follow, and one that is resumed."""

import json
import threading
import urllib.request

import pytest

from simulation.engines.local.run import run_locally
from simulation.environment import free_port
from support.engines import ROUNDS, config

pytestmark = pytest.mark.engine


class Scraper(threading.Thread):
    """Scrapes until it is told to stop, as Prometheus does; keeps the last answer of a run."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.address = f"http://127.0.0.1:{port}/metrics"
        self.over = threading.Event()
        self.seen = {}

    def run(self):
        while not self.over.wait(0.02):
            try:
                with urllib.request.urlopen(self.address, timeout=1) as answer:
                    lines = answer.read().decode().splitlines()
            except OSError:
                continue
            rows = [line.rsplit(" ", 1) for line in lines if line.startswith("fedpsa_")]
            self.seen = {name: float(value) for name, value in rows}


def test_a_run_is_followed_and_its_resume_goes_on_in_the_same_place(tmp_path, monkeypatch):
    for name in ("mlflow", "wandb", "prometheus_client"):
        pytest.importorskip(name)
    from mlflow import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    port, uri = free_port(), f"sqlite:///{tmp_path}/mlflow.db"
    trackers = {"mlflow": uri, "wandb": "tests", "prometheus": f"127.0.0.1:{port}"}
    settings = config(tmp_path, **ROUNDS) | trackers | {"checkpoint-versions": 2}
    scraper = Scraper(port)
    scraper.start()
    run_locally(settings | {"num-server-rounds": 6}, workers=0, stream=False)
    scraper.over.set()
    scraper.join()
    assert 1 <= scraper.seen["fedpsa_version"] <= 6
    assert scraper.seen["fedpsa_uploads_total"] >= 1
    run_locally(settings | {"num-server-rounds": 9, "resume": "true"}, workers=0, stream=False)

    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedpsa")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (folder / "mlflow-run").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["num-server-rounds"] == "6"  # as it began
    assert run.data.metrics["evaluate-server/accuracy"] == pytest.approx(summary["accuracy"])
    steps = {item.step for item in client.get_metric_history(run.info.run_id, "upload/staleness")}
    assert len(steps) > 1
    wandb_id = (folder / "wandb-run").read_text().strip()
    assert len(list((folder / "wandb").glob(f"offline-run-*/run-{wandb_id}.wandb"))) == 2
