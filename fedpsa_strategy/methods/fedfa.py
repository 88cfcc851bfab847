"""FedFa: fully asynchronous, the mean of a sliding window of client models.

A queue holds the last K client models y = x_start + Δ. Until it is full the global model does not
move; from then on every upload replaces the oldest and makes a version:

    x = (1/K) Σ queue,    incrementally  x <- x + (y_new - y_old) / K,

re-summed from time to time against drift. Uniform mean, no staleness weight. Source: Xu et al.,
FedFa: A Fully Asynchronous Training Paradigm for Federated Learning, IJCAI 2024 (other methods
share the name).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.base import Rule, Update, Vector, blocks


class FedFaRule(Rule):
    """The server's half of FedFa (formula: see the module).

    Parameters
    ----------
    queue_length : int (default: 5)
        K: models in the window.
    resum_every : int (default: 50)
        The mean is summed anew every so many versions.
    """

    def __init__(self, queue_length: int = 5, resum_every: int = 50) -> None:
        check_range("queue_length", queue_length, least=1)
        check_range("resum_every", resum_every, least=1)
        self.queue_length = queue_length
        self.resum_every = resum_every
        self.uploads_kept = queue_length - 1

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty window."""
        super().start(model)
        self.queue: deque[Vector] = deque()
        self.since_sum = 0

    def add(self, update: Update) -> Vector | None:
        """Slide the window."""
        newest = update.start + update.delta
        self.queue.append(newest)
        if len(self.queue) < self.queue_length:
            return None
        if len(self.queue) > self.queue_length and self.since_sum < self.resum_every:
            oldest = self.queue.popleft()
            length = self.model.dtype.type(self.queue_length)
            model = np.empty_like(self.model)
            for part in blocks(len(model)):
                model[part] = self.model[part] + (newest[part] - oldest[part]) / length
            self.model = model
            self.since_sum += 1
        else:
            if len(self.queue) > self.queue_length:
                self.queue.popleft()
            self.model = self.mean()
            self.since_sum = 1
        self.state_weights = [1 / self.queue_length] * self.queue_length
        self.version_report = {
            "weights": self.state_weights,
            "effective_number": float(self.queue_length),
        }
        return self.model

    def mean(self) -> Vector:
        """Return the mean of the window, summed anew in double precision."""
        mean = np.empty_like(self.model)
        for part in blocks(len(mean)):
            total = np.zeros(mean[part].shape, np.float64)
            for model in self.queue:
                total += model[part]
            mean[part] = total / len(self.queue)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the model, the window and when it was last summed."""
        return {"model": self.model, "queue": list(self.queue), "since_sum": self.since_sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
        self.queue.extend(state["queue"])
        self.since_sum = state["since_sum"]
