"""Tell the SuperLink which nodes may connect: ``python -m jobs.register``."""

from __future__ import annotations

from pathlib import Path

from jobs.control import connect
from simulation.engines.flower.superlink import flwr_json
from simulation.errors import LaunchFailed

# Flower's words for a key it has seen. One that was put out stays out.
_KNOWN = "already in use"


def register_nodes(public_dir: Path) -> int:
    """Register the ``node.pub`` in every folder under its name; return how many there are."""
    keys = sorted(public_dir.glob("*/node.pub"))
    for path in keys:
        name = path.parent.name
        try:
            answer = flwr_json("supernode", "register", str(path), "--name", name)
        except LaunchFailed as failure:
            if _KNOWN not in str(failure).lower():
                raise
            print(f"The key of {name} is known already.")
        else:
            print(f"{name} is registered as node {answer['node-id']}.")
    return len(keys)


def main() -> None:
    """Register the nodes of this deployment."""
    connect()
    try:
        number = register_nodes(Path("/public"))
    except LaunchFailed as failure:
        raise SystemExit(str(failure)) from None
    if number == 0:
        raise SystemExit("There is no public key to register.")


if __name__ == "__main__":
    main()
