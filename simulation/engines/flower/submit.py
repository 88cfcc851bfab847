"""Submit a run to a SuperLink, follow its log, stop it, and fetch its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server_app.places import STOP_REQUEST, SUMMARY, read_json
from simulation.app_config import check_keys, default_run_config
from simulation.engines.flower.log_filter import readable
from simulation.engines.flower.processes import Child
from simulation.engines.flower.staging import staged_app
from simulation.engines.flower.superlink import SuperLink
from simulation.environment import ConfigValue, format_run_config
from simulation.errors import LaunchFailed, RunFailed, RunTimeout

COMPLETED = "finished:completed"
"""Flower's status of a run that ended well."""

_REQUEST_SECONDS = 3.0
_STOP_SECONDS = 3.0
# A ServerApp that is told to end gets 5 seconds from Flower to save what it has. Once the run is
# over, nothing is left to save.
_GRACE_DURING_RUN = 6.0
_GRACE_AFTER_RUN = 1.0


def print_line(line: str) -> None:
    """Show one line of a run's log to the user, unless it is noise."""
    text = readable(line, colours=sys.stdout.isatty())
    if text is not None:
        print(text, flush=True)


class Run:
    """A run that was submitted; `run_dir` is None for an app that has no such setting."""

    def __init__(
        self, superlink: SuperLink, run_id: str, run_dir: Path | None, before: object
    ) -> None:
        self.run_id = run_id
        self.run_dir = run_dir
        self._superlink = superlink
        self._superlink.group.grace = _GRACE_DURING_RUN
        self._before = before
        self._stream = self._attach()
        self._lines = 0
        self._skip = 0
        self._last_status = ("unknown", "")

    def _attach(self) -> Child:
        return self._superlink.group.start(
            f"run-{self.run_id}", ["flwr", "log", self.run_id, self._superlink.connection]
        )

    def wait(
        self, *, echo: Callable[[str], None] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Wait for the run's end, and return the summary that the ServerApp wrote.

        Ctrl-C stops the run before `KeyboardInterrupt` goes on to the caller.

        Parameters
        ----------
        echo : Callable[[str], None] | None (default: None)
            Gets every line of the run's log, for example `print_line`.
        timeout : float | None (default: None)
            Seconds after which `RunTimeout` is raised; the run itself goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._follow(echo, deadline):
                if deadline is not None and time.monotonic() >= deadline:
                    raise RunTimeout(f"Run {self.run_id} did not end within {timeout:.0f} s.")
                self._reattach()
        except KeyboardInterrupt:
            print("Stopping the run; Ctrl-C again does not wait for it.", file=sys.stderr)
            self.stop(echo=echo)
            raise
        self._superlink.group.grace = _GRACE_AFTER_RUN
        return self._result()

    def stop(self, *, echo: Callable[[str], None] | None = None) -> None:
        """Stop the run, giving the ServerApp a moment to end cleanly."""
        request = None if self.run_dir is None else self.run_dir / STOP_REQUEST
        if request is not None:
            request.parent.mkdir(parents=True, exist_ok=True)
            request.touch()
        try:
            if request and self._follow(echo, time.monotonic() + _REQUEST_SECONDS):
                return
            self._superlink.flwr("stop", self.run_id, self._superlink.connection)
            # The log ends at once now, but the ServerApp notices only at its next message or
            # heartbeat.
            deadline = time.monotonic() + _STOP_SECONDS
            while self._summary() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        except LaunchFailed:
            pass  # the run ended by itself meanwhile, or there is no SuperLink any more
        finally:
            self._superlink.group.grace = _GRACE_AFTER_RUN
            # The next run in this directory must not find it.
            if request is not None:
                request.unlink(missing_ok=True)

    def status(self) -> tuple[str, str]:
        """Return Flower's status of the run, such as ``finished:failed``, and its details."""
        answer = self._superlink.flwr("list", self._superlink.connection, "--run-id", self.run_id)
        run = answer["runs"][0]
        details = run["status-details"]
        return run["status"], "" if details == "N/A" else details

    def _follow(self, echo: Callable[[str], None] | None, deadline: float | None) -> bool:
        """Pass the log on until it ends (True) or the deadline passes (False)."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for line in self._stream.follow(timeout):
            if self._skip:
                self._skip -= 1
                continue
            self._lines += 1
            self._superlink.process.trim_log()
            if echo is not None:
                echo(line)
        if self._stream.running:
            return False
        # The log of a run ends with the run, unless the connection broke. The SuperLink knows,
        # but it takes a command to ask it.
        if self._summary() is not None or not self._superlink.process.running:
            return True
        self._last_status = self.status()
        return self._last_status[0].startswith("finished")

    def _reattach(self) -> None:
        """Follow the log again; it starts from its beginning, so skip what was shown."""
        time.sleep(1.0)
        self._stream = self._attach()
        self._skip = self._lines

    def _summary(self) -> dict[str, Any] | None:
        return None if self.run_dir is None else read_summary(self.run_dir, self._before)

    def _tail(self) -> str:
        text = self._stream.tail(lines=1000)
        shown = [readable(line, colours=False) for line in text.splitlines()]
        return "\n".join([line for line in shown if line is not None][-20:])

    def _result(self) -> dict[str, Any]:
        summary = self._summary()
        if summary is not None and summary.get("status") == "completed":
            return summary
        tail = self._tail()
        if summary is not None:
            word = "was stopped" if summary.get("status") == "stopped" else "failed"
            error = summary.get("error")
            reason = f"The run {word}: {error}" if error else f"The run {word}."
            raise RunFailed(reason, log_tail=tail, summary=summary)
        if not self._superlink.process.running:
            raise RunFailed(
                "The SuperLink ended in the middle of the run"
                f" (exit code {self._superlink.process.wait()}).",
                log_tail=self._superlink.process.tail(),
            )
        status, details = self._last_status
        if status == COMPLETED:  # an app that leaves it to Flower to say so
            return {"status": "completed"}
        raise RunFailed(
            f"The run did not complete (Flower's status: {status}"
            + (f", {details})." if details else ")."),
            log_tail=tail,
        )


def submit(
    superlink: SuperLink,
    app_dir: Path,
    run_config: Mapping[str, ConfigValue],
    *,
    federation_config: Mapping[str, ConfigValue] | None = None,
) -> Run:
    """Submit a run of the app to a SuperLink; raise `LaunchFailed` if it is refused.

    `federation_config` has the options of the simulation engine.
    """
    run_dir = check_run_config(app_dir, run_config)
    before = None
    if run_dir is not None:
        before = fingerprint(run_dir / SUMMARY)
        (run_dir / STOP_REQUEST).unlink(missing_ok=True)
    arguments = ["--run-config", format_run_config(run_config)]
    if federation_config:
        arguments += ["--federation-config", format_run_config(federation_config)]
    # `flwr run --stream` would save one command, but gives the run's id only in a sentence.
    with staged_app(app_dir, superlink.folder) as app:
        answer = superlink.flwr("run", str(app), superlink.connection, *arguments)
    return Run(superlink, str(answer["run-id"]), run_dir, before)


def check_run_config(app_dir: Path, run_config: Mapping[str, ConfigValue]) -> Path | None:
    """Refuse a run config that cannot work, and return its run directory, if the app has one."""
    defaults = default_run_config(app_dir)
    check_keys(run_config, defaults)
    if "run-dir" not in defaults:
        return None
    run_dir = Path(str(run_config.get("run-dir", "")))
    if not run_dir.is_absolute():
        raise LaunchFailed(
            "The run config needs 'run-dir', an absolute path: the ServerApp runs elsewhere,"
            " where a relative one means another folder."
        )
    return run_dir


def read_summary(run_dir: Path, before: object) -> dict[str, Any] | None:
    """Return the summary of this run, which is not the one that was in its folder before."""
    path = run_dir / SUMMARY
    return None if fingerprint(path) in (None, before) else read_json(path)


def fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Tell one version of a file from the next; None if there is no such file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
