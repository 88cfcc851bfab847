"""Submit a run, show its log, and end as the run did: ``python -m jobs.run``.

Exit code 0 means that the run's own ``summary.json`` says "completed"; Flower's commands end with 0
also after a run that failed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from jobs.control import connect
from server_app.places import STOP_REQUEST, SUMMARY, run_name
from simulation.app_config import check_keys, default_run_config
from simulation.arguments import parse_value
from simulation.engines.flower.log_filter import readable
from simulation.engines.flower.staging import staged_app
from simulation.engines.flower.submit import fingerprint, read_summary
from simulation.engines.flower.superlink import flwr_json
from simulation.environment import ConfigValue, format_run_config
from simulation.errors import LaunchFailed

_STOP_SECONDS = 15.0
_STATUS_SECONDS = 60.0


class _Stopped(BaseException):
    """The container is told to stop."""


def build_run_config(
    settings: Mapping[str, Any],
    changes: str,
    defaults: Mapping[str, ConfigValue],
    *,
    num_nodes: int,
    runs_dir: Path,
    name: str = "",
    now: datetime,
) -> dict[str, ConfigValue]:
    """Put together the run config.

    The changes, ``key=value`` pairs with quotes only around spaces, go before what ``run.toml``
    says. The folder is by default named after the time, the strategy and the dataset.
    """
    config: dict[str, ConfigValue] = {"num-clients": num_nodes, **settings}
    for pair in shlex.split(changes):
        key, equals, value = pair.partition("=")
        if not equals:
            raise LaunchFailed(f"RUN_CONFIG: {pair!r} is not of the form key=value.")
        # `resume` is a string with a meaning for the bare word true.
        config[key] = parse_value(value, defaults.get(key))
    check_keys(config, defaults)
    merged = {**defaults, **config}
    data = str(merged["task"] or merged["dataset"])
    name = name or run_name(str(merged["strategy"]), data, now)
    if name != Path(name).name or name in (".", ".."):
        raise LaunchFailed(f"RUN_NAME={name!r} is not a plain folder name.")
    config["run-dir"] = str(runs_dir / name)
    return config


def follow_log(run_id: str) -> str:
    """Show the log of a run until it ends, however often the connection breaks.

    Returns what Flower says about the end.
    """
    shown = 0
    while True:
        with subprocess.Popen(
            ["flwr", "log", run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as stream:
            assert stream.stdout is not None
            # A new connection shows the log from its beginning.
            for number, line in enumerate(stream.stdout):
                text = readable(line.rstrip("\n"), colours=False)
                if number >= shown and text is not None:
                    print(text, flush=True)
                shown = max(shown, number + 1)
        status = run_status(run_id)
        if status.startswith("finished"):
            return status
        time.sleep(1.0)


def run_status(run_id: str) -> str:
    """Return Flower's status of a run and its details; waits for a SuperLink that restarts."""
    give_up = time.monotonic() + _STATUS_SECONDS
    while True:
        try:
            run = flwr_json("list", "--run-id", run_id)["runs"][0]
            return f"{run['status']}, {run['status-details']}"
        except LaunchFailed:
            if time.monotonic() >= give_up:
                raise
            time.sleep(2.0)


def _stop(run_dir: Path, before: object) -> None:
    """Ask the ServerApp to save a checkpoint and to end, and give it a moment for that."""
    print("Stopping the run.", flush=True)
    request = run_dir / STOP_REQUEST
    request.touch()
    try:
        give_up = time.monotonic() + _STOP_SECONDS
        while read_summary(run_dir, before) is None and time.monotonic() < give_up:
            time.sleep(0.2)
    finally:
        request.unlink(missing_ok=True)


def _raise_stopped(_number: int, _frame: FrameType | None) -> None:
    raise _Stopped


def main() -> int:
    """Run what run.toml and the environment variables say; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)
    app = Path(__file__).resolve().parents[1]
    settings = tomllib.loads((app / "run.toml").read_text(encoding="utf-8"))
    connect()
    try:
        config = build_run_config(
            settings,
            os.environ.get("RUN_CONFIG", ""),
            default_run_config(app),
            num_nodes=int(os.environ["NODES"]),
            runs_dir=Path("/runs"),
            name=os.environ.get("RUN_NAME", ""),
            now=datetime.now(UTC),
        )
        run_dir = Path(str(config["run-dir"]))
        before = fingerprint(run_dir / SUMMARY)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / STOP_REQUEST).unlink(missing_ok=True)
        with staged_app(app, Path("/tmp")) as staged:
            answer = flwr_json("run", str(staged), "--run-config", format_run_config(config))
        print(f"Run {answer['run-id']}, folder {run_dir.name}", flush=True)
        end = "stopped"
        try:
            end = follow_log(str(answer["run-id"]))
        except _Stopped:
            _stop(run_dir, before)
    except LaunchFailed as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return 1
    summary = read_summary(run_dir, before)
    if summary is not None and summary.get("status") == "completed":
        print(f"Completed; the results are in the folder {run_dir.name} of RUNS_DIR.", flush=True)
        return 0
    if summary is None:
        print(f"Error: the run ended without a summary ({end}).", file=sys.stderr)
    else:
        reason = f": {summary['error']}" if summary.get("error") else ""
        print(f"Error: the run is {summary.get('status')}{reason}", file=sys.stderr)
    if any((run_dir / "checkpoints").glob("*.ckpt")):
        print(
            f"It can go on from its newest checkpoint: RUN_NAME={run_dir.name} with resume=true"
            " added to RUN_CONFIG.",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
