"""FedAvg as a strategy on the asynchronous loop."""

from __future__ import annotations

from typing import Any

from fedpsa_strategy.methods.fedavg import FedAvgRule
from fedpsa_strategy.server.strategy import AsyncStrategy


class FedAvg(AsyncStrategy):
    """Synchronous federated averaging (`fedpsa_strategy.methods.fedavg`), under the same clocks.

    The clients of a round are sampled together, and the round lasts as long as the slowest of them:
    the baseline that shows what stragglers cost.

    Parameters
    ----------
    **kwargs : Any
        See `AsyncStrategy`; `fraction_train` or `max_in_flight` is the size of a round.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(rule=FedAvgRule(), **kwargs)
