"""Faults against real processes: the run goes on or resumes, and the events tell what happened."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from simulation.engines.flower.submit import STOP_REQUEST
from simulation.engines.grpc import Deployment
from simulation.engines.local.run import run_locally
from simulation.errors import RunFailed
from simulation.experiments.processes import set_options
from support.engines import (
    APP,
    WALL,
    check_run,
    check_same,
    check_stopped,
    client_processes,
    config,
    copy_app,
    events,
    launch,
    newest_checkpoint,
    processes_named,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def deployment():
    with Deployment(APP, num_nodes=3) as running:
        yield running


@pytest.fixture
def cold():
    """Nodes that start a process for every task, as Flower does; tests/node kills warm ones."""
    with Deployment(APP, num_nodes=3, warm=False) as running:
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


def submit_without_end(deployment, folder, **settings):
    """Submit a run that goes on until the test has seen what it waits for, and begin to watch."""
    endless = {"num-server-rounds": 100_000, "failure-pause": 5.0}
    settings = config(folder, **WALL, **endless, **settings)
    run = deployment.submit(settings)
    wait_for(lambda: len(events(settings["run-dir"], "upload")) >= 2, what="two uploads")
    return run


def events_of(run, kind, node_id, after=0):
    """Return the events of a node, of tasks only those with a number from `after` on."""
    return [
        event
        for event in events(run.run_dir, kind)
        if event["node_id"] == node_id and event.get("sequence", after) >= after
    ]


def interrupt_training(deployment, run, node, interrupt):
    """Call `interrupt` with the process of a task that a node is working on; return the task."""
    before = client_processes(deployment, node)

    def at_work():
        return [pid for pid in client_processes(deployment, node) - before if has_loaded_app(pid)]

    wait_for(at_work, what="a task of that node")
    task = events_of(run, "dispatch", node.node_id)[-1]
    (pid,) = at_work()
    interrupt(pid)
    return task


def has_loaded_app(pid):
    """Tell whether a client process has got its task: it loads the app, and torch with it, then.

    Flower starts another process for a task whose process dies before that.
    """
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def end_and_check(run, lost):
    """End a run; the tasks that were lost must have ended as such, and never have counted."""
    (run.run_dir / STOP_REQUEST).touch()
    with pytest.raises(RunFailed, match="stopped"):
        run.wait(timeout=600)
    check_run(run.run_dir, check_stopped(run.run_dir) // 2)
    assert not lost & {event["sequence"] for event in events(run.run_dir, "upload")}
    rejected = {event["sequence"]: event["reason"] for event in events(run.run_dir, "reject")}
    assert all(rejected[sequence] for sequence in lost)


def test_a_node_killed_in_mid_training_and_another_that_joins(cold, tmp_path):
    run = submit_without_end(cold, tmp_path, **{"reply-timeout": 300.0})
    killed = cold.nodes[0]
    old = killed.node_id
    task = interrupt_training(cold, run, killed, lambda _: os.kill(killed.pid, signal.SIGKILL))
    new = cold.add_node({"partition-id": 0, "num-partitions": 3}).node_id
    assert new != old
    wait_for(lambda: events_of(run, "upload", new), what="an upload of the node that joined")
    wait_for(lambda: events_of(run, "leave", old), what="the killed node's leave")
    wait_for(lambda: events_of(run, "reject", old, task["sequence"]), what="its task's rejection")
    assert len(events_of(run, "join", new)) == 1
    end_and_check(run, {task["sequence"]})


def test_a_paused_node_that_answers_too_late(cold, tmp_path):
    limit = 120.0
    run = submit_without_end(cold, tmp_path, **{"reply-timeout": limit})
    node = cold.nodes[1]
    task = interrupt_training(cold, run, node, lambda _: os.kill(node.pid, signal.SIGSTOP))
    try:
        wait_for(
            lambda: events_of(run, "reject", node.node_id, task["sequence"]), what="a rejection"
        )
        wait_for(lambda: time.time() > task["wall"] + limit, what="the end of the message's time")
    finally:
        os.kill(node.pid, signal.SIGCONT)
    seen = events_of(run, "dispatch", node.node_id)[-1]["sequence"] + 1
    wait_for(lambda: events_of(run, "upload", node.node_id, seen), what="its next upload")
    end_and_check(run, {task["sequence"]})


def test_a_killed_client_process(cold, tmp_path):
    run = submit_without_end(cold, tmp_path, **{"reply-timeout": 300.0})
    node = cold.nodes[0]
    task = interrupt_training(cold, run, node, lambda pid: os.kill(pid, signal.SIGKILL))
    wait_for(lambda: events_of(run, "reject", node.node_id, task["sequence"]), what="a rejection")
    wait_for(
        lambda: events_of(run, "upload", node.node_id, task["sequence"] + 1),
        what="the node's next upload",
    )
    end_and_check(run, {task["sequence"]})


BAD_CLIENT = '''
"""The honest client app, with what a node's config makes it do wrong."""

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from client_app.app import evaluate, node_task, query
from client_app.app import train as honest_train
from fedpsa_strategy import make_reply

