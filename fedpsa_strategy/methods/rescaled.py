"""Rescaled steps: a client's update counts in proportion to its response time.

Fast clients report more often, which pulls the model towards their data. At K uploads, T_i being
the time between sending client i its task and its reply taking effect, and T the mean of all such
times so far,

    x <- x + (η/K) Σ (T_i / T) Δ_i,

so that over time every client contributes alike. The mean weight is about 1. Source: Mahran,
Maranjyan, Richtárik, Rescaled Asynchronous SGD: Optimal Distributed Optimization under Data and
System Heterogeneity, 2026 (arXiv 2605.13434), where every worker always works, its computation time
is known, and each gradient makes a step (K = 1). This rests on its abstract, which has the
proportion; the buffer and the measured mean are ours. Where idle clients are sampled, as here, slow
ones are sampled nearly as often as fast ones, and the paper's factor corrects more than there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import Buffered, Row, Rule, Update, Vector, normalised, setting


class RescaledRule(Rule):
    """The server's half of rescaled steps (formula: see the module)."""

    settings: RescaledMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []
        self.uploads = 0
        self.total_time = 0.0

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        self.uploads += 1
        self.total_time += update.response_time
        self.buffer.append((update.delta, update.response_time))
        if len(self.buffer) < self.settings.buffer_size:
            return None
        deltas, times = zip(*self.buffer, strict=True)
        mean = self.total_time / self.uploads
        size, rate = len(times), self.settings.server_lr
        # Replies that take no time at all are alike.
        weights = [rate / size * (time / mean if mean > 0 else 1.0) for time in times]
        self.state_weights = normalised(weights) if sum(weights) > 0 else None
        self.buffer.clear()
        return self.take_step(weights, deltas)


@dataclass(frozen=True)
class RescaledMethod(Buffered):
    """Buffer of updates that count in proportion to their clients' response times."""

    name = "rescaled"
    label = "Rescaled"
    colour = "#b0708a"
    rule = RescaledRule
    table = Row(
        aggregated="updates Δ",
        when="every K uploads",
        weight="η/K times the client's response time over the mean response time",
        memory="K·d",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
