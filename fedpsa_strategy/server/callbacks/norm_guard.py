"""A limit on how large an update may be."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.replies import TrainReply

ACTIONS = ("reject", "clip")
_WINDOW = 50  # clients whose norms are remembered
_FEWEST = 3  # norms from which on there is a median
_ENOUGH = 7  # norms from which on three of ten clients cannot be most of them
_GENEROUS = 10  # model norms that an update may be long, times the ratio, while few are known


class NormGuard(Callback):
    """Rejects or clips updates whose norm ||Δ|| is above a limit.

    The limit of `ratio` is a multiple of a median: that of the last norms of the 50 clients that
    were heard last, one a client. Norms of rejected updates are among them. So a client that
    answers more often than others weighs no more than they do, and when the norms of most clients
    change, the median follows them: honest clients are not locked out, however their norms move.

    Three clients make a median. Before that, and so that the first of them need not be honest, an
    update is also compared with the model itself: until seven clients were heard, one that is
    longer than 10 · ratio · max(1, ||w||) counts only if four were, and it is within the ratio of
    their smallest norm. In a federation of fewer than three clients nobody can tell who is the odd
    one, and `ratio` limits nothing.

    Parameters
    ----------
    most : float (default: 0.0)
        The largest norm; 0: no limit.
    ratio : float (default: 0.0)
        The largest multiple of the median norm; 0: no limit.
    action : "reject" or "clip" (default: "reject")
        What happens to a larger one: it is refused, or scaled down to the limit.
    """

    saved = ("_norms",)

    def __init__(self, most: float = 0.0, ratio: float = 0.0, action: str = "reject") -> None:
        check_range("most", most, least=0)
        check_range("ratio", ratio, least=0)
        if action not in ACTIONS:
            raise ValueError(f"action is {action!r}, must be one of {ACTIONS}")
        self.most = most
        self.ratio = ratio
        self.action = action
        self._norms: dict[int, float] = {}  # by client, the one heard last at the end

    def begin(self, run: RunState) -> None:
        """Forget the norms of another run."""
        super().begin(run)
        self._norms = {}

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Return the update, scaled down if it has to be; raises InvalidReplyError.

        Its norm is remembered, whatever becomes of it.
        """
        norm = math.sqrt(reply.squared_norm)
        self._remember(task.client, norm)
        limit = self._limit(self.run.model.norm, len(self.run.clients))
        if norm > limit and self.action == "reject":
            raise InvalidReplyError(f"the update's norm {norm:.4g} is above {limit:.4g}")
        return clipped(reply, limit)

    def _remember(self, client: int, norm: float) -> None:
        self._norms.pop(client, None)
        self._norms[client] = norm
        if len(self._norms) > _WINDOW:
            del self._norms[next(iter(self._norms))]

    def _limit(self, model_norm: float, num_clients: int) -> float:
        """Return the largest norm that is allowed now."""
        limit = self.most or math.inf
        if not self.ratio or num_clients < _FEWEST:
            return limit
        known = self._norms.values()
        if len(known) >= _FEWEST:
            limit = min(limit, self.ratio * median(known))
        if len(known) < min(_ENOUGH, num_clients):
            generous = self.ratio * _GENEROUS * max(1.0, model_norm)
            # Among the first three the smallest may be a liar's; with the fourth it is honest.
            within = self.ratio * min(known) if len(known) > min(_FEWEST, num_clients - 1) else 0.0
            limit = min(limit, max(generous, within))
        return limit


def clipped(reply: TrainReply, limit: float) -> TrainReply:
    """Return a reply whose update is scaled down to the norm `limit`, if it is longer."""
    norm = math.sqrt(reply.squared_norm)
    if norm <= limit:
        return reply
    delta = reply.delta * reply.delta.dtype.type(limit / norm)
    return replace(reply, delta=delta, squared_norm=limit * limit)
