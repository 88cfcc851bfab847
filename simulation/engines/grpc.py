"""Run the app on real processes: a SuperLink and SuperNodes that talk gRPC over loopback."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.engines.flower.processes import Child
from simulation.engines.flower.submit import Run, check_run_config, print_line, submit
from simulation.engines.flower.superlink import (
    START_TIMEOUT,
    SuperLink,
    log_folder,
    running_superlink,
)
from simulation.environment import (
    LOOPBACK,
    ConfigValue,
    accepts_connections,
    format_run_config,
    free_port,
)
from simulation.errors import LaunchFailed


@dataclass
class Node:
    """A SuperNode that a `Deployment` started; `port` is that of its own Runtime API."""

    process: Child
    config: dict[str, ConfigValue]
    port: int

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended; a stopped one counts as running."""
        return self.process.running

    @property
    def node_id(self) -> int | None:
        """Flower's id of this node, once it has connected."""
        found = re.search(r"SuperNode ID: (\d+)", self.process.tail(lines=1_000_000))
        return int(found[1]) if found else None


class Deployment:
    """A SuperLink with SuperNodes, as processes of their own, for any number of runs.

    A context manager: entering starts everything and waits until all nodes are connected,
    leaving ends everything.

    Parameters
    ----------
    app_dir : Path
        The folder with the app's pyproject.toml.
    num_nodes : int (default: 2)
        How many SuperNodes to start.
    node_configs : Sequence[Mapping[str, bool | int | float | str]] | None (default: None)
        The node config of each node; ``partition-id`` and ``num-partitions`` by default. Nodes
        also tell the machine's name, unless theirs has another ``host-name``, which may be empty.
    log_dir : Path | None (default: None)
        Folder for the logs of the processes; a temporary one by default.
    database : Path | None (default: None)
        File that keeps the SuperLink's state, so that it knows its nodes and runs again after
        `restart_superlink`; by default the state is in memory.
    warm : bool (default: True)
        Whether nodes start ClientApps from a warm process (`fedpsa_strategy.node`), or as Flower
        does, each with all its imports.

    Attributes
    ----------
    nodes : list[Node]
        Every node ever started, those that have died included.
    """

    superlink: SuperLink

    def __init__(
        self,
        app_dir: Path,
        *,
        num_nodes: int = 2,
        node_configs: Sequence[Mapping[str, ConfigValue]] | None = None,
        log_dir: Path | None = None,
        database: Path | None = None,
        warm: bool = True,
    ) -> None:
        if node_configs is None:
            node_configs = [
                {"partition-id": i, "num-partitions": num_nodes} for i in range(num_nodes)
            ]
        if len(node_configs) != num_nodes:
            raise ValueError(f"{num_nodes} nodes need as many node configs.")
        self.app_dir = Path(app_dir).resolve()
        self.nodes: list[Node] = []
        self._node_configs = node_configs
        self._supernode = (
            [sys.executable, "-m", "fedpsa_strategy.node"] if warm else ["flower-supernode"]
        )
        self._context = running_superlink(simulation=False, log_dir=log_dir, database=database)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Deployment:
        with contextlib.ExitStack() as stack:
            self.superlink = stack.enter_context(self._context)
            new = [self._start_node(config) for config in self._node_configs]
            self._wait_until_online(new, before=set())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def restart_superlink(self) -> None:
        """Start the SuperLink again after it was killed, and wait until all nodes are back.

        Without a database it starts from nothing: its nodes come back under new ids.
        """
        self.superlink.restart()
        running = [node for node in self.nodes if node.running]
        self._wait_until_online(running, before=set())

    @property
    def superlink_pid(self) -> int:
        """The process id of the SuperLink."""
        return self.superlink.process.pid

    @property
    def node_pids(self) -> list[int]:
        """The process ids of all nodes, in the order in which they were started."""
        return [node.pid for node in self.nodes]

    def online_node_ids(self) -> set[int]:
        """Return the ids of the nodes that Flower takes for connected.

        A node that was killed stays among them until its heartbeats have been missing for about
        a minute.
        """
        answer = self.superlink.flwr("supernode", "list", self.superlink.connection)
        return {int(node["node-id"]) for node in answer["nodes"] if node["status"] == "online"}

    def add_node(self, node_config: Mapping[str, ConfigValue] | None = None) -> Node:
        """Start another node and wait until it is connected.

        By default its config is that of the first node that has died and not been replaced, or else
        has the next ``partition-id``.
        """
        before = self.online_node_ids()
        node = self._start_node(node_config or self._next_config())
        self._wait_until_online([node], before)
        return node

    def _next_config(self) -> dict[str, ConfigValue]:
        in_use = [node.config for node in self.nodes if node.running]
        for node in self.nodes:
            if node.config not in in_use:
                return node.config
        number = len(self.nodes)
        return {"partition-id": number, "num-partitions": number + 1}

    def _start_node(self, node_config: Mapping[str, ConfigValue]) -> Node:
        port = free_port()
        named = {"host-name": socket.gethostname(), **node_config}
        process = self.superlink.group.start(
            f"supernode-{len(self.nodes)}",
            [
                *self._supernode,
                "--insecure",
                "--isolation=subprocess",
                f"--superlink={self.superlink.fleet_address}",
                f"--host={LOOPBACK}",
                f"--port={port}",
                f"--node-config={format_run_config(named)}",
            ],
        )
        node = Node(process, dict(node_config), port)
        self.nodes.append(node)
        return node

    def _wait_until_online(self, new: Sequence[Node], before: set[int]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        # Asking Flower takes seconds of CPU time, asking a port does not, and a node opens its
        # port just before it connects.
        while not all(accepts_connections(node.port) for node in new):
            self._check_starting(new, deadline)
            time.sleep(0.1)
        while len(self.online_node_ids() - before) < len(new):
            self._check_starting(new, deadline)
            time.sleep(0.5)

    def _check_starting(self, new: Sequence[Node], deadline: float) -> None:
        processes = [self.superlink.process, *(node.process for node in new)]
        for process in processes:
            if not process.running:
                raise LaunchFailed(
                    f"{process.name} ended with exit code {process.wait()} while starting.",
                    log_tail=process.tail(),
                )
        if time.monotonic() >= deadline:
            raise LaunchFailed(
                f"Not all of {len(new)} SuperNodes connected within {START_TIMEOUT:.0f} s.",
                log_tail="\n".join(f"[{p.name}]\n{p.tail(5)}" for p in processes),
            )

    def submit(self, run_config: Mapping[str, ConfigValue]) -> Run:
        """Submit a run and return at once; `Run.wait` gives its result."""
        return submit(self.superlink, self.app_dir, run_config)

    def run(self, run_config: Mapping[str, ConfigValue], *, stream: bool = True) -> dict[str, Any]:
        """Submit a run, wait for its end and return its summary.

        The deployment stays usable after a run that did not complete, which raises `RunFailed`.
        """
        return self.submit(run_config).wait(echo=print_line if stream else None)


def run_on_processes(
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    *,
    num_nodes: int,
    stream: bool = True,
    warm: bool = True,
) -> dict[str, Any]:
    """Run the app once on a deployment of its own, and leave nothing running.

    See `simulation.engines`, and `Deployment` for `num_nodes` and `warm`.
    """
    run_dir = check_run_config(Path(app_dir), run_config)
    logs = log_folder(run_dir)
    with Deployment(app_dir, num_nodes=num_nodes, log_dir=logs, warm=warm) as deployment:
        return deployment.run(run_config, stream=stream)
