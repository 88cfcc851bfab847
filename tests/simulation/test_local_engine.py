"""The local engine: a grid that executes the ClientApp in worker processes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpsa_strategy.wire.error_codes import CLIENT_APP_CRASHED
from simulation import cli
from simulation.engines.flower.process_table import list_processes
from simulation.engines.local import pool
from simulation.engines.local.grid import LocalGrid
from simulation.engines.local.run import run_locally
from simulation.errors import LaunchFailed, RunFailed

# Nodes that add up what they are sent, and misbehave when they are told to.
CLIENT = """
import contextlib, os, signal, subprocess, time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    config = ConfigRecord({**context.node_config, **context.run_config})
    return Message(RecordDict({"config": config}), reply_to=message)


@app.train()
def train(message, context):
    config = message.content["config"]
    memory = context.state.setdefault("memory", MetricRecord({"sum": 0, "count": 0}))
    memory["sum"] += config["value"]
    memory["count"] += 1
    if once := config.get("die-once"):
        with contextlib.suppress(FileExistsError):  # of two workers one dies
            Path(once).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    if config.get("die"):
        os._exit(7)
    if config.get("raise"):
        raise ZeroDivisionError("as told")
    if config.get("none"):
        return None
    if config.get("child"):
        subprocess.Popen(["sleep", "60"])
    time.sleep(config.get("seconds", 0.0))
    if "arrays" in message.content:
        context.state["arrays"] = message.content["arrays"]
    kept = context.state.array_records.get("arrays", ArrayRecord())
    if "reply-size" in config:
        kept = ArrayRecord({"new": Array(np.full(config["reply-size"], config["value"]))})
    config["value"] = -1
    metrics = MetricRecord(dict(memory))
    place = ConfigRecord({"pid": os.getpid()})
    content = RecordDict({"metrics": metrics, "arrays": kept, "place": place})
    return Message(content, reply_to=message)
