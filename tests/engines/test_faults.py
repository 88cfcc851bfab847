"""Faults against real processes: the run goes on or resumes, and the events tell what happened."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
from real_runs import (
    APP,
    WALL,
    check_run,
    check_same,
    check_stopped,
    config,
    copy_app,
    events,
    newest_checkpoint,
    processes_named,
    wait_for,
)

from simulation.errors import RunFailed
from simulation.grpc_engine import Deployment
from simulation.local_engine import run_locally

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def deployment():
    with Deployment(APP, num_nodes=3) as running:
        yield running


@pytest.fixture
def whole(tmp_path):
    """A run that nobody interrupts; the local engine gives the same bits in a few seconds."""
    return run_locally(config(tmp_path, "whole", **{"num-server-rounds": 5}), workers=0)


def submit_until_version_2(deployment, settings):
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "aggregate")) >= 2, what="version 2")
    return run


def test_a_killed_server_app_is_resumed_bit_for_bit(deployment, whole, tmp_path):
    settings = config(tmp_path, "killed", **{"num-server-rounds": 5})
    run = submit_until_version_2(deployment, settings)
    (pid,) = processes_named(deployment, "flwr-serverapp")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunFailed):
        run.wait(timeout=120)
    check_same(deployment.run(settings | {"resume": "true"}), whole)


def test_a_killed_superlink_knows_its_nodes_again_and_the_run_is_resumed(whole, tmp_path):
    settings = config(tmp_path, "killed", **{"num-server-rounds": 5})
    with Deployment(APP, num_nodes=3, database=tmp_path / "superlink.db") as deployment:
        node_ids = deployment.online_node_ids()
        run = submit_until_version_2(deployment, settings)
        os.kill(deployment.superlink_pid, signal.SIGKILL)
        with pytest.raises(RunFailed):
            run.wait(timeout=120)
        wait_for(
            lambda: not processes_named(deployment, "flwr-serverapp"), what="the ServerApp's end"
        )
        check_stopped(settings["run-dir"])  # it saved what it had when it noticed
        deployment.restart_superlink()
        assert deployment.online_node_ids() == node_ids
        assert all(node.running for node in deployment.nodes)
        check_same(deployment.run(settings | {"resume": "true"}), whole)
    joined = [event["node_id"] for event in events(settings["run-dir"], "join")]
    assert len(joined) == 6
    assert set(joined) == node_ids


def test_a_resumed_run_must_keep_its_settings(deployment, tmp_path):
    settings = config(tmp_path, **{"num-server-rounds": 2})
    deployment.run(settings)
    with pytest.raises(RunFailed, match=r"lr was 0\.1, now 0\.2"):
        deployment.run(settings | {"resume": "true", "lr": 0.2})


def test_a_killed_node_and_another_that_joins(deployment, tmp_path):
    settings = config(tmp_path, **WALL, **{"num-server-rounds": 8})
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "upload")) >= 2, what="two uploads")
    os.kill(deployment.nodes[0].pid, signal.SIGKILL)
    deployment.add_node({"partition-id": 0, "num-partitions": 3})
    summary = run.wait(timeout=600)
    check_run(settings["run-dir"], 8)
    assert summary["status"] == "completed"
    assert len(events(settings["run-dir"], "join")) >= 4


def test_a_paused_node_that_answers_too_late(deployment, tmp_path):
    settings = config(tmp_path, **WALL, **{"num-server-rounds": 8, "reply-timeout": 25.0})
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "upload")) >= 2, what="two uploads")
    pid = deployment.nodes[1].pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(40)
    os.kill(pid, signal.SIGCONT)
    summary = run.wait(timeout=600)
    assert summary["status"] == "completed"
    check_run(settings["run-dir"], 8)


def test_a_killed_client_process(deployment, tmp_path):
    settings = config(tmp_path, **WALL, **{"num-server-rounds": 6, "reply-timeout": 60.0})
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "upload")) >= 2, what="two uploads")
    wait_for(lambda: processes_named(deployment, "flwr-clientapp"), what="a client process")
    for pid in processes_named(deployment, "flwr-clientapp")[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    summary = run.wait(timeout=600)
    assert summary["status"] == "completed"
    check_run(settings["run-dir"], 6)


BAD_CLIENT = '''
"""The honest client app, with what a node's config makes it do wrong."""

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from client_app.app import evaluate, node_task, query
from client_app.app import train as honest_train
from fedpsa_strategy import make_reply

