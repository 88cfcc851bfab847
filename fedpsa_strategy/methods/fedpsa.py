"""FedPSA: buffered aggregation, weighted by behavioural similarity.

With s~ the sensitivity sketches, Q the queue of the last L_q squared update norms and M0 the mean
of Q when it was first full, an upload (Δ_i, s~_i) gives

    κ_i  = cos(s~_i, s~_global)
    Temp = mean(Q) / M0 · γ + δ

and when L_s uploads are buffered

    w <- w + Σ_i weight_i Δ_i,    weight = softmax(κ / Temp),

uniform (1 / L_s) as long as Q has never been full.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.base import Rule, Update, Vector, effective_number, weighted_step


class Thermometer:
    """The training thermometer: how large updates are, relative to the beginning.

    Parameters
    ----------
    queue_size : int
        L_q: over how many uploads the squared norm is averaged.
    gamma : float
        γ: how much of the temperature follows the norms.
    delta : float
        δ: the temperature's floor.
    """

    def __init__(self, queue_size: int, gamma: float, delta: float) -> None:
        self.gamma = gamma
        self.delta = delta
        self.queue: deque[float] = deque(maxlen=queue_size)
        self.reference: float | None = None

    def push(self, squared_norm: float) -> None:
        """Record one upload's ||Δ||²."""
        self.queue.append(squared_norm)
        if self.reference is None and len(self.queue) == self.queue.maxlen:
            self.reference = self._mean()

    @property
    def temperature(self) -> float | None:
        """Temp, or None as long as the queue has never been full."""
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


class FedPSARule(Rule):
    """The server's half of FedPSA (formula: see the module).

    Parameters
    ----------
    sketch : Callable[[Vector], Sequence[float]]
        s~ of a global model; called once per version.
    buffer_size : int (default: 5)
        L_s: uploads per version.
    queue_size : int (default: 50)
        L_q: length of the thermometer's queue.
    gamma : float (default: 5.0)
        γ of the temperature.
    delta : float (default: 0.5)
        δ of the temperature.
    thermometer : bool (default: True)
        False is the ablation without thermometer: no queue, no warm-up, Temp = 1.
    """

    def __init__(
        self,
        sketch: Callable[[Vector], Sequence[float] | NDArray[Any]],
        buffer_size: int = 5,
        queue_size: int = 50,
        gamma: float = 5.0,
        delta: float = 0.5,
        thermometer: bool = True,
    ) -> None:
        check_range("buffer_size", buffer_size, least=1)
        check_range("queue_size", queue_size, least=1)
        check_range("gamma", gamma, least=0)
        check_range("delta", delta, least=0)
        if gamma + delta == 0:
            raise ValueError("gamma and delta must not both be 0: the temperature would be 0")
        self.sketch = sketch
        self.buffer_size = buffer_size
        self.queue_size = queue_size
        self.gamma = gamma
        self.delta = delta
        self.use_thermometer = thermometer

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer and a cold thermometer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []
        self.thermometer = Thermometer(self.queue_size, self.gamma, self.delta)
        self._global_sketch: list[float] | None = None

    @property
    def global_sketch(self) -> list[float]:
        """s~_global of the current model."""
        if self._global_sketch is None:
            self._global_sketch = np.asarray(self.sketch(self.model), np.float64).tolist()
        return self._global_sketch

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        kappa = cosine(update.metrics["sketch"], self.global_sketch)
        self.buffer.append((update.delta, kappa))
        self.thermometer.push(update.squared_norm)
        temperature = self.thermometer.temperature if self.use_thermometer else 1.0
        self.report = {"kappa": kappa, "temperature": temperature}
        if len(self.buffer) < self.buffer_size:
            return None

        deltas, kappas = zip(*self.buffer, strict=True)
        weights = softmax(kappas, temperature)
        self.model = weighted_step(self.model, weights, deltas)
        self.state_weights = weights
        self.buffer.clear()
        self._global_sketch = None
        self.version_report = {
            "temperature": temperature,
            "kappas": list(kappas),
            "weights": weights,
            "effective_number": effective_number(weights),
        }
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the model, the buffer and the thermometer."""
        return {
            "model": self.model,
            "deltas": [delta for delta, _ in self.buffer],
            "kappas": [kappa for _, kappa in self.buffer],
            "queue": list(self.thermometer.queue),
            "reference": self.thermometer.reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
        self.buffer = list(zip(state["deltas"], state["kappas"], strict=True))
        self.thermometer.queue.extend(state["queue"])
        self.thermometer.reference = state["reference"]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return cos(a, b), 0 if either norm is 0, summed exactly and clipped to [-1, 1]."""
    # Scaling first: the sketches of tiny or huge models must not under- or overflow when squared.
    scale_a, scale_b = max(map(abs, a)), max(map(abs, b))
    if scale_a == 0 or scale_b == 0:
        return 0.0
    a, b = [x / scale_a for x in a], [x / scale_b for x in b]
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return max(-1.0, min(1.0, math.fsum(map(operator.mul, a, b)) / norms))


def softmax(kappas: Sequence[float], temperature: float | None) -> list[float]:
    """Return softmax(κ / Temp), uniform for Temp = None."""
    if temperature is None:
        return [1 / len(kappas)] * len(kappas)
    # With δ = 0 the temperature may reach 0: then the largest κ takes all.
    temperature = max(temperature, sys.float_info.min)
    largest = max(kappas)
    exponentials = [math.exp((kappa - largest) / temperature) for kappa in kappas]
    total = math.fsum(exponentials)
    return [value / total for value in exponentials]
