"""`python -m fedpsa_strategy.watch.dashboard runs/<run> [runs/<other> ...]`."""

from __future__ import annotations

import argparse
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

import uvicorn

from fedpsa_strategy.watch.dashboard.app import is_loopback, make_app
from fedpsa_strategy.watch.dashboard.library import Library, NoRunError


def main(arguments: list[str] | None = None) -> int:
    """Serve the dashboard until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m fedpsa_strategy.watch.dashboard",
        description="Show runs in a browser, live while they run.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", default=8050, type=int, help="0: any free one (%(default)s)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args(arguments)
    try:
        library = Library(options.folders)
        found = socket.getaddrinfo(options.host, None, type=socket.SOCK_STREAM)[0]
        server = socket.create_server((found[4][0], options.port), family=found[0])
    except NoRunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (OSError, OverflowError) as error:
        where = f"{options.host}:{options.port}"
        print(f"Error: cannot listen on {where} ({error}): choose --port", file=sys.stderr)
        return 2
    host, port = server.getsockname()[:2]
    loopback = is_loopback(host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    print(f"Dashboard: {url} (Ctrl+C ends it)", flush=True)
    if not loopback:
        print(
            f"Warning: {host} is reachable from other machines, and everyone who reaches it can "
            "read these runs",
            file=sys.stderr,
        )
    if options.open:
        webbrowser.open(url)
    config = uvicorn.Config(make_app(library, loopback=loopback), log_level="warning")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[server])
    return 0


if __name__ == "__main__":
    sys.exit(main())
