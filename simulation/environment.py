"""The surroundings in which Flower's commands run: variables, folders, ports, run config."""

from __future__ import annotations

import math
import os
import random
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ConfigValue = bool | int | float | str
RunConfig = dict[str, ConfigValue]

APP = Path(__file__).resolve().parents[1]
"""The folder of this repository and its app."""

TOKEN_VARIABLE = "FEDPSA_LAUNCH_TOKEN"
"""Every process of a launch carries this variable, however it detaches itself."""

QUIET = {
    # Nothing here needs the network.
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise the log of a run arrives in blocks of 8 kB.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of all processes that run an app."""

LOOPBACK = "127.0.0.1"

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
# Below the range from which operating systems take the ports of outgoing connections, so that
# a port found free is still free a second later, when the server that gets it has started.
_PORTS = range(20_000, 32_000)
# Ray keeps Unix sockets about 70 characters below its folder, and the system allows 107.
_LONGEST_RAY_FOLDER = 36


def format_run_config(config: Mapping[str, ConfigValue]) -> str:
    """Write a run config as the text that ``--run-config`` and ``--node-config`` take.

    Flower cuts this text into ``key=value`` pairs with a regular expression in which a quoted
    value ends at the next quote, escaped or not, and then reads each pair as TOML. A quote
    inside a value is therefore written as a Unicode escape.

    Raises
    ------
    TypeError
        If a value is of a type that Flower does not take.
    ValueError
        If a key is not a TOML key, or a value does not fit Flower's messages.
    """
    for key in config:
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"{key!r} cannot be a run-config key: use letters, digits, '-', '_' and dots."
            )
        parents = key.split(".")[:-1]
        if any(".".join(parents[: i + 1]) in config for i in range(len(parents))):
            raise ValueError(f"{key!r} lies below another key of the same run config.")
    return " ".join(f"{key}={_format_value(key, value)}" for key, value in config.items())


def _format_value(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{key}: {number} does not fit into 64 bits.")
        return str(number)
    if isinstance(value, float):
        # float() first: NumPy's float64 is a float that prints itself differently.
        number_text = repr(float(value))
        return number_text if math.isfinite(value) else number_text.lower()
    if isinstance(value, str):
        return f'"{_escape(key, str.__str__(value))}"'
    raise TypeError(
        f"{key}: a run config holds bool, int, float and str, not {type(value).__name__}."
    )


def _escape(key: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{key}: the value is not valid Unicode text.") from None
    return "".join(
        _ESCAPES.get(c, c) if c != '"' and (c.isprintable() or c in _ESCAPES) else _codepoint(c)
        for c in text
    )


def _codepoint(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def python_path() -> str:
    """Return a ``PYTHONPATH`` with this repository before what is in that of this process."""
    return os.pathsep.join(filter(None, (str(APP), os.environ.get("PYTHONPATH"))))


def new_token() -> str:
    """Return a value for `TOKEN_VARIABLE` that no other launch has."""
    return secrets.token_hex(16)


def free_port() -> int:
    """Return a TCP port on the loopback interface that nothing listens on."""
    # Not the global generator: picking a port must not change anyone's random numbers.
    for port in random.SystemRandom().sample(_PORTS, k=200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
    raise OSError(f"No free port between {_PORTS.start} and {_PORTS.stop}.")


def accepts_connections(port: int) -> bool:
    """Whether something listens on this loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((LOOPBACK, port)) == 0


@contextmanager
def launch_folder() -> Iterator[Path]:
    """Give a private temporary folder for one launch, and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fedpsa-"))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, also when a process that is just ending still writes into it."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def flower_environment(folder: Path, token: str) -> dict[str, str]:
    """Return the environment variables for the processes of one launch.

    Flower and Ray keep their state in the launch's private folder; Ray only if the path is short
    enough.
    """
    environment = dict(os.environ)
    # A Ray cluster that is already running somewhere must not get our clients.
    environment.pop("RAY_ADDRESS", None)
    environment.update(
        {
            TOKEN_VARIABLE: token,
            "FLWR_HOME": str(folder / "flwr"),
            **QUIET,
            # The app runs in the environment that this launcher runs in.
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            # Flower starts its other commands by their bare names.
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
            ),
            # Process titles otherwise overwrite the variables that /proc shows, the token among
            # them.
            "SPT_NOENV": "1",
        }
    )
    # A proxy for the outside world must not get the requests to our own ports.
    for name in ("no_proxy", "NO_PROXY"):
        present = [environment[name]] if environment.get(name) else []
        environment[name] = ",".join([*present, LOOPBACK, "localhost"])
    if len(os.fsencode(folder)) <= _LONGEST_RAY_FOLDER:
        environment["RAY_TMPDIR"] = str(folder)
    return environment
