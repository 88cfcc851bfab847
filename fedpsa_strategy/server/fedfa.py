"""FedFa as a Flower strategy."""

from __future__ import annotations

from typing import Any

from fedpsa_strategy.methods.fedfa import FedFaRule
from fedpsa_strategy.server.strategy import AsyncStrategy


class FedFa(AsyncStrategy):
    """The mean of the last K client models, moved by every upload (`methods.fedfa`).

    Parameters
    ----------
    queue_length : int (default: 5)
        K: models in the window.
    **kwargs : Any
        See `AsyncStrategy`.
    """

    def __init__(self, *, queue_length: int = 5, **kwargs: Any) -> None:
        super().__init__(rule=FedFaRule(queue_length), **kwargs)
