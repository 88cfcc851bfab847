"""A tiny app on both of Flower's engines."""

import os
import signal
import sys
from pathlib import Path

import pytest

from simulation.engines.flower.submit import print_line, submit
from simulation.engines.grpc import Deployment
from simulation.errors import LaunchFailed, RunFailed
from support.engines import launch
from support.ordinary_app import write_app

pytestmark = pytest.mark.engine


def test_an_app_on_the_ray_engine_until_ctrl_c(tiny_app, tmp_path, marked):
    command = ["run", "--app", str(tiny_app), "--clients", "2", "--set", "mode=forever"]
    launcher = launch(*command, "--run-dir", str(tmp_path / "run"), "--cpus", "2")
    shown = []
    for line in launcher.stdout:
        shown.append(line)
        if line.startswith("answers"):
            break
    assert "answers: [0, 1]" in shown[-1]
    assert not [line for line in shown if "Since flwr 1.32" in line]
    assert (tmp_path / "run" / "engine-logs" / "superlink.log").exists()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert marked(), "".join(shown)
    launcher.send_signal(signal.SIGINT)
    rest, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, "".join(shown) + rest
    assert not marked()


def test_deployment(tiny_app, tmp_path, marked, capsys):
    with Deployment(tiny_app, num_nodes=2, log_dir=tmp_path / "logs") as deployment:
        assert {deployment.superlink_pid, *deployment.node_pids} <= marked()
        assert {node.node_id for node in deployment.nodes} == deployment.online_node_ids()

        # Runs follow each other on the same deployment.
        with pytest.raises(RunFailed, match="The run failed: ValueError: the model is on fire"):
            deployment.run({"run-dir": str(tmp_path / "bad"), "mode": "raise"})
        summary = deployment.run({"run-dir": str(tmp_path / "good")})
        assert summary["answers"] == [0, 1]
        assert "answers: [0, 1]" in capsys.readouterr().out
        for node in deployment.nodes:
            log = node.process.tail(lines=100_000)
            assert log.count("Start `flwr-clientapp` process") == 1
            assert "fedpsa-node: warm after" in log
            assert "ordinary start" not in log

        # Those of another app too, which writes no summary.
        ordinary = write_app(tmp_path / "ordinary")
        submit(deployment.superlink, ordinary, {"learning-rate": 0.25}).wait(echo=print_line)
        assert "final arrays: [0.75, 0.75, 0.75]" in capsys.readouterr().out
        with pytest.raises(RunFailed, match="the model is on fire"):
            submit(deployment.superlink, ordinary, {"learning-rate": 2.0}).wait()

        os.kill(deployment.node_pids[0], signal.SIGKILL)
        deployment.nodes[0].process.wait(10)
        node = deployment.add_node()
        assert node.config == {"partition-id": 0, "num-partitions": 2}
        assert node.node_id in deployment.online_node_ids()
    assert not marked()


def test_a_node_that_does_not_start_is_named(tiny_app, tmp_path, marked, monkeypatch):
    commands = tmp_path / "commands"
    commands.mkdir()
    broken = commands / "flower-supernode"
    broken.write_text("#!/bin/sh\necho 'no such luck'\nexit 3\n")
    broken.chmod(0o755)
    # The interpreter's folder comes first in the launch's PATH, so pretend that it is this one.
    for name in ("flower-superlink", "flower-superexec", "flwr", "python"):
        (commands / name).symlink_to(Path(sys.executable).parent / name)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setattr("simulation.engines.flower.processes.start_guard", lambda *_: None)
    with (
        pytest.raises(LaunchFailed, match="supernode-0 ended with exit code 3") as caught,
        Deployment(tiny_app, num_nodes=1),
    ):
        pass
    assert "no such luck" in caught.value.log_tail
