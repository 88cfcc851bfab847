"""Health checks of the containers: ``python -m jobs.health superlink`` (or ``node``).

Nothing but the standard library, because this runs every few seconds.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys
from pathlib import Path

CONTROL_PORT, NODE_PORT = 8000, 9094
FLEET_PORT = int(os.environ.get("FLEET_PORT", "9092"))

_TIMEOUT = 5.0
_ESTABLISHED = "01"


def check_superlink() -> None:
    """Fail unless both APIs answer with a certificate of our authority."""
    context = ssl.create_default_context(cafile="/trust/ca.pem")
    connection = http.client.HTTPSConnection(
        "superlink-control", CONTROL_PORT, timeout=_TIMEOUT, context=context
    )
    connection.request("GET", "/health")
    if (status := connection.getresponse().status) != 200:
        raise OSError(f"the Control API answers {status}")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", FLEET_PORT), timeout=_TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname="localhost"),
    ):
        pass


def check_node() -> None:
    """Fail unless the SuperNode answers and has a connection to the SuperLink."""
    connection = http.client.HTTPConnection("127.0.0.1", NODE_PORT, timeout=_TIMEOUT)
    connection.request("GET", "/health")
    if (status := connection.getresponse().status) != 200:
        raise OSError(f"the SuperNode answers {status}")
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    if not any(connected_to(FLEET_PORT, table.read_text()) for table in tables if table.exists()):
        raise OSError("no connection to the SuperLink")


def connected_to(port: int, table: str) -> bool:
    """Whether the kernel's table of TCP connections (/proc/net/tcp) has an open one to a port."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(
        row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == port for row in rows
    )


def main() -> int:
    """Check what the command line names; 0 means healthy."""
    try:
        {"superlink": check_superlink, "node": check_node}[sys.argv[1]]()
    except (OSError, http.client.HTTPException) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
