"""What can go wrong with a launch, in words a reader can act on."""

from __future__ import annotations

from typing import Any


class RunFailed(RuntimeError):  # noqa: N818 - says what happened, like a status
    """A run was started, or was about to be, and did not complete.

    The reason is one sentence; `log_tail` has the last lines of the log that explains it, and
    `summary` what the ServerApp wrote, if it did.
    """

    def __init__(
        self, reason: str, *, log_tail: str = "", summary: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{reason}\n{log_tail}" if log_tail else reason)
        self.reason = reason
        self.log_tail = log_tail
        self.summary = summary


class LaunchFailed(RunFailed):
    """The engine did not come up, or refused the run, so that no run took place."""


class Refused(LaunchFailed):
    """What was asked for cannot be run; nothing was started."""


class RunTimeout(RunFailed):
    """The caller's time limit passed while the run was still going on."""