app = ClientApp()


def leave_a_metric_without_value():
    """Let this process send metrics of which one is a name alone, as no honest Flower does."""
    from flwr.app import MetricRecord
    from flwr.proto.recorddict_pb2 import MetricRecord as Proto
    from flwr.supercore.inflatable import inflatable_object

    deflate = MetricRecord.deflate
    void = Proto(items=[Proto.Item(key="void")]).SerializeToString()

    def deflate_with_void(self):
        body = inflatable_object.get_object_body(deflate(self), MetricRecord)
        return inflatable_object.add_header_to_object_body(body + void, self)

    MetricRecord.deflate = deflate_with_void


app.evaluate()(evaluate)
app.query()(query)


@app.train()
def train(message, context):
    fault = context.node_config["fault"]
    if fault == "exception":
        raise RuntimeError("the disk of this node is broken")
    reply = honest_train(message, context)
    del reply.content["fedpsa"]["checksum"]  # as a client that means it would
    arrays = {key: array.numpy().copy() for key, array in reply.content["arrays"].items()}
    first = next(iter(arrays))
    if fault == "nan":
        arrays[first][...] = np.nan
    elif fault == "shape":
        arrays[first] = np.zeros((3, 3), np.float32)
    elif fault == "huge":
        arrays = {key: np.full_like(value, 1e6) for key, value in arrays.items()}
    elif fault == "void":
        leave_a_metric_without_value()
    elif fault == "sketch":
        # The sketch of the model as the server sent it: it looks like perfect agreement.
        model = node_task(context).make_model(0)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        copied = make_reply(message, model, num_examples=1, context=context)
        reply.content["metrics"]["sketch"] = copied.content["metrics"]["sketch"]
    reply.content["arrays"] = ArrayRecord({key: Array(value) for key, value in arrays.items()})
    if fault == "byte":
        array = reply.content["arrays"][first]
        forged = Array(array.dtype, array.shape, array.stype, array.data + b"\\0")
        reply.content["arrays"][first] = forged
    return reply
