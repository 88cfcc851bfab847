"""Midpoint with a part taken out or put in the place of another: methods of ablations alone.

They are named as anybody's own method is, `module:Class`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpsa_strategy.methods.base import Sketched, SketchedRule, Update, Vector
from fedpsa_strategy.methods.fedpsa import cosine, softmax
from fedpsa_strategy.methods.midpoint import MidpointMethod, MidpointRule

_TEMPERATURE = 0.5  # FedPSA's, when updates have become small


def _expected_of(rule: MidpointRule, client: int) -> Vector:
    """Return β h_i, zeros for a client never seen."""
    last = rule.memory.get(client)
    number = rule.model.dtype.type(rule.expected)
    return np.zeros_like(rule.model) if last is None else number * last


class UncalibratedRule(MidpointRule):
    """Clients start x - θ h_i; x moves along the plain mean of the buffer."""

    def add(self, update: Update) -> Vector | None:
        """Forget what calibrates, remember what shifts."""
        self.mean_before[:] = 0
        self.residual += _expected_of(self, update.client)
        return super().add(update)


@dataclass(frozen=True)
class Uncalibrated(MidpointMethod):
    """The shift without CA2FL's calibration."""

    label = "without calibration"
    rule = UncalibratedRule


class RelaxedStartRule(MidpointRule):
    """Clients start x + θ (x - y_i), y_i being the model with which they last ended.

    FedInit's shift, in the place of Midpoint's; the calibration stays.
    """

    def start(self, model: Vector) -> None:
        """Begin from `model`, without any client's last model."""
        super().start(model)
        self.ends: dict[int, Vector] = {}

    def start_for(self, client: int) -> Vector:
        """Return x + θ (x - y_i)."""
        if client not in self.ends:
            return self.model
        shift = self.model.dtype.type(self.settings.shift)
        return self.model + shift * (self.model - self.ends[client])

    def add(self, update: Update) -> Vector | None:
        """Note where the client ended."""
        self.ends[update.client] = update.start + update.delta
        return super().add(update)


@dataclass(frozen=True)
class RelaxedStart(MidpointMethod):
    """FedInit's shift with CA2FL's calibration."""

    label = "FedInit's shift"
    rule = RelaxedStartRule


class KappaResidualsRule(MidpointRule, SketchedRule):
    """FedPSA's weights, softmax(κ / δ), on the residuals of a buffer instead of 1/K."""

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.residuals: list[Vector] = []
        self.kappas: list[float] = []

    def add(self, update: Update) -> Vector | None:
        """Weigh the residuals when the buffer is full."""
        self.kappas.append(cosine(update.metrics["sketch"], self.global_sketch))
        self.residuals.append(update.delta - _expected_of(self, update.client))
        if len(self.residuals) == self.settings.buffer_size:
            weights, number = softmax(self.kappas, _TEMPERATURE), self.model.dtype.type
            # What the rule adds of the last one comes on top of this.
            self.residual[:] = -self.residuals[-1]
            for weight, residual in zip(weights, self.residuals, strict=True):
                self.residual += number(weight * len(weights)) * residual
            self.residuals, self.kappas = [], []
        return super().add(update)


@dataclass(frozen=True)
class KappaResiduals(Sketched, MidpointMethod):
    """Midpoint whose residuals are weighted by FedPSA's κ."""

    label = "κ weighs residuals"
    rule = KappaResidualsRule
