"""A Ray cluster of several nodes on this machine, as processes of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from simulation.environment import accepts_connections, free_port

# Two of the cluster's processes pick ports from here by themselves.
_AGENTS = ("--dashboard-agent-listen-port=0", "--metrics-export-port=0")


class RayCluster:
    """Nodes of a cluster; each can be killed as a machine can lose its power."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The machine's own address: Ray finds out by itself which one that is.
        self.address = f"{socket.gethostbyname(socket.gethostname())}:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []

    def add(
        self,
        *options: str,
        python: str = sys.executable,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a node with these options of `ray start`; the first one is the head."""
        port = int(self.address.rpartition(":")[2])
        where = [f"--address={self.address}"]
        if not self.nodes:
            where = ["--head", f"--port={port}"]
            where += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        command = [python, "-m", "ray.scripts.scripts", "start", "--block", *where, *_AGENTS]
        # Each has its own copies of code and data, as a machine has.
        own = self.folder / str(len(self.nodes))
        own.mkdir()
        command.append(f"--temp-dir={own}")
        with (self.folder / f"node-{len(self.nodes)}.log").open("wb") as log:
            node = subprocess.Popen(
                [*before, *command, *(options or ["--num-cpus=1"])],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **(environment or {})},
                start_new_session=True,
            )
        self.nodes.append(node)
        if wait:
            self._wait_for(node, lambda: accepts_connections(port))
            self._wait_for(node, lambda: b"Ray runtime started" in Path(log.name).read_bytes())
        return node

    def _wait_for(self, node: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert node.poll() is None, (self.folder / "node-0.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End all processes of a node at once."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(node.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()
        psutil.wait_procs(found, timeout=10)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Give a cluster without nodes, and end what was added to it."""
    # Ray's sockets need a short path.
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))
    try:
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            cluster.kill(node)
        shutil.rmtree(cluster.folder, ignore_errors=True)
