"""A warm process with a small program in place of Flower's `flwr-clientapp`."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil

from fedpsa_strategy.node import launcher
from fedpsa_strategy.node.front import READY, STARTING, STATE
from fedpsa_strategy.node.settings import NodeSettings

BIN = Path(launcher.__file__).parent / "bin"


class WarmNode:
    """A warm process, and what a SuperNode's executor would do with it."""

    def __init__(self, folder, program, preload=(), own_module="json", environment=None):
        self.commands = folder / "commands"
        self.commands.mkdir(exist_ok=True)
        self.script = self.commands / "flwr-clientapp"
        self.script.write_text(f"#!{sys.executable}\n{program}\n")
        self.script.chmod(0o755)
        self.log = folder / "warm.log"
        path = os.environ["PATH"]
        self.cold_environment = os.environ | (environment or {})
        self.cold_environment["PATH"] = f"{self.commands}:{path}"
        self.folder = launcher.make_folder()
        NodeSettings(str(self.script), own_module, list(preload)).write(self.folder)
        self.environment = self.cold_environment | {
            "PATH": f"{BIN}:{self.commands}:{path}",
            "FEDPSA_NODE_FOLDER": str(self.folder),
            "FEDPSA_NODE_PYTHON": sys.executable,
        }
        # The two processes write to this process's stderr otherwise.
        command = f'exec {shlex.quote(sys.executable)} "$@" 2>> {shlex.quote(str(self.log))}'
        self.lifeline = launcher.start_keeper(
            ["/bin/sh", "-c", command, "sh"], self.folder, self.cold_environment
        )

    def __enter__(self):
        wait_for(lambda: self.state() not in (STARTING, None))
        return self

    def __exit__(self, *_):
        left = self.processes()
        self.end_supernode()
        _, alive = psutil.wait_procs(left, timeout=10)
        for process in alive:
            process.kill()
        assert not alive
        assert not self.folder.exists()

    def end_supernode(self):
        """Do what the system does when the SuperNode ends, however that is."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None

    def state(self):
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / STATE).read_text()

    def processes(self):
        """The keeper, the warm process, and its children, in this order."""
        parents = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if str(self.folder) in command and any("warm.py" in word for word in command):
                    parents[process] = process.ppid()
        pids = {process.pid for process in parents}
        by_depth = []
        for process, parent in parents.items():
            depth = 0
            while parent in pids:
                depth += 1
                parent = next(up for other, up in parents.items() if other.pid == parent)
            by_depth.append((depth, process.pid, process))
        return [process for *_, process in sorted(by_depth, key=lambda found: found[:2])]

    @property
    def warm(self):
        return self.processes()[1]

    def wait_until_ready(self):
        wait_for(lambda: self.state() == READY)

    def start(self, *arguments, **options):
        """Start what Flower calls `flwr-clientapp`."""
        options = {"env": self.environment, "stdout": subprocess.PIPE, "text": True} | options
        options.setdefault("stderr", subprocess.PIPE)
        # As Flower does it: the name is looked up in the environment of the new process.
        path = options["env"]["PATH"]
        with changed_path(path):
            return subprocess.Popen(["flwr-clientapp", *arguments], **options)

    def run(self, *arguments, text="", **options):
        """Do the same and wait for the end; returns exit code, output and errors."""
        process = self.start(*arguments, stdin=subprocess.PIPE, **options)
        out, errors = process.communicate(text, timeout=60)
        return process.returncode, out, errors


@contextlib.contextmanager
def changed_path(path):
    before = os.environ["PATH"]
    os.environ["PATH"] = path
    try:
        yield
    finally:
        os.environ["PATH"] = before


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
