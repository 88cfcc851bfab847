"""Runs on a SuperLink that is there already, submitted again after they died."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server_app.places import STOP_REQUEST, SUMMARY, holds_run
from simulation.engines.flower.staging import staged_app
from simulation.engines.flower.submit import fingerprint, read_summary
from simulation.engines.flower.superlink import flwr_json
from simulation.environment import ConfigValue, format_run_config
from simulation.errors import LaunchFailed, RunFailed

_POLL_SECONDS = 2.0
_SILENT_SECONDS = 30.0  # after which a SuperLink that does not answer counts as gone


class Unattended:
    """A run that goes on until it is complete.

    Its folder, ``run-dir`` in the run config, must be one that this process sees: it looks there
    for the summary and for checkpoints, from which the next attempt goes on. The SuperLink is named
    as in Flower's configuration; empty: its default.

    It gives up after so many attempts in a row that brought no new checkpoint. It pauses before the
    next attempt (in seconds), after each further one without a checkpoint twice as long, up to the
    longest pause.
    """

    def __init__(
        self,
        app_dir: Path,
        run_config: Mapping[str, ConfigValue],
        *,
        superlink: str = "",
        attempts: int = 5,
        pause: float = 10.0,
        longest_pause: float = 600.0,
        say: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.app_dir = app_dir
        self.run_config = dict(run_config)
        self.run_dir = Path(str(run_config["run-dir"]))
        self.superlink = [superlink] if superlink else []
        self.attempts, self.pause, self.longest_pause = attempts, pause, longest_pause
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.sleep = sleep
        self._before = fingerprint(self.run_dir / SUMMARY)

    def run(self) -> dict[str, Any]:
        """Submit the run until it is complete; return its summary.

        `RunFailed` says that somebody stopped it, or that too many attempts in a row brought no new
        checkpoint.
        """
        failures = 0
        while True:
            before = self._newest_checkpoint()
            reason, summary = self._attempt()
            # Not of this attempt alone: one that was thought dead may have gone on.
            latest = read_summary(self.run_dir, self._before)
            if latest is not None and latest.get("status") == "completed":
                return latest
            if reason == "finished:stopped" or self._was_stopped(summary):
                raise RunFailed("The run was stopped; the same command goes on from there.")
            failures = 1 if self._newest_checkpoint() != before else failures + 1
            error = (summary or {}).get("error")
            told = f"The run ended: {error or reason}."
            if failures >= self.attempts:
                raise RunFailed(
                    f"{told} {failures} attempts in a row brought no new checkpoint.",
                    summary=summary,
                )
            pause = min(self.pause * 2.0 ** (failures - 1), self.longest_pause)
            self.say(f"{told} It is submitted again in {pause:.0f} s.")
            self.sleep(pause)

    def _attempt(self) -> tuple[str, dict[str, Any] | None]:
        """Submit the run and wait for its end; return how it ended, and its new summary."""
        config = dict(self.run_config)
        if self._newest_checkpoint() is not None:
            config["resume"] = "true"
        elif holds_run(self.run_dir):
            self._put_aside()
        before = fingerprint(self.run_dir / SUMMARY)
        try:
            run_id = self._submit(config)
            self.say(f"Run {run_id} was submitted{' to go on' if 'resume' in config else ''}.")
            end = self._wait(run_id)
        except LaunchFailed as failure:  # no SuperLink, or one that does not know the run any more
            end = failure.reason
        return end, read_summary(self.run_dir, before)

    def _submit(self, config: Mapping[str, ConfigValue]) -> str:
        with (
            tempfile.TemporaryDirectory() as folder,
            staged_app(self.app_dir, Path(folder)) as app,
        ):
            options = ["--run-config", format_run_config(config)]
            return str(flwr_json("run", str(app), *self.superlink, *options)["run-id"])

    def _wait(self, run_id: str) -> str:
        """Return Flower's status of a run that has ended."""
        heard = time.monotonic()
        while True:
            try:
                runs = flwr_json("list", *self.superlink, "--run-id", run_id)["runs"]
            except LaunchFailed:
                if time.monotonic() - heard > _SILENT_SECONDS:
                    raise
            else:
                heard = time.monotonic()
                status = str(runs[0]["status"])
                if status.startswith("finished"):
                    return status
            self.sleep(_POLL_SECONDS)

    def _newest_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint."""
        found = sorted(self.run_dir.glob("checkpoints/*.ckpt"))
        return found[-1].name if found else None

    def _put_aside(self) -> None:
        """Rename the folder of a run that never came to a checkpoint: it has to start over."""
        number = 1
        while (aside := self.run_dir.with_name(f"{self.run_dir.name}.begun-{number}")).exists():
            number += 1
        os.rename(self.run_dir, aside)  # noqa: PTH104 - fails where Path.rename would move
        self.say(f"The run died before its first checkpoint; its folder is {aside} now.")

    def _was_stopped(self, summary: Mapping[str, Any] | None) -> bool:
        """Tell whether a person asked the run to stop, by the file for that."""
        asked = (self.run_dir / STOP_REQUEST).exists()
        return asked and summary is not None and summary.get("status") == "stopped"