app = ClientApp()
app.evaluate()(evaluate)
app.query()(query)


@app.train()
def train(message, context):
    fault = context.node_config["fault"]
    if fault == "exception":
        raise RuntimeError("the disk of this node is broken")
    reply = honest_train(message, context)
    arrays = {key: array.numpy().copy() for key, array in reply.content["arrays"].items()}
    first = next(iter(arrays))
    if fault == "nan":
        arrays[first][...] = np.nan
    elif fault == "shape":
        arrays[first] = np.zeros((3, 3), np.float32)
    elif fault == "huge":
        arrays = {key: np.full_like(value, 1e6) for key, value in arrays.items()}
    elif fault == "sketch":
        # The sketch of the model as the server sent it: it looks like perfect agreement.
        model = node_task(context).make_model(0)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        copied = make_reply(message, model, num_examples=1, context=context)
        reply.content["metrics"]["sketch"] = copied.content["metrics"]["sketch"]
    reply.content["arrays"] = ArrayRecord({key: Array(value) for key, value in arrays.items()})
    return reply
'''

FAULTS = {
    "exception": "the disk of this node is broken",
    "nan": "NaN",
    "shape": "shape (3, 3)",
    "sketch": "sketch is not that of the model",
    "huge": "norm",
}


def test_broken_and_dishonest_clients_never_touch_the_model(tmp_path):
    (tmp_path / "app").mkdir()
    app = copy_app(tmp_path / "app", {"client_app/bad.py": BAD_CLIENT}, "client_app.bad:app")
    faults = [*FAULTS, "", ""]
    nodes = [
        {"partition-id": i, "num-partitions": len(faults), "fault": fault}
        for i, fault in enumerate(faults)
    ]
    # The virtual clock samples clients in an order that the seed fixes: all of them get a turn.
    settings = config(
        tmp_path,
        **{
            "num-clients": len(faults),
            "num-server-rounds": 4,
            "max-in-flight": 4,
            "max-failures": 1,
            "failure-pause": 1e9,
            "audit-fraction": 1.0,
            "max-update-norm": 100.0,
        },
    )
    with Deployment(app, num_nodes=len(faults), node_configs=nodes) as deployment:
        summary = deployment.run(settings)
    assert summary["status"] == "completed"
    check_run(settings["run-dir"], 4)
    honest = {len(FAULTS), len(FAULTS) + 1}
    assert {event["client"] for event in events(settings["run-dir"], "upload")} == honest
    rejections = events(settings["run-dir"], "reject")
    assert sorted(event["client"] for event in rejections) == list(range(len(FAULTS)))
    for event in rejections:
        assert FAULTS[faults[event["client"]]] in event["reason"]
    left_out = [event["client"] for event in events(settings["run-dir"], "quarantine")]
    assert left_out == [event["client"] for event in rejections]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_while_checkpointing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        settings = config(tmp_path, **{"num-server-rounds": 6, "run-dir": str(disk / "run")})
        logs = tmp_path / "logs"
        with Deployment(APP, num_nodes=3, log_dir=logs) as deployment:
            run = deployment.submit(settings)
            wait_for(lambda: events(settings["run-dir"], "aggregate"), what="version 1")
            filler = disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            failed = "could not be written: [Errno 28] No space left on device"
            wait_for(
                lambda: any(failed in path.read_text() for path in logs.glob("run-*.log")),
                what="a checkpoint for which there is no room",
            )
            filler.unlink()
            summary = run.wait(timeout=300)
        assert summary["status"] == "completed"
        check_run(settings["run-dir"], 6)
        assert newest_checkpoint(settings["run-dir"])["version"] == 6
        assert list((disk / "run" / "checkpoints").glob("*.ckpt"))
        assert not list((disk / "run" / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