"""


@pytest.fixture(scope="module")
def client_app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    (folder / "adding_client.py").write_text(CLIENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "adding_client:app"


def train_message(node_id, value=1, **config):
    record = ConfigRecord({"value": value, **config})
    return Message(RecordDict({"config": record}), node_id, "train")


def answers(replies):
    return {
        reply.metadata.src_node_id: tuple(reply.content["metrics"].values()) for reply in replies
    }


def alive(pids):
    return {p.pid for p in list_processes() if not p.zombie} & set(pids)


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.engine
@pytest.mark.parametrize("workers", [0, 2])
def test_nodes_know_who_they_are_and_remember(client_app, workers, marked):
    with LocalGrid(3, {"key": "text"}, workers=workers, app=client_app) as grid:
        nodes = sorted(grid.get_node_ids())
        assert not set(nodes) & set(range(3))
        queries = [Message(RecordDict(), node, "query") for node in nodes]
        configs = [reply.content["config"] for reply in grid.send_and_receive(queries)]
        assert sorted(config["partition-id"] for config in configs) == [0, 1, 2]
        assert all(c["num-partitions"] == 3 and c["key"] == "text" for c in configs)

        # Two messages to one node are executed one after the other.
        first, second, other = nodes
        messages = [train_message(first, 1), train_message(first, 2), train_message(second, 10)]
        replies = sorted(
            grid.send_and_receive(messages), key=lambda r: int(r.metadata.reply_to_message_id)
        )
        assert [tuple(r.content["metrics"].values()) for r in replies] == [(1, 1), (3, 2), (10, 1)]
        # What a ClientApp writes into its message does not come back to the server.
        assert messages[0].content["config"]["value"] == 1

        (failed,) = grid.send_and_receive([train_message(first, 5, **{"raise": True})])
        assert failed.has_error()
        assert failed.error.code == 2
        assert failed.error.reason.rstrip().endswith("ZeroDivisionError: as told")
        assert "Traceback" in failed.error.reason
        (nothing,) = grid.send_and_receive([train_message(other, 5, none=True)])
        assert "returned a NoneType, not a Message" in nothing.error.reason
        # A message that failed leaves no trace in the node's state.
        assert answers(grid.send_and_receive([train_message(n) for n in nodes])) == {
            first: (4, 3),
            second: (11, 2),
            other: (1, 1),
        }
        assert grid.push_messages([train_message(1)]) == []
        pids = grid.worker_pids
        assert len(pids) == workers
    assert not alive(pids)
    assert not marked()
    with pytest.raises(RuntimeError, match="closed"):
        grid.push_messages([train_message(first)])


@pytest.mark.engine
def test_a_worker_that_dies_is_replaced(client_app, tmp_path):
    def run(grid, **config):
        rounds = []
        for value in (1, 2, 3):
            messages = [train_message(n, value * n, **config) for n in grid.get_node_ids()]
            rounds.append(answers(grid.send_and_receive(messages)))
        return rounds

    with LocalGrid(4, {}, workers=0, app=client_app) as grid:
        expected = run(grid)
    with LocalGrid(4, {}, workers=2, app=client_app) as grid:
        before = grid.worker_pids
        # In the middle of a task, with another one waiting behind it.
        assert run(grid, **{"die-once": str(tmp_path / "died")}) == expected
        assert len(set(before) & set(grid.worker_pids)) == 1

        # While it has nothing to do.
        idle = grid.worker_pids[0]
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: idle not in grid.worker_pids)

        first, *others = sorted(grid.get_node_ids())
        messages = [train_message(first, die=True), *(train_message(n, 0) for n in others)]
        replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(messages)}
        error = replies.pop(first).error
        assert error.code == 8
        assert "exit code 7, in 3 attempts" in error.reason
        assert answers(replies.values()) == {n: (6 * n, 4) for n in others}
        pids = grid.worker_pids
    assert not alive(before + pids)


@pytest.mark.engine
def test_the_server_trains_beside_its_workers(client_app):
    pids = set()
    with LocalGrid(6, {}, workers=1, app=client_app, train_here=True) as grid:
        nodes = sorted(grid.get_node_ids())
        for turn in range(1, 600):  # until the worker has started
            messages = [train_message(node, node, seconds=0.02) for node in nodes]
            replies = list(grid.send_and_receive(messages))
            # A node remembers, wherever its last message was executed.
            assert answers(replies) == {node: (turn * node, turn) for node in nodes}
            pids |= {reply.content["place"]["pid"] for reply in replies}
            if len(pids) == 2:
                break
        assert pids == {os.getpid(), *grid.worker_pids}
        assert not grid.wait(0.01)


@pytest.mark.engine
def test_waiting_ends_when_a_reply_arrives(client_app):
    with LocalGrid(2, {}, workers=1, app=client_app) as grid:
        first, second = sorted(grid.get_node_ids())
        assert not grid.wait(0.01)
        (abandoned,) = grid.push_messages([train_message(first)])
        assert grid.wait(60)
        assert list(grid.pull_messages([])) == []
        # A reply that nobody asks for does not keep the others from waiting.
        assert not grid.wait(0.01)
        (wanted,) = grid.push_messages([train_message(second, seconds=0.2)])
        started = time.monotonic()
        assert grid.wait(60)
        assert 0.1 < time.monotonic() - started < 30
        (reply,) = grid.pull_messages([wanted])
        assert reply.metadata.reply_to_message_id == wanted
        assert len(list(grid.pull_messages([abandoned, wanted]))) == 1
        assert list(grid.send_and_receive([train_message(first, seconds=60.0)], timeout=0.1)) == []
        pids = grid.worker_pids
    assert not alive(pids)


@pytest.mark.engine
@pytest.mark.parametrize("size", [5_000, 500_000])
def test_a_busy_worker_and_its_server_never_wait_for_each_other(client_app, size):
    # A message that waits at the worker, while its reply to another fills the way back.
    with LocalGrid(6, {}, workers=1, app=client_app) as grid:
        messages = [
            train_message(node, node, **{"reply-size": 500_000, "seconds": 0.02})
            for node in sorted(grid.get_node_ids())
        ]
        for message in messages:
            array = Array(np.full(size, message.metadata.dst_node_id, np.float64))
            message.content["arrays"] = ArrayRecord({"big": array})
        replies = list(grid.send_and_receive(messages, timeout=120))
        assert len(replies) == len(messages)
        for reply in replies:
            values = reply.content["arrays"]["new"].numpy()
            assert values.tolist() == [reply.metadata.src_node_id] * 500_000


@pytest.mark.engine
def test_a_crash_is_not_blamed_on_a_job_that_was_done(client_app):
    with LocalGrid(5, {}, workers=1, app=client_app) as grid:
        nodes = sorted(grid.get_node_ids())
        assert list(grid.send_and_receive([train_message(nodes[0])]))
        first_pids = grid.worker_pids
        messages = [train_message(node, seconds=0.3) for node in nodes]
        messages[1] = train_message(nodes[1], die=True)
        replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}
    assert replies[nodes[1]].error.code == CLIENT_APP_CRASHED
    # Else the first job would have been done again, by another worker.
    assert replies[nodes[0]].content["place"]["pid"] == first_pids[0]
    assert not any(replies[node].has_error() for node in nodes if node != nodes[1])


@pytest.mark.engine
@pytest.mark.parametrize(
    ("workers", "messages", "expected"),
    [(1, 1, 1), (1, 2, 2), (1, 5, 2), (2, 3, 2), (2, 4, 3), (2, 5, 4), (2, 9, 4)],
)
def test_busy_workers_have_their_next_jobs_if_enough_are_left_for_others(
    client_app, workers, messages, expected, monkeypatch
):
    sent = []
    send = pool._Worker.send

    def noted(worker, job, state):
        sent.append(job.node_id)
        send(worker, job, state)

    monkeypatch.setattr(pool._Worker, "send", noted)
    with LocalGrid(messages, {}, workers=workers, app=client_app) as grid:
        nodes = sorted(grid.get_node_ids())
        processes = grid._pool._workers
        wait_until(lambda: grid.worker_pids and all(each.ready for each in processes), 60)
        grid.push_messages([train_message(node, seconds=60.0) for node in nodes])
        assert not grid.wait(0.2)
        assert sent == nodes[:expected]


@pytest.mark.engine
@pytest.mark.parametrize("workers", [0, 1])
def test_messages_are_executed_in_the_order_in_which_replies_are_pulled(client_app, workers):
    with LocalGrid(4, {}, workers=workers, app=client_app) as grid:
        nodes = sorted(grid.get_node_ids())
        pushed = list(grid.push_messages([train_message(node) for node in nodes]))
        # Workers take longer to start than this: nothing is at work yet.
        order = pushed[::-1]
        arrived = []
        while len(arrived) < len(order):
            missing = [key for key in order if key not in arrived]
            replies = list(grid.pull_messages(missing))
            assert workers or len(replies) == 1
            arrived += [reply.metadata.reply_to_message_id for reply in replies]
            if not replies:
                assert grid.wait(60)
        assert arrived == order


@pytest.mark.engine
@pytest.mark.parametrize("reference", ["no_such_module:app", "adding_client:train"])
def test_an_app_that_cannot_be_loaded_ends_the_run(client_app, reference):
    with (
        LocalGrid(2, {}, workers=1, app=reference) as grid,
        pytest.raises(RunFailed, match=f"client app {reference} cannot be loaded"),
    ):
        grid.wait(60)


@pytest.mark.engine
def test_workers_do_not_outlive_a_killed_server(client_app, marked):
    code = (
        "import sys, time; sys.path[:] = eval(sys.argv[1])\n"
        "from flwr.app import ConfigRecord, Message, RecordDict\n"
        "from simulation.engines.local.grid import LocalGrid\n"
        "grid = LocalGrid(2, {}, workers=2, app='adding_client:app')\n"
        "config = ConfigRecord({'value': 1, 'seconds': 60.0, 'child': True})\n"
        "grid.push_messages([Message(RecordDict({'config': config}), 1000, 'train')])\n"
        "grid.send_and_receive([Message(RecordDict(), 1001, 'query')])\n"
        "print(grid.worker_pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code, repr(sys.path)], stdout=subprocess.PIPE, text=True
    )
    pids = json.loads(server.stdout.readline())
    wait_until(lambda: len(marked()) == 4)  # the server, its workers, and what one has started
    assert alive(pids) == set(pids)
    server.kill()
    server.communicate()
    wait_until(lambda: not marked(), 10)


DIGITS = {
    "num-clients": 3,
    "num-server-rounds": 3,
    "buffer-size": 2,
    "queue-size": 3,
    "max-in-flight": 2,
    "lr": 0.1,
    "evaluate-every": 2,
    "calibration-transport": "arrays",
}


@pytest.mark.engine
def test_the_number_of_workers_does_not_change_the_model(tmp_path, marked):
    hashes = set()
    for workers, here in ((0, False), (1, False), (1, True)):
        run_dir = tmp_path / f"{workers}-{here}"
        places = {"run-dir": str(run_dir), "cache-dir": str(tmp_path / "cache")}
        summary = run_locally(DIGITS | places, workers=workers, train_here=here, stream=False)
        assert not marked()
        assert summary["uploads"] == 6
        assert summary == json.loads((run_dir / "summary.json").read_text())
        hashes.add(summary["model_sha256"])
    assert len(hashes) == 1


@pytest.mark.engine
@pytest.mark.parametrize("strategy", ["fedpsa", "fedpac"])
def test_half_precision_updates_give_the_same_model_in_every_process(strategy, tmp_path):
    found = {}
    for update_dtype, workers in (("float32", 0), ("bfloat16", 0), ("bfloat16", 1)):
        places = {
            "run-dir": str(tmp_path / f"{update_dtype}-{workers}"),
            "cache-dir": str(tmp_path / "cache"),
        }
        config = DIGITS | places | {"update-dtype": update_dtype, "strategy": strategy}
        found[update_dtype, workers] = run_locally(config, workers=workers, stream=False)
    assert not any(summary["rejected"] for summary in found.values())
    hashes = {key: summary["model_sha256"] for key, summary in found.items()}
    assert hashes["bfloat16", 0] == hashes["bfloat16", 1] != hashes["float32", 0]
    assert found["bfloat16", 0]["bytes_up"] < 0.7 * found["float32", 0]["bytes_up"]


def test_what_cannot_run_is_said_in_one_sentence(tmp_path, capsys):
    with pytest.raises(LaunchFailed, match=r"lr = -1\.0: must be above 0"):
        run_locally({"lr": -1.0}, workers=0)
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(RunFailed, match=r"The run failed: FileExistsError: .* already holds a run"):
        run_locally({"run-dir": str(tmp_path)}, workers=0, stream=False)
    with pytest.raises(ValueError, match="workers is -1"):
        LocalGrid(1, {}, workers=-1)
    local = ["run", "--engine", "local"]
    assert cli.main([*local, "--workers", "-1"]) == 2
    assert "-1 is not in the range" in capsys.readouterr().err
