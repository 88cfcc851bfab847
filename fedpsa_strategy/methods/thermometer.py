"""The training thermometer: how large updates are, relative to the beginning."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass
class Thermometer:
    """How large the last updates were on average, relative to the first ones.

    Parameters
    ----------
    gamma : float
        γ: how much of the temperature follows the norms.
    delta : float
        δ: the temperature's floor.
    queue : deque[float]
        The last L_q squared norms; its `maxlen` is L_q.
    reference : float | None (default: None)
        M0: their mean when the queue was first full.
    """

    gamma: float
    delta: float
    queue: deque[float]
    reference: float | None = None

    def push(self, squared_norm: float) -> None:
        """Record one upload's ||Δ||²."""
        self.queue.append(squared_norm)
        if self.reference is None and len(self.queue) == self.queue.maxlen:
            self.reference = self._mean()

    @property
    def temperature(self) -> float | None:
        """Temp = M / M0 · γ + δ, or None as long as the queue has never been full."""
        if self.reference is None:
            return None
        ratio = self._mean() / self.reference if self.reference > 0 else 1.0
        return ratio * self.gamma + self.delta

    def _mean(self) -> float:
        # fsum: exact, so the value does not depend on which queue slot holds which norm.
        try:
            return math.fsum(self.queue) / len(self.queue)
        except OverflowError:  # the sum is beyond all floats, the mean is not
            return math.fsum(norm / len(self.queue) for norm in self.queue)
