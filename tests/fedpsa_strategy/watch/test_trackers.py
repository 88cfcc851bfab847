"""MLflow and W&B for real, without a network: a SQLite file and W&B's offline mode."""

import builtins
import json
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fedpsa_strategy.watch.mlflow import MLflowLog
from fedpsa_strategy.watch.wandb import WandbLog
from support.events import aggregated, evaluated, started, uploaded


def run_events(log, offset=0.0):
    log(started(offset, version=int(offset)))
    log(uploaded(offset + 20.0, staleness=3, kappa=0.5))
    log(aggregated(offset + 20.0, 1, 1, effective_number=1.5))
    # What is no number is left out.
    log(evaluated(offset + 30.0, accuracy=0.25, loss=float("nan")))


# --- MLflow -------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_uri(tmp_path):
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path}/mlflow.db"


def history(uri, run_id, name):
    from mlflow import MlflowClient

    found = MlflowClient(uri).get_metric_history(run_id, name)
    return sorted((item.step, item.value) for item in found)


def test_mlflow_gets_settings_numbers_and_the_end_and_a_resumed_run_goes_on(tmp_path, mlflow_uri):
    from mlflow import MlflowClient

    id_file = tmp_path / "mlflow-run"
    config = {"strategy": "fedpsa", "lr": 0.01, "long": "x" * 9000}
    with MLflowLog(mlflow_uri, "first", config, id_file=id_file) as log:
        run_events(log)
        run_id = log.run_id
    run = MlflowClient(mlflow_uri).get_run(run_id)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["strategy"] == "fedpsa"
    assert len(run.data.params["long"]) == 500
    assert run.data.metrics == {
        "upload/staleness": 3.0,
        "upload/kappa": 0.5,
        "version/effective_number": 1.5,
        "evaluate-server/accuracy": 0.25,
    }
    assert history(mlflow_uri, run_id, "upload/kappa") == [(20, 0.5)]

    log = MLflowLog(mlflow_uri, "second", config | {"lr": 0.1}, id_file=id_file)
    assert log.run_id == run_id
    run_events(log, offset=100.0)
    log.__exit__(RuntimeError, RuntimeError("broken"), None)
    assert history(mlflow_uri, run_id, "upload/kappa") == [(20, 0.5), (120, 0.5)]
    assert MlflowClient(mlflow_uri).get_run(run_id).info.status == "FAILED"


def test_an_mlflow_that_fails_in_the_middle_stops_nobody(tmp_path, mlflow_uri, caplog):
    log = MLflowLog(mlflow_uri, "run")
    real, calls = log._client.log_batch, []

    def fail_once(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError("no route to host\nand more")
        return real(*arguments, **options)

    log._client.log_batch = fail_once
    run_events(log)
    while not calls:  # the thread's own rhythm
        log._over.wait(0.05)
    log.close()
    assert "trying again: no route to host" in caplog.text
    assert history(mlflow_uri, log.run_id, "upload/kappa") == [(20, 0.5)]


def test_an_mlflow_that_does_not_take_the_run_is_named(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(ConnectionError, match=f"MLflow at '{address}' does not take the run"):
            MLflowLog(address, "run")
    finally:
        server.shutdown()
        server.server_close()


# --- W&B ----------------------------------------------------------------------------------------


def test_wandb_writes_offline_runs(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    id_file = tmp_path / "wandb-run"
    with WandbLog("fedpsa", "first", tmp_path, {"lr": 0.01}, id_file=id_file) as log:
        run_events(log)
        run_id = log._run.id
    assert id_file.read_text().strip() == run_id
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    give_up = time.monotonic() + 20
    while not (found := read_wandb(file))[0]:  # W&B's process may still be writing it
        assert time.monotonic() < give_up
        time.sleep(0.02)
    run, rows = found
    assert (run.project, run.display_name, run.run_id) == ("fedpsa", "first", run_id)
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["lr"] == 0.01
    numbers = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
    assert numbers == [
        {"time": 20.0, "upload/staleness": 3.0, "upload/kappa": 0.5},
        {"time": 20.0, "version/effective_number": 1.5},
        {"time": 30.0, "evaluate-server/accuracy": 0.25},
    ]
    with WandbLog("fedpsa", "first", tmp_path, id_file=id_file) as log:  # resumed
        assert log._run.id == run_id


def read_wandb(path):
    """Read W&B's file: a log of LevelDB's format, with a protocol buffer in each record."""
    from wandb.proto import wandb_internal_pb2

    run, rows = None, []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
        elif record.HasField("history"):
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    return run, rows


def leveldb_records(content, block=32 * 1024, header=7):
    place, record = header, b""  # W&B's own mark comes first
    while place < len(content):
        if block - place % block < header:  # the rest of a block is filled up
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + header])
        record += content[place + header : place + header + size]
        place += header + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


# --- Both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package", "make"),
    [
        ("mlflow", "mlflow-skinny", lambda folder: MLflowLog("sqlite:////x.db", "run")),
        ("wandb", "wandb", lambda folder: WandbLog("project", "run", folder)),
    ],
)
def test_without_the_package_the_error_names_the_command(
    name, package, make, tmp_path, monkeypatch
):
    original = builtins.__import__

    def refuse(module, *arguments, **options):
        if module.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return original(module, *arguments, **options)

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []
