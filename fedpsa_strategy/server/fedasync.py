"""FedAsync as a Flower strategy."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.fedasync import FedAsyncRule
from fedpsa_strategy.server.strategy import AsyncStrategy, Task


class FedAsync(AsyncStrategy):
    """Mixes every upload in at once, the less the staler (`fedpsa_strategy.methods.fedasync`).

    Parameters
    ----------
    mixing : float (default: 0.6)
        α.
    staleness : "polynomial", "constant" or "hinge" (default: "polynomial")
        Which s(τ).
    staleness_exponent : float (default: 0.5)
        a of the polynomial (1 + τ)^-a.
    hinge_slope : float (default: 10.0)
        a of the hinge.
    hinge_threshold : float (default: 4.0)
        b of the hinge.
    proximal : float (default: 0.005)
        ρ of the clients' proximal term (ρ/2) ||y - x_start||², sent as `proximal` in the train
        config; 0 for none.
    **kwargs : Any
        See `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        mixing: float = 0.6,
        staleness: str = "polynomial",
        staleness_exponent: float = 0.5,
        hinge_slope: float = 10.0,
        hinge_threshold: float = 4.0,
        proximal: float = 0.005,
        **kwargs: Any,
    ) -> None:
        check_range("proximal", proximal, least=0)
        rule = FedAsyncRule(mixing, staleness, staleness_exponent, hinge_slope, hinge_threshold)
        super().__init__(rule=rule, **kwargs)
        self.proximal = proximal

    def task_config(self, task: Task, config: ConfigRecord) -> ConfigRecord:
        """Return the config of a train message, with the proximal term's weight."""
        record = super().task_config(task, config)
        record["proximal"] = self.proximal
        return record
