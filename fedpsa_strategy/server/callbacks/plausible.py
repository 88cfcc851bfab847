"""What no honest training does: checks that are always on, wide enough to never meet it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Task
from fedpsa_strategy.wire.replies import TrainReply

_LARGEST_STEP = 1e6
_SUSPICIOUS_STEP = 3  # times the model: in deep models layers multiply even that to infinity
_LARGEST_SKETCH = 1e12
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
        run = self.run
        check_step(
            math.sqrt(reply.squared_norm),
            task.start.norm,
            run.model.norm,
            run.layout.largest_norm,
        )
        clients = run.clients
        check_num_examples(
            self._weight_key,
            reply.num_examples,
            clients[task.client].num_examples,
            clients.median_num_examples,
        )
        return reply


def check_step(norm: float, start_norm: float, model_norm: float, largest_norm: float) -> None:
    """Refuse an update after which there might be no finite model.

    Parameters
    ----------
    norm : float
        ||Δ||.
    start_norm, model_norm : float
        ||w|| of the model that the client was given, and of the current one.
    largest_norm : float
        The largest norm of a model that its number format can hold.
    """
    limit = _LARGEST_STEP * max(1.0, start_norm)
    if norm > limit:
        raise InvalidReplyError(
            f"the update's norm {norm:.4g} is above {limit:.4g}, {_LARGEST_STEP:.0e} times that of "
            "the model it was made from: no training takes such a step"
        )
    if not norm + max(start_norm, model_norm) <= largest_norm:
        raise InvalidReplyError(
            f"the update's norm {norm:.4g} takes the model's beyond {largest_norm:.4g}, the "
            "largest of its number format"
        )


def is_suspicious(norm: float, model_norm: float) -> bool:
    """Tell whether an update is so long that the model after it should be tried first."""
    return norm > _SUSPICIOUS_STEP * max(1.0, model_norm)


def check_sketch_length(sketch: Sequence[float], global_sketch: Sequence[float]) -> None:
    """Refuse a sketch that is too long to belong to any model that is being trained.

    How similar two sketches are does not depend on their lengths, so the limit need not be close.
    Sensitivities are about zero for a model that has learned the calibration batch, hence the 1.
    """
    length, own = math.hypot(*sketch), math.hypot(*global_sketch)
    limit = _LARGEST_SKETCH * max(1.0, own)
    if not length <= limit:
        raise InvalidReplyError(
            f"metrics['sketch'] has the length {length:.4g}, above {limit:.4g}: the global "
            f"model's has {own:.4g}"
        )


def check_num_examples(name: str, value: float, own: float | None, of_fleet: float | None) -> None:
    """Refuse an amount of data that would outweigh all other clients'.

    Parameters
    ----------
    name : str
        The metric's name.
    value : float
        What the reply says.
    own : float or None
        What the client said before, if it did.
    of_fleet : float or None
        The median of what all clients said, if there are enough of them.
    """
    limit = _MOST_EXAMPLES
    if of_fleet is not None:
        limit = min(_MOST_OF_FLEET * of_fleet, _MOST_OF_OWN * max(own or 0.0, of_fleet))
    if value > limit:
        raise InvalidReplyError(
            f"metrics[{name!r}] is {value:.4g}, above {limit:.4g}: the clients' median is "
            f"{'unknown' if of_fleet is None else format(of_fleet, '.4g')}"
        )
