"""FADAS: AMSGrad on the mean of a buffer, with a rate that falls when an update is very stale.

At M uploads, with Δ = (1/M) Σ Δ_i and all products element by element,

    m <- β1 m + (1 - β1) Δ,    v <- β2 v + (1 - β2) Δ²,    v^ <- max(v^, v),
    x <- x + η_t m / (√v^ + ε),

where η_t = η if the stalest of the M updates has τ_max <= τ_c, and min(η, 1/τ_max) otherwise. There
is no bias correction. Source: Wang, Wang, Lu, Chen, FADAS: Towards Federated Adaptive Asynchronous
Optimization, ICML 2024 (arXiv 2407.18365). The authors' own code (yujiaw98/FADAS) has the same β1,
β2, ε and τ_c, but divides η by τ_max, which is `delay_law = "divide"`, and corrects the bias of
both moments, which shortens the first steps to as little as half. Some ports add ε under the root.
With the default η the cap 1/τ_max would need a staleness of a thousand: it is for large η.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpsa_strategy.methods.base import (
    Buffered,
    BufferedRule,
    Row,
    Update,
    Vector,
    blocks,
    setting,
)


class FADASRule(BufferedRule):
    """The server's half of FADAS (formula: see the module)."""

    settings: FADASMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with all moments at 0."""
        super().start(model)
        self.first = np.zeros_like(model)  # m
        self.second = np.zeros_like(model)  # v
        self.largest = np.zeros_like(model)  # v^

    def rate(self, staleness: int) -> float:
        """Return η_t for the largest staleness of a buffer."""
        own = self.settings
        if staleness <= own.delay_threshold:
            return own.adaptive_lr
        divide = own.delay_law == "divide"
        return own.adaptive_lr / staleness if divide else min(own.adaptive_lr, 1 / staleness)

    def aggregate(self, updates: list[Update]) -> Vector:
        """Take a step of AMSGrad along the buffer's mean."""
        own, number = self.settings, self.model.dtype.type
        rate = self.rate(max(update.staleness for update in updates))
        model = np.empty_like(self.model)
        for part in blocks(len(model)):
            mean = np.zeros_like(model[part])
            for update in updates:
                mean += update.delta[part]
            mean /= number(len(updates))
            first, second, largest = self.first[part], self.second[part], self.largest[part]
            first += number(1 - own.beta1) * (mean - first)
            second += number(1 - own.beta2) * (mean * mean - second)
            np.maximum(largest, second, out=largest)
            step = first / (np.sqrt(largest) + number(own.epsilon))
            model[part] = self.model[part] + number(rate) * step
        self.version_report = {
            "weights": [1 / len(updates)] * len(updates),
            "effective_number": float(len(updates)),
            "step": rate,
        }
        return model


@dataclass(frozen=True)
class FADASMethod(Buffered):
    """AMSGrad at the server on the mean of a buffer; very stale buffers take smaller steps."""

    name = "fadas"
    label = "FADAS"
    colour = "#8c6d31"
    rule = FADASRule
    table = Row(
        aggregated="updates Δ",
        when="every K uploads",
        weight="1/K, then AMSGrad with η, or min(η, 1/τ_max) beyond a delay of τ_c",
        memory="(2K + 3)·d at most: with its update the start of each",
    )

    adaptive_lr: float = setting(0.001, "η of AMSGrad at the server", above=0)
    beta1: float = setting(0.9, "β1: memory of the first moment", least=0, most=0.999999)
    beta2: float = setting(0.99, "β2: memory of the second moment", least=0, most=0.999999)
    epsilon: float = setting(1e-8, "ε beside the root of the second moment", above=0)
    delay_threshold: int = setting(
        1, "τ_c: staleness of an update beyond which the rate falls", least=0
    )
    delay_law: str = setting(
        "cap",
        "the rate beyond it: min(η, 1/τ) as in the paper, or η/τ",
        choices=("cap", "divide"),
    )