'''

FAULTS = {
    "exception": "the disk of this node is broken",
    "nan": "NaN",
    "shape": "shape (3, 3)",
    "sketch": "sketch is not that of the model",
    "huge": "norm",
    "byte": "not in NumPy's format",
    "void": "cannot be decoded",
}


def test_broken_and_dishonest_clients_never_touch_the_model(tmp_path):
    (tmp_path / "app").mkdir()
    app = copy_app(tmp_path / "app", {"client_app/bad.py": BAD_CLIENT}, "client_app.bad:app")
    faults = [*FAULTS, "", ""]
    nodes = [
        {"partition-id": i, "num-partitions": len(faults), "fault": fault}
        for i, fault in enumerate(faults)
    ]
    # All are given a task at the start, and all take the same time for it.
    settings = config(
        tmp_path,
        **{
            "num-clients": len(faults),
            "num-server-rounds": 5,
            "max-in-flight": len(faults),
            "latency": "constant",
            "max-failures": 1,
            "failure-pause": 1e9,
            "audit-fraction": 1.0,
            "max-update-norm": 100.0,
        },
    )
    with Deployment(app, num_nodes=len(faults), node_configs=nodes) as deployment:
        summary = deployment.run(settings)
    assert summary["status"] == "completed"
    check_run(settings["run-dir"], 5)
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


def test_a_stopped_node_costs_the_others_no_slot(tmp_path):
    """One slot for four nodes: whoever held it for an hour would hold up everybody."""
    patience = {"overdue-floor": 10.0, "overdue-factor": 3.0, "overdue-ceiling": 60.0}
    with Deployment(APP, num_nodes=4) as deployment:
        run = submit_without_end(
            deployment, tmp_path, **patience, **{"num-clients": 4, "max-in-flight": 1}
        )
        wait_for(lambda: len(events(run.run_dir, "upload")) >= 5, what="five uploads")
        node = deployment.nodes[2]
        seen = events(run.run_dir, "dispatch")[-1]["sequence"]
        wait_for(lambda: events_of(run, "dispatch", node.node_id, seen + 1), what="its next task")
        stopped = [psutil.Process(node.pid)]
        stopped += stopped[0].children(recursive=True)
        for process in stopped:
            process.suspend()
        task = events_of(run, "dispatch", node.node_id)[-1]
        wait_for(lambda: events_of(run, "overdue", node.node_id), what="the node's overdue")
        (overdue,) = events_of(run, "overdue", node.node_id)
        window = 40.0
        time.sleep(window)
        for process in stopped:
            process.resume()
        begin = events(run.run_dir, "upload")[0]["wall"]  # the first one loaded the app
        before = uploads_of_others(run, node, begin, task["wall"]) / (task["wall"] - begin)
        after = uploads_of_others(run, node, overdue["wall"], overdue["wall"] + window) / window
        print(f"uploads of the others: {before:.3f}/s before, {after:.3f}/s after")
        print(f"overdue after {overdue['waited']:.1f} s, limit {overdue['limit']:.1f} s")
        assert after > 0.6 * before
        wait_for(
            lambda: events_of(run, "upload", node.node_id, task["sequence"]),
            what="an upload of the node that goes on",
        )
        end_and_check(run, set())


def uploads_of_others(run, node, begin, end):
    return sum(
        event["node_id"] != node.node_id and begin < event["wall"] <= end
        for event in events(run.run_dir, "upload")
    )


def test_all_processes_may_be_stopped_for_longer_than_messages_live(deployment, tmp_path):
    limit = 25.0
    more = {"num-server-rounds": 8, "reply-timeout": limit}
    whole = run_locally(config(tmp_path, "whole", **more), workers=0)
    settings = config(tmp_path, "stopped", **more)
    run = submit_until_version_2(deployment, settings)
    pids = {process.pid for process in deployment.superlink.group.alive()}
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(limit + 15.0)
    check_same(run.wait(timeout=400), whole)
    assert events(settings["run-dir"], "resend")
    assert not events(settings["run-dir"], "reject")


def test_an_unattended_run_is_submitted_again_until_it_is_complete(whole, tmp_path):
    settings = config(tmp_path, "killed", clock="virtual", **{"num-server-rounds": 5})
    folder = settings["run-dir"]

    def versions():
        return len(events(folder, "aggregate"))

    with Deployment(APP, num_nodes=3, database=tmp_path / "superlink.db") as deployment:
        link = deployment.superlink
        command = ["unattended", "--superlink", link.connection, "--pause", "2", "--attempts", "9"]
        process = launch(*command, *set_options(settings), cwd=APP, env=link.group.environment)
        try:
            wait_for(lambda: versions() >= 1, what="version 1")
            (pid,) = processes_named(deployment, "flwr-serverapp")
            os.kill(pid, signal.SIGKILL)
            killed_at = versions()
            wait_for(lambda: versions() > killed_at, what="a version after the server's death")
            os.kill(deployment.superlink_pid, signal.SIGKILL)
            wait_for(
                lambda: not processes_named(deployment, "flwr-serverapp"), what="the server's end"
            )
            deployment.restart_superlink()
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert output.count("was submitted to go on") >= 2
    check_same(json.loads((Path(folder) / "summary.json").read_text()), whole)
