"""What tests against real processes share: settings, waiting, and what must always hold."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

from fedpsa_strategy.server.checkpoint import CheckpointStore
from simulation.experiments.processes import set_options

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
    # A busy machine needs minutes for a process that does almost nothing.
    "node-timeout": 600.0,
}
WALL = {"clock": "wall", "min-nodes": 2}

# Every third version is saved, so that almost always something has happened since.
ROUNDS = {
    "num-server-rounds": 90,
    "num-clients": 6,
    "evaluate-every": 20,
    "checkpoint-versions": 3,
    "checkpoint-seconds": 0.0,
}

RUN_AND_DIE = str(Path(__file__).with_name("run_and_die.py"))


def config(folder, name="run", **settings):
    """Return a run config whose files are all below `folder`."""
    return SMALL | {"run-dir": str(folder / name), "cache-dir": str(folder / "cache")} | settings


def copy_app(folder, files, client_app="client_app.app:app"):
    """Copy the app to `folder`, with more files in it and perhaps another ClientApp."""
    for package in ("fedpsa_strategy", "server_app", "client_app", "task"):
        ignore = shutil.ignore_patterns("__pycache__", "dashboard")
        shutil.copytree(APP / package, folder / package, ignore=ignore)
    text = (APP / "pyproject.toml").read_text()
    assert '"client_app.app:app"' in text
    shutil.copyfile(APP / "LICENSE", folder / "LICENSE")  # which its bundle must hold
    (folder / "pyproject.toml").write_text(text.replace('"client_app.app:app"', f'"{client_app}"'))
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def events(run_dir, kind=None):
    path = Path(run_dir) / "events.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if kind in (None, line["event"])]


def uploads(run_dir):
    """Return what was uploaded, without what differs between two runs of the same settings."""
    other = ("wall", "node_id", "metrics", "crc32")
    return [
        {key: value for key, value in event.items() if key not in other}
        for event in events(run_dir, "upload")
    ]


def newest_checkpoint(run_dir):
    return CheckpointStore(Path(run_dir) / "checkpoints").load_newest()


def check_stopped(run_dir):
    """Check what a stop has to leave behind, and return how many uploads there were."""
    summary = json.loads((Path(run_dir) / "summary.json").read_text())
    assert summary["status"] == "stopped"
    num_uploads = len(events(run_dir, "upload"))
    assert newest_checkpoint(run_dir)["uploads"] == summary["uploads"] == num_uploads
    return num_uploads


def wait_for(condition, timeout=600.0, what="the condition"):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:g} s"
        time.sleep(0.2)


def launch(*words, **options):
    """Start a command of the simulation; what it prints can be read, unless `options` say else."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", "simulation", *words], **pipes | options)


def assert_no_upload_twice(run_dir, more_than=0):
    sequences = [event["sequence"] for event in events(run_dir, "upload")]
    assert len(sequences) == len(set(sequences)) > more_than


def num_uploads(folder):
    """Return how many uploads there are in all cells of an experiment."""
    paths = folder.glob("runs/cells/*/events.jsonl")
    return sum(path.read_bytes().count(b'"event": "upload"') for path in paths)


def processes_named(deployment, *words):
    """Pids of this deployment's processes whose command line holds all these words."""
    found = []
    for process in deployment.superlink.group.alive():
        with contextlib.suppress(psutil.Error):
            command = " ".join(psutil.Process(process.pid).cmdline())
            if all(word in command for word in words):
                found.append(process.pid)
    return found


def client_processes(deployment, node):
    """Pids of the processes in which a node works on its tasks, one each."""
    return set(processes_named(deployment, "flwr-clientapp", f"127.0.0.1:{node.port}"))


def check_run(run_dir, versions):
    """What has to hold after every fault."""
    counted = Counter(event["sequence"] for event in events(run_dir, "upload"))
    assert max(counted.values()) == 1, "an upload counted twice"
    assert [event["version"] for event in events(run_dir, "aggregate")] == list(
        range(1, versions + 1)
    )
    assert len(counted) >= 2 * versions
    model = load_file(Path(run_dir) / "model.safetensors")
    assert all(np.isfinite(array).all() for array in model.values())


def check_same(resumed, whole):
    """What has to hold after an interruption, with the virtual clock."""
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed["uploads"] == whole["uploads"]
    folders = [summary["settings"]["run-dir"] for summary in (resumed, whole)]
    assert uploads(folders[0]) == uploads(folders[1])
    check_run(folders[0], resumed["versions"])


def kill_after(settings, more_uploads, chance=None):
    """Run in a process of its own that is killed a little after it has made so many uploads."""
    delay = (chance or random.Random(0)).uniform(0, 0.01)
    process = subprocess.run(
        [
            *(sys.executable, RUN_AND_DIE, str(more_uploads), str(delay)),
            *("run", "--engine", "local", "--workers", "0", "--quiet", *set_options(settings)),
        ],
        cwd=APP,
        env=os.environ | {"PYTHONPATH": str(APP)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=600,
    )
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def checkpoints(run_dir):
    return sorted((Path(run_dir) / "checkpoints").glob("*.ckpt"))
