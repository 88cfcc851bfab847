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
from dataclasses import dataclass

import numpy as np

from fedpsa_strategy.methods.base import Buffered, Row, Rule, Update, Vector, elementwise

_RESUM_EVERY = 50  # versions


class FedFaRule(Rule):
    """The server's half of FedFa (formula: see the module)."""

    settings: FedFaMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty window."""
        super().start(model)
        self.uploads_kept = self.settings.buffer_size - 1
        self.queue: deque[Vector] = deque()
        self.since_sum = 0

    def add(self, update: Update) -> Vector | None:
        """Slide the window."""
        newest = update.start + update.delta
        self.queue.append(newest)
        if len(self.queue) < self.settings.buffer_size:
            return None
        if len(self.queue) > self.settings.buffer_size and self.since_sum < _RESUM_EVERY:
            oldest = self.queue.popleft()
            length = self.model.dtype.type(self.settings.buffer_size)
            self.model = elementwise(
                lambda x, new, old: x + (new - old) / length, self.model, newest, oldest
            )
            self.since_sum += 1
        else:
            if len(self.queue) > self.settings.buffer_size:
                self.queue.popleft()
            self.model = self.mean()
            self.since_sum = 1
        self.state_weights = [1 / self.settings.buffer_size] * self.settings.buffer_size
        self.version_report = {
            "weights": self.state_weights,
            "effective_number": float(self.settings.buffer_size),
        }
        return self.model

    def mean(self) -> Vector:
        """Return the mean of the window, summed again in double precision."""

        def mean(*models: Vector) -> Vector:
            total = np.zeros(len(models[0]), np.float64)
            for model in models:
                total += model
            return total / len(models)

        return elementwise(mean, *self.queue)


@dataclass(frozen=True)
class FedFaMethod(Buffered):
    """The mean of the last few client models, renewed with every upload."""

    name = "fedfa"
    label = "FedFa"
    colour = "#d99a00"
    rule = FedFaRule
    table = Row(
        aggregated="the last K client models",
        when="every upload once K are there",
        weight="1/K",
        memory="K·d",
    )
