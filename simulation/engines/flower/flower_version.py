"""What differs between releases of Flower, in one place.

Up to 1.39 SuperNodes reach the SuperLink's Fleet API over gRPC on an address of its own; from 1.40
on over HTTP, on the port that also serves everything else.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

_LAST_WITH_GRPC = (1, 39)


@cache
def fleet_over_grpc() -> bool:
    """Return whether SuperNodes talk gRPC in the installed release."""
    major, minor = version("flwr").split(".")[:2]
    return (int(major), int(minor)) <= _LAST_WITH_GRPC


def fleet_options(fleet_address: str) -> list[str]:
    """Return the options that make a SuperLink serve SuperNodes at an address, ``host:port``.

    Without gRPC it has to be the SuperLink's own address.
    """
    return [f"--fleet-api-address={fleet_address}"] if fleet_over_grpc() else []
