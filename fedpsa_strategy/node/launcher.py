"""The command ``fedpsa-node``: ``flower-supernode`` with a warm process at its side.

It takes the arguments of ``flower-supernode`` and then becomes it, by `exec`: process id, signals
and exit code are the SuperNode's own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fedpsa_strategy.node.flower import (
    CLIENTAPP,
    CLIENTAPP_MODULE,
    POLL_SECONDS,
    POLL_VARIABLE,
    SUPERNODE,
    interpreter_of,
    why_ordinary,
)
from fedpsa_strategy.node.front import STARTING, STATE
from fedpsa_strategy.node.settings import PRELOAD_VARIABLE, WARM_VARIABLE, NodeSettings, say

HELP = f"""\
usage: fedpsa-node [options of {SUPERNODE}]

Start Flower's SuperNode so that its ClientApps start at once: a warm process imports Flower and
torch beforehand and forks a child for every message. Environment variables:

  {WARM_VARIABLE}=0     start everything as {SUPERNODE} does
  {PRELOAD_VARIABLE}   modules to import beforehand, separated by spaces (default: torch, if it
                       is installed)

What follows is the help of {SUPERNODE}.
"""

_LONGEST_SOCKET_PATH = 100
_HERE = Path(__file__).resolve().parent


class CannotBeWarmError(Exception):
    """There is no use for a warm process, or no way to start one; the text says why."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Start a warm process, and become the SuperNode with these arguments, or the process's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    environment = dict(os.environ)
    supernode = shutil.which(SUPERNODE, path=environment.get("PATH"))
    if supernode is None:
        # A command that was called by its path, without its environment activated.
        scripts = sysconfig.get_path("scripts")
        environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
        supernode = shutil.which(SUPERNODE, path=scripts)
    if supernode is None:
        sys.exit(f"fedpsa-node: {SUPERNODE} is not installed here (pip install flwr).")
    if {"-h", "--help"} & set(arguments):
        print(HELP, flush=True)
    elif not {"-V", "--version"} & set(arguments):
        try:
            _start_warm(arguments, environment)
        except CannotBeWarmError as reason:
            say(f"ordinary starts of ClientApps: {reason}")
    os.execve(supernode, [SUPERNODE, *arguments], environment)


def _start_warm(arguments: Sequence[str], environment: dict[str, str]) -> None:
    """Start the warm process, and change the environment of the SuperNode so that it is used."""
    warm = environment.get(WARM_VARIABLE, "1")
    if warm not in ("0", "1"):
        sys.exit(f"fedpsa-node: {WARM_VARIABLE} is {warm!r}; it must be 0 or 1.")
    preload = _preload(environment)
    if warm == "0":
        raise CannotBeWarmError(f"{WARM_VARIABLE} is 0")
    if not sys.platform.startswith("linux"):
        raise CannotBeWarmError(
            "warm nodes need Linux (elsewhere, libraries do not survive a fork)"
        )
    if reason := why_ordinary(arguments):
        raise CannotBeWarmError(reason)
    script = shutil.which(CLIENTAPP, path=environment.get("PATH"))
    python = interpreter_of(Path(script)) if script else None
    if script is None or python is None:
        raise CannotBeWarmError(f"{script or CLIENTAPP} is not a Python script")
    front = _HERE / "bin" / CLIENTAPP
    if not os.access(front, os.X_OK):
        raise CannotBeWarmError(f"{front} is not executable")
    try:
        folder = make_folder()
        NodeSettings(script, CLIENTAPP_MODULE, preload).write(folder)
        lifeline = start_keeper(python, folder, environment)
    except OSError as error:
        raise CannotBeWarmError(f"{error}") from None
    # The SuperNode holds it until it ends, and passes it on to no process: it closes what its own
    # children need not have.
    os.set_inheritable(lifeline, True)
    environment["FEDPSA_NODE_FOLDER"] = str(folder)
    environment["FEDPSA_NODE_PYTHON"] = python[0]
    environment["PATH"] = os.pathsep.join([str(front.parent), environment.get("PATH", os.defpath)])
    environment.setdefault(POLL_VARIABLE, POLL_SECONDS)


def _preload(environment: dict[str, str]) -> list[str] | None:
    text = environment.get(PRELOAD_VARIABLE)
    if text is None:
        return None
    names = re.split(r"[\s,]+", text.strip()) if text.strip() else []
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            sys.exit(
                f"fedpsa-node: {PRELOAD_VARIABLE} holds {name!r}; it must be names of modules,"
                " separated by spaces, such as 'torch sklearn.linear_model'."
            )
    return names


def make_folder() -> Path:
    """Make a folder for this user alone, with a path that is short enough for a socket in it."""
    for place in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="fedpsa-node-", dir=place))
        if len(os.fsencode(folder / "socket")) <= _LONGEST_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise OSError("no place for a socket")


def start_keeper(python: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Start the warm process, and return the end of its lifeline: it ends when that closes.

    `python` is the interpreter with its options; the node's folder has the settings.
    """
    lifeline, held = os.pipe()
    (folder / STATE).write_text(STARTING, encoding="utf-8")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        umask = os.umask(0o077)
        try:
            listener.bind(str(folder / "socket"))
        finally:
            os.umask(umask)
        listener.listen(16)
        descriptors = [listener.fileno(), lifeline]
        subprocess.Popen(
            [*python, str(_HERE / "warm.py"), str(folder), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=descriptors,
            # Signals of a terminal reach its children through those who wait for them.
            start_new_session=True,
        )
    os.close(lifeline)
    return held
