"""A threshold on staleness, for any rule."""

from __future__ import annotations

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import TooStaleError
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Task
from fedpsa_strategy.wire.replies import TrainReply


class StalenessLimit(Callback):
    """Ignores updates that are staler than a limit; their clients are sent the current model.

    An update with τ >= R is dropped, as in Ringmaster ASGD (Maranjyan, Tyurin, Richtárik, ICML
    2025, arXiv 2501.16168, its first variant; the second also interrupts clients, which cannot be
    done to a Flower client). It is a `reject` event and no failure of the client. Methods in rounds
    have no stale updates.

    Parameters
    ----------
    limit : int
        R, in versions.
    """

    def __init__(self, limit: int) -> None:
        check_range("limit", limit, least=1)
        self.limit = limit

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Refuse an update that is too stale."""
        staleness = self.run.version - task.version
        if staleness >= self.limit:
            raise TooStaleError(f"staler than allowed: {self.limit} versions or more")
        return reply
