"""Joining a Ray cluster, or starting one of this machine alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from simulation.engines.flower.processes import exit_on_signals
from simulation.errors import LaunchFailed, Refused

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own variable for the address of the cluster; an option says otherwise."""

_ANSWER_SECONDS = 10.0


def cluster_address(option: str | None) -> str | None:
    """Return the address of the cluster that is to be joined; None: there is none.

    The command line's option is ``host:port``, "auto", or "local" for none; anything else is
    `Refused`.
    """
    address = os.environ.get(ADDRESS_VARIABLE, "") if option is None else option
    source = ADDRESS_VARIABLE if option is None else "--ray-address"
    if address in ("", "local"):
        return None
    if address == "auto":
        return address
    if "://" in address:
        raise Refused(
            f"{source} = {address}: Ray's client is not supported; run this command on a machine of"
            " the cluster, with 'auto' or HOST:PORT"
        )
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refused(f"{source} = {address}: must be HOST:PORT, 'auto' or 'local'")
    return address


@contextmanager
def joined(
    address: str | None, runtime_env: Mapping[str, Any], *, show_output: bool = True
) -> Iterator[str]:
    """Connect this process to a cluster, while the ``with`` block runs; yield its address.

    Without an address Ray is started on this machine's processors alone, and ends with the block.
    The runtime environment is the code for its machines. `LaunchFailed` says that there is no such
    cluster, or that this machine is not part of it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if address is not None and address != "auto":
        _check_answers(address)
    try:
        with warnings.catch_warnings(), _same_sigterm():
            # Ray will change a default, which the code for the machines sets.
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(
                address=address or "local",
                runtime_env=dict(runtime_env),
                include_dashboard=False,
                log_to_driver=show_output,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise LaunchFailed(_why_not(address, error)) from error
    try:
        with exit_on_signals():
            yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray puts one in its place that takes it for a crash."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        raise LaunchFailed(
            f"No Ray cluster answers at {address}: {error}. `ray start --head --port={port}` on"
            " that machine starts one."
        ) from error


def _why_not(address: str | None, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if address is None:
        return f"Ray does not start on this machine: {lines[0]}"
    if address == "auto" and isinstance(error, ConnectionError):
        return (
            "No Ray cluster runs on this machine. `ray start --head` starts one, `ray start"
            " --address=HOST:PORT` joins one."
        )
    return (
        f"The Ray cluster at {address} cannot be joined: {' '.join(lines)}\nThis machine must be"
        f" part of it: `ray start --address={address}`."
    )
