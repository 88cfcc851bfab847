"""A limit on how large an update may be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.replies import TrainReply

ACTIONS = ("reject", "clip")
_WINDOW = 50
_FEWEST = 10  # norms before a median means anything


class NormGuard:
    """Rejects or clips updates whose norm ||Δ|| is above a limit.

    Parameters
    ----------
    most : float (default: 0.0)
        The largest norm; 0: no such limit.
    ratio : float (default: 0.0)
        The largest multiple of the median norm of the last 50 accepted updates, once there are ten;
        0: no such limit.
    action : "reject" or "clip" (default: "reject")
        What happens to a larger one: it is refused, or scaled down to the limit.
    """

    def __init__(self, most: float = 0.0, ratio: float = 0.0, action: str = "reject") -> None:
        check_range("most", most, least=0)
        check_range("ratio", ratio, least=0)
        if action not in ACTIONS:
            raise ValueError(f"action is {action!r}, must be one of {ACTIONS}")
        self.most = most
        self.ratio = ratio
        self.action = action
        self.norms: deque[float] = deque(maxlen=_WINDOW)

    def reset(self, norms: Sequence[float] = ()) -> None:
        """Forget all norms but these."""
        self.norms = deque(norms, maxlen=_WINDOW)

    @property
    def limit(self) -> float:
        """The largest norm that is allowed now."""
        limits = [self.most] if self.most else []
        if self.ratio and len(self.norms) >= _FEWEST:
            limits.append(self.ratio * median(self.norms))
        return min(limits, default=math.inf)

    def check(self, reply: TrainReply) -> TrainReply:
        """Return the update, scaled down if it has to be; raises InvalidReplyError."""
        norm, limit = math.sqrt(reply.squared_norm), self.limit
        if norm > limit:
            if self.action == "reject":
                raise InvalidReplyError(f"the update's norm {norm:.4g} is above {limit:.4g}")
            scale = limit / norm
            delta = reply.delta * reply.delta.dtype.type(scale)
            return replace(reply, delta=delta, squared_norm=limit**2)
        return reply

    def record(self, reply: TrainReply) -> None:
        """Take note of the norm of an update that counts."""
        self.norms.append(math.sqrt(reply.squared_norm))
