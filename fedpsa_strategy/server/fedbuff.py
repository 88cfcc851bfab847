"""FedBuff as a Flower strategy."""

from __future__ import annotations

from typing import Any

from fedpsa_strategy.methods.fedbuff import FedBuffRule
from fedpsa_strategy.server.strategy import AsyncStrategy


class FedBuff(AsyncStrategy):
    """Asynchronous buffered aggregation, damped by staleness (`fedpsa_strategy.methods.fedbuff`).

    Parameters
    ----------
    buffer_size : int (default: 5)
        K: uploads per version.
    server_lr : float (default: 1.0)
        η_g: factor of the aggregated step.
    staleness_exponent : float (default: 0.5)
        a in the factor (1 + τ)^-a; 0 weighs all uploads the same.
    **kwargs : Any
        See `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        buffer_size: int = 5,
        server_lr: float = 1.0,
        staleness_exponent: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(rule=FedBuffRule(buffer_size, server_lr, staleness_exponent), **kwargs)
