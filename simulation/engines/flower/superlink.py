"""A SuperLink of our own, and Flower's command line talking to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulation.engines.flower.flower_version import fleet_options, fleet_over_grpc
from simulation.engines.flower.processes import ProcessGroup
from simulation.environment import (
    LOOPBACK,
    flower_environment,
    free_port,
    launch_folder,
    new_token,
)
from simulation.errors import LaunchFailed

LOG_FOLDER = "engine-logs"
"""Where a run directory has the logs of the engine's processes."""

START_TIMEOUT = 120.0
"""Seconds for a Flower process to come up: generous, since an idle machine needs about three."""


def log_folder(run_dir: Path | None) -> Path | None:
    """Return where the engine's logs of a run go; its folder is made, for its owner alone."""
    # Not at the top: it loads Flower, and --help should not wait for that.
    from fedpsa_strategy.files import make_private_folder

    if run_dir is None:
        return None
    make_private_folder(run_dir)
    return run_dir / LOG_FOLDER


class SuperLink:
    """A running SuperLink and the process group it belongs to.

    Flower's commands know it by the name `connection`; SuperNodes connect to `fleet_address`.
    Without a database its state is in memory and ends with it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        folder: Path,
        *,
        simulation: bool,
        database: Path | None = None,
    ) -> None:
        self.group = group
        self.folder = folder
        self.connection = f"launch-{group.token[:8]}"
        self._restarts = 0
        self._port = free_port()
        self.fleet_address = f"{LOOPBACK}:{free_port() if fleet_over_grpc() else self._port}"
        self._add_connection(Path(group.environment["FLWR_HOME"]))
        self._command = [
            "flower-superlink",
            "--insecure",
            "--isolation=subprocess",
            f"--host={LOOPBACK}",
            f"--port={self._port}",
            *(["--simulation"] if simulation else fleet_options(self.fleet_address)),
            *([] if database is None else [f"--database={database}"]),
        ]
        self.process = group.start("superlink", self._command)

    def restart(self) -> None:
        """Start it again after its end, at the same addresses, and wait until it answers."""
        if self.process.running:
            raise LaunchFailed("The SuperLink is still running.")
        self._restarts += 1
        self.process = self.group.start(f"superlink-{self._restarts}", self._command)
        self.wait_until_healthy()

    def _add_connection(self, flwr_home: Path) -> None:
        flwr_home.mkdir(parents=True, exist_ok=True)
        # Appended: a folder that the caller gave may have a configuration already.
        with (flwr_home / "config.toml").open("a", encoding="utf-8") as config:
            config.write(
                f"\n[superlink.{self.connection}]\n"
                f'address = "{LOOPBACK}:{self._port}"\ninsecure = true\n'
            )

    def wait_until_healthy(self) -> None:
        """Wait for the SuperLink to answer; `LaunchFailed` if it ends, or does not in time."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if not self.process.running:
                raise LaunchFailed(
                    f"The SuperLink ended with exit code {self.process.wait()} while starting.",
                    log_tail=self.process.tail(),
                )
            if time.monotonic() >= deadline:
                raise LaunchFailed(
                    f"The SuperLink did not answer within {START_TIMEOUT:.0f} s.",
                    log_tail=self.process.tail(),
                )
            time.sleep(0.1)

    def _answers(self) -> bool:
        # An opener without proxies: the request must not leave this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{LOOPBACK}:{self._port}/health", timeout=2.0) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def flwr(self, *arguments: str, timeout: float = 60.0) -> dict[str, Any]:
        """Run a ``flwr`` command on this SuperLink and return its JSON answer; see `flwr_json`."""
        return flwr_json(*arguments, environment=self.group.environment, timeout=timeout)


def flwr_json(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 60.0
) -> dict[str, Any]:
    """Run a ``flwr`` command and return its JSON answer.

    A command that fails raises `LaunchFailed`, with Flower's own words. By default it has this
    process's environment, with Flower's commands beside this Python first in its ``PATH``.
    """
    if environment is None:
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        environment = {**os.environ, "PATH": os.pathsep.join(path)}
    command = ["flwr", *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
            # Ctrl-C in a terminal is for the launcher, which then decides.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"`flwr {arguments[0]}` did not end in {timeout:.0f} s.") from None
    answer: dict[str, Any] = {}
    with contextlib.suppress(json.JSONDecodeError):
        answer = json.loads(done.stdout)
    if answer.get("success"):
        return answer
    failed = f"`flwr {arguments[0]}` failed"
    if message := answer.get("error-message"):
        lines = [line.strip() for line in message.splitlines()]
        # Flower says first where it connected to.
        said = [line for line in lines if line and not line.startswith("Using SuperLink")]
        raise LaunchFailed(f"{failed}: {' '.join(said)}")
    raise LaunchFailed(
        f"{failed} with exit code {done.returncode}.", log_tail=(done.stderr or done.stdout)
    )


@contextlib.contextmanager
def running_superlink(
    *,
    simulation: bool,
    log_dir: Path | None = None,
    database: Path | None = None,
) -> Iterator[SuperLink]:
    """Start a SuperLink in surroundings of its own, and end everything afterwards.

    It simulates its SuperNodes with Ray, or waits for real ones. Logs go to a temporary folder if
    none is given.
    """
    with launch_folder() as folder:
        environment = flower_environment(folder, new_token())
        with ProcessGroup(
            log_dir or folder / "logs", environment=environment, folder=folder
        ) as group:
            superlink = SuperLink(group, folder, simulation=simulation, database=database)
            superlink.wait_until_healthy()
            yield superlink
