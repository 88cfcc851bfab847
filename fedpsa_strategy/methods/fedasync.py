"""FedAsync: every upload is mixed in at once, the less the staler it is.

For an upload that started from x_start, τ versions ago, and ended in y = x_start + Δ,

    α_t = α · s(τ),      x <- (1 - α_t) x + α_t y,

computed afresh for every upload; each makes a version. s(τ) is polynomial, (τ+1)^-a with a = ½ by
default, constant 1, or a hinge (a = 10, b = 4). Clients train with a proximal term
(ρ/2) ||y - x_start||², ρ = 0.005. Source: Xie et al., Asynchronous Federated Optimization, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpsa_strategy.methods.base import Method, Row, Rule, Update, Vector, elementwise, setting


class FedAsyncRule(Rule):
    """The server's half of FedAsync (formula: see the module)."""

    settings: FedAsyncMethod

    def add(self, update: Update) -> Vector | None:
        """Mix the client's model into the global one."""
        factor = self.settings.staleness_factor(update.staleness)
        mixing = self.settings.mixing * factor
        new, old = self.model.dtype.type(mixing), self.model.dtype.type(1 - mixing)
        self.model = elementwise(
            lambda x, start, delta: old * x + new * (start + delta),
            *(self.model, update.start, update.delta),
        )
        self.state_weights = [mixing]
        self.report = {"staleness_factor": factor}
        self.version_report = {"weights": [mixing], "effective_number": 1.0}
        return self.model


@dataclass(frozen=True)
class FedAsyncMethod(Method):
    """Every upload is mixed into the model at once, the staler the less."""

    name = "fedasync"
    label = "FedAsync"
    colour = "#c065a0"
    rule = FedAsyncRule
    table = Row(
        aggregated="client models",
        when="every upload",
        weight="α·s(τ), afresh each time",
        client="proximal term (ρ/2)‖y − x_start‖²",
    )

    mixing: float = setting(0.6, "α: weight of a fresh upload", above=0, most=1)
    staleness: str = setting(
        "polynomial",
        "law of the staleness factor",
        choices=("polynomial", "constant", "hinge"),
    )
    staleness_exponent: float = setting(
        0.5, "a in the staleness factor (1+τ)^-a; 0 is the uniform buffer", least=0
    )
    hinge_slope: float = setting(10.0, "a of the hinge", least=0)
    hinge_threshold: float = setting(4.0, "b of the hinge", least=0)
    proximal: float = setting(0.005, "ρ of the clients' proximal term", least=0)

    def staleness_factor(self, staleness: int) -> float:
        """Return s(τ).

        polynomial: (1 + τ)^-a; constant: 1; hinge: 1 up to the threshold b, then
        1 / (slope · (τ - b) + 1).
        """
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((1 + staleness) ** -self.staleness_exponent)
        late = staleness - self.hinge_threshold
        return 1.0 if late <= 0 else 1 / (self.hinge_slope * late + 1)

    def client_config(self) -> dict[str, Any]:
        """Return the weight of the clients' proximal term."""
        return {"proximal": self.proximal}

    def unread(self) -> dict[str, str]:
        """Return the settings of the laws that were not chosen."""
        reason = f"staleness is {self.staleness!r}"
        of_law = {"polynomial": ["staleness-exponent"], "hinge": ["hinge-slope", "hinge-threshold"]}
        return {
            key: reason for law, keys in of_law.items() if law != self.staleness for key in keys
        }

    @property
    def largest_weight(self) -> float:
        """The weight of a fresh update; stale ones have less."""
        return self.mixing
