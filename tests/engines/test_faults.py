"""Faults against real processes: the run goes on or resumes, and the events tell what happened."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from simulation.errors import RunFailed
from simulation.grpc_engine import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

APP = Path(__file__).parents[2]
SMALL = {
    "num-clients": 3,
    "buffer-size": 2,
    "queue-size": 4,
    "max-in-flight": 2,
    "lr": 0.1,
    "local-epochs": 1,
    "checkpoint-versions": 1,
    "evaluate-every": 1,
}
WALL = {"clock": "wall", "min-nodes": 2, "node-timeout": 90.0}


def events(run_dir, kind=None):
    path = Path(run_dir) / "events.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if kind in (None, line["event"])]


def wait_for(condition, timeout=180.0, what="the condition"):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:g} s"
        time.sleep(0.2)


def processes_named(deployment, name):
    """Pids of this deployment's processes whose command line holds `name`."""
    found = []
    for process in deployment.superlink.group.alive():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            if name.encode() in command:
                found.append(process.pid)
    return found


def check_run(run_dir, versions):
    """What has to hold after every fault."""
    uploads = events(run_dir, "upload")
    counts = Counter(event["sequence"] for event in uploads)
    assert max(counts.values()) == 1, "an upload counted twice"
    assert [event["version"] for event in events(run_dir, "aggregate")] == list(
        range(1, versions + 1)
    )
    assert len(uploads) >= 2 * versions
    model = load_file(Path(run_dir) / "model.safetensors")
    assert all(np.isfinite(array).all() for array in model.values())


@pytest.fixture
def deployment():
    with Deployment(APP, num_nodes=3) as running:
        yield running


def config(tmp_path, name="run", **settings):
    return (
        SMALL | {"run-dir": str(tmp_path / name), "cache-dir": str(tmp_path / "cache")} | settings
    )


def test_a_killed_server_app_is_resumed_bit_for_bit(deployment, tmp_path):
    rounds = {"num-server-rounds": 5}
    whole = deployment.run(config(tmp_path, "whole", **rounds))
    settings = config(tmp_path, "killed", **rounds)
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "aggregate")) >= 2, what="version 2")
    (pid,) = processes_named(deployment, "flwr-serverapp")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunFailed):
        run.wait(timeout=120)
    resumed = deployment.run(settings | {"resume": "true"})
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed["uploads"] == whole["uploads"]
    check_run(settings["run-dir"], 5)
    strip = [
        [
            {k: v for k, v in e.items() if k not in ("wall", "node_id", "metrics")}
            for e in events(d, "upload")
        ]
        for d in (settings["run-dir"], whole["settings"]["run-dir"])
    ]
    assert strip[0] == strip[1]


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

from client_app.app import app as honest


def spoil(message, context, call_next):
    fault = context.node_config.get("fault", "")
    if message.metadata.message_type != "train" or not fault:
        return call_next(message, context)
    if fault == "exception":
        raise RuntimeError("the disk of this node is broken")
    reply = call_next(message, context)
    arrays = {key: array.numpy().copy() for key, array in reply.content["arrays"].items()}
    first = next(iter(arrays))
    if fault == "nan":
        arrays[first][...] = np.nan
    elif fault == "shape":
        arrays[first] = np.zeros((3, 3), np.float32)
    elif fault == "huge":
        arrays = {key: np.full_like(value, 1e6) for key, value in arrays.items()}
    elif fault == "sketch":
        reply.content["metrics"]["sketch"] = [1.0] * 16
    reply.content["arrays"] = ArrayRecord({key: Array(value) for key, value in arrays.items()})
    return reply


app = honest
app._mods = [spoil]
app._registered_funcs = {
    key: (lambda message, context, function=function: spoil(message, context, function))
    for key, function in honest._registered_funcs.items()
}
'''

FAULTS = {
    "exception": "the disk of this node is broken",
    "nan": "NaN",
    "shape": "shape (3, 3)",
    "sketch": "sketch is not that of the model",
    "huge": "norm",
}


def test_broken_and_dishonest_clients_never_touch_the_model(tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    for package in ("fedpsa_strategy", "server_app", "client_app", "task"):
        ignore = shutil.ignore_patterns("__pycache__", "dashboard")
        shutil.copytree(APP / package, app / package, ignore=ignore)
    text = (APP / "pyproject.toml").read_text()
    text = text.replace('"client_app.app:app"', '"client_app.bad:app"')
    (app / "pyproject.toml").write_text(text)
    (app / "client_app" / "bad.py").write_text(BAD_CLIENT)
    faults = [*FAULTS, "", ""]
    nodes = [
        {"partition-id": i, "num-partitions": len(faults), "fault": fault}
        for i, fault in enumerate(faults)
    ]
    settings = config(
        tmp_path,
        **WALL
        | {
            "num-clients": len(faults),
            "min-nodes": len(faults),
            "num-server-rounds": 4,
            "max-in-flight": 4,
            "max-failures": 1,
            "audit-fraction": 1.0,
            "max-update-norm": 100.0,
        },
    )
    with Deployment(app, num_nodes=len(faults), node_configs=nodes) as deployment:
        summary = deployment.run(settings)
    assert summary["status"] == "completed"
    check_run(settings["run-dir"], 4)
    honest = {len(FAULTS), len(FAULTS) + 1}
    assert {event["client"] for event in events(settings["run-dir"], "upload")} <= honest
    rejections = events(settings["run-dir"], "reject")
    for event in rejections:
        assert FAULTS[faults[event["client"]]] in event["reason"]
    assert len({event["client"] for event in rejections}) >= 3
    assert len(events(settings["run-dir"], "quarantine")) == len(rejections)


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
        with Deployment(APP, num_nodes=3, log_dir=tmp_path / "logs") as deployment:
            run = deployment.submit(settings)
            wait_for(lambda: events(settings["run-dir"], "aggregate"), what="version 1")
            filler = disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            time.sleep(20)
            filler.unlink()
            summary = run.wait(timeout=300)
        assert summary["status"] == "completed"
        assert list((disk / "run" / "checkpoints").glob("*.ckpt"))
        assert not list((disk / "run" / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
