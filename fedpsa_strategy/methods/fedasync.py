"""FedAsync: every upload is mixed in at once, the less the staler it is.

For an upload that started from x_start, τ versions ago, and ended in y = x_start + Δ,

    α_t = α · s(τ),      x <- (1 - α_t) x + α_t y,

computed afresh for every upload; each makes a version. s(τ) is polynomial, (τ+1)^-a with a = ½ by
default, constant 1, or a hinge (a = 10, b = 4). Clients train with a proximal term
(ρ/2) ||y - x_start||², ρ = 0.005. Source: Xie et al., Asynchronous Federated Optimization, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.base import Rule, Update, Vector, blocks
from fedpsa_strategy.methods.staleness import check_staleness, staleness_factor


class FedAsyncRule(Rule):
    """The server's half of FedAsync (formula: see the module).

    Parameters
    ----------
    mixing : float (default: 0.6)
        α.
    staleness : "polynomial", "constant" or "hinge" (default: "polynomial")
        Which s(τ).
    staleness_exponent : float (default: 0.5)
        a of the polynomial.
    hinge_slope : float (default: 10.0)
        a of the hinge.
    hinge_threshold : float (default: 4.0)
        b of the hinge.
    """

    def __init__(
        self,
        mixing: float = 0.6,
        staleness: str = "polynomial",
        staleness_exponent: float = 0.5,
        hinge_slope: float = 10.0,
        hinge_threshold: float = 4.0,
    ) -> None:
        check_range("mixing", mixing, above=0, most=1)
        check_staleness(staleness, staleness_exponent, hinge_slope, hinge_threshold)
        self.mixing = mixing
        self.staleness = staleness
        self.staleness_exponent = staleness_exponent
        self.hinge_slope = hinge_slope
        self.hinge_threshold = hinge_threshold

    def add(self, update: Update) -> Vector | None:
        """Mix the client's model into the global one."""
        factor = staleness_factor(
            update.staleness,
            self.staleness,
            self.staleness_exponent,
            self.hinge_slope,
            self.hinge_threshold,
        )
        mixing = self.mixing * factor
        number = self.model.dtype.type
        model = np.empty_like(self.model)
        for part in blocks(len(model)):
            client_model = update.start[part] + update.delta[part]
            model[part] = number(1 - mixing) * self.model[part] + number(mixing) * client_model
        self.model = model
        self.state_weights = [mixing]
        self.report = {"staleness_factor": factor}
        self.version_report = {"weights": [mixing], "effective_number": 1.0}
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the model: there is no other state."""
        return {"model": self.model}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
