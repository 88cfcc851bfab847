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
from collections.abc import Sequence
from dataclasses import dataclass

from fedpsa_strategy.methods.base import (
    Buffered,
    Row,
    Sketched,
    SketchedRule,
    Update,
    Vector,
    setting,
)
from fedpsa_strategy.methods.thermometer import Thermometer


class FedPSARule(SketchedRule):
    """The server's half of FedPSA (formula: see the module)."""

    settings: FedPSAMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer and a cold thermometer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []
        own = self.settings
        self.thermometer = Thermometer(own.gamma, own.delta, deque(maxlen=own.queue_size))

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        kappa = cosine(update.metrics["sketch"], self.global_sketch)
        self.buffer.append((update.delta, kappa))
        self.thermometer.push(update.squared_norm)
        temperature = self.thermometer.temperature if self.settings.thermometer else 1.0
        self.report = {"kappa": kappa, "temperature": temperature}
        if len(self.buffer) < self.settings.buffer_size:
            return None

        deltas, kappas = zip(*self.buffer, strict=True)
        self.state_weights = weights = softmax(kappas, temperature)
        self.buffer.clear()
        model = self.take_step(weights, deltas)
        own = {"temperature": temperature, "kappas": list(kappas)}
        self.version_report = own | self.version_report
        return model


@dataclass(frozen=True)
class FedPSAMethod(Sketched, Buffered):
    """Buffer of updates, weighted by how similarly client and server respond to a batch.

    A thermometer sharpens the weights as training settles.
    """

    name = "fedpsa"
    label = "FedPSA"
    colour = "#d1480f"
    rule = FedPSARule
    table = Row(
        aggregated="updates Δ",
        when="every K = L_s uploads",
        weight="softmax(κ / Temp), κ = cosine of sensitivity sketches; uniform while warming up",
        client="sensitivity and sketch after training",
        memory="K·d + L_q numbers",
        bytes="d + k / d",
    )

    queue_size: int = setting(50, "L_q: length of the thermometer's queue", least=1)
    gamma: float = setting(5.0, "γ: weight of the update norms in the temperature", least=0)
    delta: float = setting(0.5, "δ: floor of the temperature", least=0)
    thermometer: bool = setting(True, "false: the ablation with constant temperature 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma + self.delta == 0:
            raise ValueError("gamma=0 and delta=0 make the temperature 0: raise one of them")

    def unread(self) -> dict[str, str]:
        """Return the settings of a thermometer that is switched off, and others."""
        keys = () if self.thermometer else ("queue-size", "gamma", "delta")
        return super().unread() | dict.fromkeys(keys, "thermometer is false")


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
