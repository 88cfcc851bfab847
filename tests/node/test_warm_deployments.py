"""Warm nodes in real deployments: apps that change, two at once, and processes that are killed."""

import contextlib

import psutil
import pytest

from simulation.engines.flower.submit import submit
from simulation.engines.grpc import Deployment
from simulation.errors import RunFailed
from support.engines import APP, WALL, check_run, client_processes, config, wait_for
from support.tiny_app import write_app

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ORDINARY = "ordinary start"


def warm_processes(node):
    """The keeper and the warm process of a node, and what runs in it."""
    found = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("warm.py") for word in process.cmdline()):
                found.append(process)
    keepers = [process for process in found if process.ppid() == node.pid]
    warm = [process for process in found if process.ppid() in {p.pid for p in keepers}]
    return keepers, warm, [process for process in found if process not in keepers + warm]


def app_with_a_library(folder, number):
    """An app that brings a `fedpsa_strategy` of its own."""
    app = write_app(folder)
    (app / "fedpsa_strategy").mkdir()
    change(app, number)
    client = app / "tinyapp" / "client.py"
    text = client.read_text().replace(
        'context.node_config["partition-id"]', 'NUMBER + context.node_config["partition-id"]'
    )
    client.write_text("from fedpsa_strategy import NUMBER\n" + text)
    return app


def change(app, number):
    (app / "fedpsa_strategy" / "__init__.py").write_text(f"NUMBER = {number}\n")


def test_each_run_has_the_modules_of_its_own_app(tmp_path):
    one, other = (
        app_with_a_library(tmp_path / name, number) for name, number in (("a", 100), ("b", 200))
    )
    with Deployment(one, num_nodes=2, log_dir=tmp_path / "logs") as deployment:
        assert deployment.run({"run-dir": str(tmp_path / "1")})["answers"] == [100, 101]
        change(one, 300)
        assert deployment.run({"run-dir": str(tmp_path / "2")})["answers"] == [300, 301]
        runs = [
            submit(deployment.superlink, app, {"run-dir": str(tmp_path / app.parent.name)})
            for app in (one, other)
        ]
        answers = [run.wait(echo=None)["answers"] for run in runs]
        assert answers == [[300, 301], [200, 201]]
        for node in deployment.nodes:
            log = node.process.tail(lines=100_000)
            assert "fedpsa-node: warm after" in log
            assert ORDINARY not in log


def test_a_run_survives_what_happens_to_warm_processes(tmp_path):
    settings = config(tmp_path, "run", **WALL, **{"num-server-rounds": 12, "max-in-flight": 3})
    with Deployment(APP, num_nodes=3, log_dir=tmp_path / "logs") as deployment:
        first, second, third = deployment.nodes
        _, [warm], _ = wait_for_warm(first)
        warm.kill()  # before any message
        run = deployment.submit(settings)
        wait_for(lambda: client_processes(deployment, second))
        wait_for(lambda: warm_processes(second)[2], what="a client")
        _, [warm], _ = warm_processes(second)
        warm.kill()  # during one
        wait_for(lambda: warm_processes(third)[2], what="a client")
        for client in warm_processes(third)[2]:
            client.kill()
        summary = run.wait(echo=None)
        assert summary["status"] == "completed"
        check_run(settings["run-dir"], 12)
        # Afterwards both are warm again.
        for node in (first, second):
            assert wait_for_warm(node)[1][0].is_running()

        keepers, warm, _ = wait_for_warm(first)
        first.process.process.kill()
        first.process.wait(10)
        _, alive = psutil.wait_procs(keepers + warm, timeout=10)
        assert not alive


MISBEHAVE = """
    import os, sys, threading, time
    match context.run_config["text"]:
        case "raise":
            raise ValueError("on fire")
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(4)
        case "leak":
            threading.Thread(target=time.sleep, args=[600]).start()
"""


def test_clients_that_exit_raise_or_leave_threads(tmp_path):
    app = write_app(tmp_path)
    client = app / "tinyapp" / "client.py"
    head = "def query(message, context):\n"
    client.write_text(client.read_text().replace(head, head + MISBEHAVE))
    with Deployment(app, num_nodes=1, log_dir=tmp_path / "logs") as deployment:
        [node] = deployment.nodes

        def run(text):
            config = {"run-dir": str(tmp_path / text), "num-clients": 1, "text": text}
            return deployment.run(config, stream=False)

        assert run("leak")["answers"] == [0]
        for way in ("raise", "exit", "leave"):
            # Flower answers for a client that says nothing any more with an error.
            with pytest.raises(RunFailed):
                run(way)
        assert run("well")["answers"] == [0]
        wait_for(lambda: not warm_processes(node)[2], what="the end of the clients")
        assert ORDINARY not in node.process.tail(lines=100_000)


def wait_for_warm(node):
    wait_for(lambda: warm_processes(node)[1], what="a warm process")
    return warm_processes(node)
