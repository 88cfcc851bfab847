"""The log of a run as a reader wants to see it."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What Flower and Ray say in every run and what says nothing about this one. Lines are compared
# without colours; only whole known messages are left out, so that no error ever is.
_NOISE = re.compile(
    r"""
    (INFO|WARNING)\s*:\s*(
        Starting\ logstream\ for\ run_id.*
      | Starting\ Flower\ Simulation
      | Start\ `flwr-serverapp`\ process
      | Since\ flwr\ 1\.32,\ default\ simulated\ SuperNodes\ changed.*
      | Federation\ `.*`\ \(\d+\ simulated\ SuperNodes\)
      | To\ change\ federation\ size,\ use\ the\ following\ command:
      | flwr\ federation\ simulation-config\ .*
      )?
    | Using\ SuperLink:.*
    | Successfully\ installed\ \S+\ to\ .*
    | .*FutureWarning:\ Tip:\ In\ future\ versions\ of\ Ray.*
    | \s*warnings\.warn\(
    | \(ClientAppActor\ pid=\d+\)\ WARNING\s*:\s*Manually\ terminating\ ClientAppActor.*
    """,
    re.VERBOSE,
)


def readable(line: str, *, colours: bool) -> str | None:
    """Return a line of a run's log for the reader, or None if it is noise.

    Colours stay if the reader's terminal shows them.
    """
    plain = _COLOURS.sub("", line)
    if _NOISE.fullmatch(plain.rstrip()):
        return None
    return line if colours else plain
