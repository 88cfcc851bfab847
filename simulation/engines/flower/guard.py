"""A small process that cleans up after a launcher that was killed without warning.

It holds one end of a pipe whose other end only the launcher has. When the pipe closes, the
launcher is gone, for whatever reason: the guard ends what is left of the launch, removes its
folder, and ends itself. After an orderly end there is nothing left to do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from simulation.engines.flower.process_table import end_processes, find_launched
from simulation.environment import APP, TOKEN_VARIABLE, remove_folder


def start_guard(token: str, folder: Path | None) -> subprocess.Popen[bytes]:
    """Start the guard of a launch; closing its `stdin` sets it off."""
    environment = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
    environment["PYTHONPATH"] = str(APP)
    arguments = [token] if folder is None else [token, str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "simulation.engines.flower.guard", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        # What hits the launcher's terminal or process group must not hit its guard.
        start_new_session=True,
    )


def main(arguments: list[str]) -> None:
    """Wait for the launcher's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token = arguments[0]
    while os.read(0, 4096):
        pass
    end_processes(lambda: find_launched(TOKEN_VARIABLE, token), grace=2.0)
    for folder in arguments[1:]:
        remove_folder(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
