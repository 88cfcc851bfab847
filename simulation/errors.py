"""What can go wrong with a launch, in words a reader can act on."""

from __future__ import annotations

from typing import Any


class RunFailed(RuntimeError):  # noqa: N818 - says what happened, like a status
    """A run was started, or was about to be, and did not complete.

    Parameters
    ----------
    reason : str
        What happened, in one sentence.
    log_tail : str (default: "")
        The last lines of the log that explains it.
    summary : dict[str, Any] | None (default: None)
        The summary the ServerApp wrote, if it wrote one.

    Attributes
    ----------
    reason, log_tail, summary
        As given.
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
