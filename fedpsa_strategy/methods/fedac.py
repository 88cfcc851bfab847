"""FedAC's weights: updates that go where the model has gone since count more.

At K uploads, with x the global model and x_i what client i started from,

    w_i = max(cos(x - x_i, Δ_i), 0.1),    x <- x + η Σ w_i Δ_i / Σ w_i.

A measure of similarity that needs neither a sketch nor a calibration batch: the control for κ. This
is the weight alone, without FedAC's momentum and its correction at the client. An update that is
not stale has x = x_i, no direction to compare with, and so the smallest weight; that is how the
formula reads. Source: Zang, Xue, Ou, Chu, Du, Long, Efficient Asynchronous Federated Learning with
Prospective Momentum Aggregation and Fine-Grained Correction, AAAI 2024. This rests on its abstract,
which speaks of the similarity of the two directions; the formula is as others report it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import (
    Buffered,
    Row,
    Rule,
    Update,
    Vector,
    cosine_of,
    normalised,
    setting,
)


class FedACRule(Rule):
    """The server's half of FedAC's weights (formula: see the module)."""

    settings: FedACMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []

    def add(self, update: Update) -> Vector | None:
        """Weigh the update; aggregate when the buffer is full."""
        # The model does not move before the buffer is full: now is as good as then.
        similarity = 0.0
        if update.staleness:  # without it, x and what was sent may still differ by rounding
            similarity = cosine_of(self.model - update.start, update.delta)
        self.buffer.append((update.delta, max(similarity, self.settings.least_weight)))
        self.report = {"similarity": similarity}
        if len(self.buffer) < self.settings.buffer_size:
            return None
        deltas, shares = zip(*self.buffer, strict=True)
        self.state_weights = normalised(shares)
        weights = [self.settings.server_lr * share for share in self.state_weights]
        self.buffer.clear()
        return self.take_step(weights, deltas)


@dataclass(frozen=True)
class FedACMethod(Buffered):
    """Buffer of updates, weighted by how much they agree with where the model has gone since."""

    name = "fedac"
    label = "FedAC weights"
    colour = "#a0522d"
    rule = FedACRule
    table = Row(
        aggregated="updates Δ",
        when="every K uploads",
        weight="max(cos(x − x_start, Δ), 0.1), normalised, times η",
        memory="K·d",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
    least_weight: float = setting(
        0.1, "weight of updates that do not agree, before normalising", above=0, most=1
    )
