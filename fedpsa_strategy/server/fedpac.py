"""FedPAC as a Flower strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.fedpac import FedPACMethod, FedPACRule
from fedpsa_strategy.server.callbacks.head_statistics import HeadStatistics
from fedpsa_strategy.server.strategy import AsyncStrategy


class FedPAC(AsyncStrategy):
    """Personalised, synchronous: shared encoder, own heads (`fedpsa_strategy.methods.fedpac`).

    A train message carries the encoder with the client's own head, and the global centroids in the
    record `fedpac`; the reply's record of that name carries what the rule needs. Clients have to
    train in FedPAC's way: see `fedpsa_strategy.client.fedpac`.

    Parameters
    ----------
    head_keys : Sequence[str]
        Keys of the head's arrays, the last trainable ones (weight and bias of a linear layer).
    num_classes : int
        Number of classes.
    num_features : int
        Length of the encoder's output.
    method : FedPACMethod (default: None)
        The method; None makes one from the keyword arguments that are its settings.
    **kwargs : Any
        Settings of `FedPACMethod` (`alignment`, `head_lr`, `head_epochs`), and arguments of
        `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        head_keys: Sequence[str],
        num_classes: int,
        num_features: int,
        method: FedPACMethod | None = None,
        **kwargs: Any,
    ) -> None:
        check_range("num_classes", num_classes, least=1)
        check_range("num_features", num_features, least=1)
        if method is None:
            method = FedPACMethod.taken_from(kwargs)
        self.method = method
        self._fedpac = FedPACRule(self.method)
        super().__init__(rule=self._fedpac, **kwargs)
        self.head_keys = list(head_keys)
        self.callbacks.append(HeadStatistics(self.head_keys, num_classes, num_features))

    def personal_heads(self) -> dict[int, tuple[dict[str, np.ndarray[Any, Any]], Any]]:
        """Return every known client's own head (by key) and its class counts."""
        layout, rule = self.state.layout, self._fedpac
        model = rule.model.copy()
        found = {}
        for client, head in rule.heads.items():
            model[rule.head] = head
            arrays = {key: layout.view(model, key).copy() for key in self.head_keys}
            found[client] = (arrays, rule.counts[client])
        return found
