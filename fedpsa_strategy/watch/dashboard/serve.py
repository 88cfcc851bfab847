"""Serves the live page."""

from __future__ import annotations

import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from fedpsa_strategy.watch.dashboard.app import is_loopback, make_app
from fedpsa_strategy.watch.dashboard.library import Library
from fedpsa_strategy.watch.runs import NotARunError


def serve(folders: Sequence[Path], host: str, port: int, *, open_page: bool = False) -> int:
    """Serve the live page of runs, or folders of runs, until interrupted; return the exit code.

    Port 0 takes any free one.
    """
    try:
        library = Library(folders)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        server = socket.create_server((found[4][0], port), family=found[0])
    except NotARunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (OSError, OverflowError) as error:
        where = f"{host}:{port}"
        print(f"Error: cannot listen on {where} ({error}): choose --port", file=sys.stderr)
        return 2
    address, bound = server.getsockname()[:2]
    loopback = is_loopback(address)
    url = f"http://{f'[{address}]' if ':' in address else address}:{bound}/"
    print(f"Dashboard: {url} (Ctrl+C ends it)", flush=True)
    if not loopback:
        print(
            f"Warning: {address} is reachable from other machines, and everyone who reaches it can "
            "read these runs",
            file=sys.stderr,
        )
    if open_page:
        webbrowser.open(url)
    # uvicorn's own log configuration would close all other handlers in this process.
    app = make_app(library, loopback=loopback)
    config = uvicorn.Config(app, log_config=None, log_level="warning")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[server])
    return 0
