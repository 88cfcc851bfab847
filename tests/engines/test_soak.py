"""Ten minutes of the wall clock in which SuperNodes are killed at random and others join.

FEDPSA_SOAK_SECONDS changes how long. What was seen is printed at the end (`pytest -s`).
"""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from simulation.engines.grpc import Deployment
from support.engines import APP, check_run, config, events, processes_named, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = float(os.environ.get("FEDPSA_SOAK_SECONDS", "600"))
NUM_NODES = 4

# Beside a model of 4 MB, one that is not let go of shows in the memory of the server.
TASK = """
import torch
from torch import nn


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 900), nn.ReLU(),
                         nn.Linear(900, 10))


def sample(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator)
    return x, x[:, :10].argmax(dim=1)


def train_data(node_config):
    return sample(node_config["partition-id"])


def test_data():
    return sample(1000)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
MODEL_BYTES = 4 * (65 * 1000 + 1001 * 900 + 901 * 10)


def resident_bytes(pid):
    return psutil.Process(pid).memory_info().rss


def growth(samples):
    """Return by how many bytes memory grew in the second half, by the median of all slopes."""
    times, sizes = np.array(samples[len(samples) // 2 :]).T
    first, second = np.triu_indices(len(times), k=1)
    slopes = (sizes[second] - sizes[first]) / (times[second] - times[first])
    return float(np.median(slopes) * (times[-1] - times[0]))


def test_the_growth_of_a_leak_is_seen():
    flat = [(t, 4e8 + 1e6 * (t % 7)) for t in range(200)]
    assert abs(growth(flat)) < 1e6
    leaking = [(t, size + 1e5 * t) for t, size in flat]
    assert growth(leaking) == pytest.approx(1e7, rel=0.1)


def test_nodes_that_come_and_go_for_a_long_time(tmp_path, monkeypatch):
    (tmp_path / "soak_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = config(
        tmp_path,
        **{
            "task": "soak_task",
            "clock": "wall",
            "num-clients": NUM_NODES,
            "min-nodes": NUM_NODES,
            "max-in-flight": NUM_NODES,
            "virtual-days": 0.0,
            "time-limit": SECONDS,
            "reply-timeout": 180.0,
            "failure-pause": 20.0,
            "checkpoint-versions": 2,
        },
    )
    run_dir = settings["run-dir"]
    chance = random.Random(0)
    samples, killed = [], set()
    with Deployment(APP, num_nodes=NUM_NODES) as deployment:
        run = deployment.submit(settings)
        wait_for(lambda: events(run_dir, "upload"), what="the first upload")
        (server,) = processes_named(deployment, "flwr-serverapp")
        started = time.monotonic()
        next_kill = started + chance.uniform(5, 15)
        while not (Path(run_dir) / "model.safetensors").exists():
            assert psutil.pid_exists(server), run.wait()
            samples.append((time.monotonic() - started, resident_bytes(server)))
            if time.monotonic() >= next_kill:
                node = chance.choice([node for node in deployment.nodes if node.running])
                killed.add(node.node_id)
                os.kill(node.pid, signal.SIGKILL)
                node.process.wait()
                deployment.add_node(node.config)
                next_kill = time.monotonic() + chance.uniform(20, 40)
            time.sleep(1.0)
        summary = run.wait(timeout=120)
    grown = growth(samples)
    uploads = summary["uploads"]
    sizes = [size for _, size in samples]
    joined = {event["node_id"] for event in events(run_dir, "join")}
    print(
        f"\n{samples[-1][0]:.0f} s: {len(killed)} of {len(joined)} nodes killed, "
        f"{uploads} uploads, {summary['versions']} versions, {summary['rejected']} rejected; "
        f"memory of the server {sizes[len(sizes) // 2] / 1e6:.0f} MB at half time, "
        f"{sizes[-1] / 1e6:.0f} MB at the end, {grown / 1e6:+.2f} MB by the slope between, "
        f"one model is {MODEL_BYTES / 1e6:.1f} MB"
    )
    assert summary["status"] == "completed"
    assert summary["versions"] == uploads // settings["buffer-size"]
    check_run(run_dir, summary["versions"])
    # Every task came to one end, or was still at work when the time was over.
    ended = [event["sequence"] for kind in ("upload", "reject") for event in events(run_dir, kind)]
    sent = [event["sequence"] for event in events(run_dir, "dispatch")]
    assert len(ended) == len(set(ended))
    assert set(ended) <= set(sent)
    assert len(sent) == len(set(sent)) <= len(ended) + NUM_NODES
    # Those that were killed are gone, and those that came instead worked.
    assert len(killed) >= SECONDS // 200
    assert len(joined) > NUM_NODES
    workers = {event["node_id"] for event in events(run_dir, "upload")}
    assert workers - {event["node_id"] for event in events(run_dir, "join")[:NUM_NODES]}
    # Keeping one model of each version, or worse of each upload, would be four times this or more.
    late = [e for e in events(run_dir, "aggregate") if e["version"] > summary["versions"] / 2]
    assert grown < max(len(late), 1) * MODEL_BYTES / 4
