"""What no honest training does: checks that are always on, wide enough to never meet it."""

from __future__ import annotations

import math

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Task
from fedpsa_strategy.wire.replies import TrainReply

_LARGEST_STEP = 1e6
_MOST_EXAMPLES = 1e9  # where nobody has told how much data there is
_MOST_OF_FLEET = 1000  # times the fleet's median
_MOST_OF_OWN = 100  # times what the client said before


class Plausible(Callback):
    """Refuses steps and amounts of data that no honest client has.

    Parameters
    ----------
    weight_key : str
        The metric that tells the amount of data.
    """

    def __init__(self, weight_key: str) -> None:
        self._weight_key = weight_key

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Return the reply as it is; raises InvalidReplyError."""
        self._check_step(task, math.sqrt(reply.squared_norm))
        self._check_num_examples(task, reply.num_examples)
        return reply

    def _check_step(self, task: Task, norm: float) -> None:
        """Refuse an update after which there might be no finite model."""
        start_norm, largest_norm = task.start.norm, self.run.layout.largest_norm
        limit = _LARGEST_STEP * max(1.0, start_norm)
        if norm > limit:
            raise InvalidReplyError(
                f"the update's norm {norm:.4g} is above {limit:.4g}, {_LARGEST_STEP:.0e} times "
                "that of the model it was made from: no training takes such a step"
            )
        if not norm + max(start_norm, self.run.model.norm) <= largest_norm:
            raise InvalidReplyError(
                f"the update's norm {norm:.4g} takes the model's beyond {largest_norm:.4g}, the "
                "largest of its number format"
            )

    def _check_num_examples(self, task: Task, value: float) -> None:
        """Refuse an amount of data that would outweigh all other clients'."""
        clients = self.run.clients
        own, of_fleet = clients[task.client].num_examples, clients.median_num_examples
        limit = _MOST_EXAMPLES
        if of_fleet is not None:
            limit = min(_MOST_OF_FLEET * of_fleet, _MOST_OF_OWN * max(own or 0.0, of_fleet))
        if value > limit:
            raise InvalidReplyError(
                f"metrics[{self._weight_key!r}] is {value:.4g}, above {limit:.4g}: the clients' "
                f"median is {'unknown' if of_fleet is None else format(of_fleet, '.4g')}"
            )
