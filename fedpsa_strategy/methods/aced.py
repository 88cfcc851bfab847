"""ACED: ACE without the clients whose last update is too old.

As ACE, but on an upload x moves along the mean of the remembered updates that are not older than a
limit, in versions since the client was given its model:

    A = {i : t - t_i <= limit},    x <- x + η (1/|A|) Σ_{i in A} U_i,

t_i being the version from which U_i was trained; every upload makes a version. If nobody is in A
the model stays. An update that is itself too old gives the version nothing: neither a step nor its
values of arrays that are not trained.

Source: see ACE (arXiv 2511.19066). There is another reading: in public code of the first author
(xchang1121/AsyncFL) t_i is the version that client i holds now, so that at first an update counts
however old it is, and then until its client has been away for too long. There every client is
always at work; here idle ones hold no version.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import Row, Update, Vector, elementwise, setting
from fedpsa_strategy.methods.remembering import Remembering, RememberingRule


class ACEDRule(RememberingRule):
    """The server's half of ACED (formula: see the module)."""

    settings: ACEDMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.started: dict[int, int] = {}  # t_i of the clients that are remembered
        self.version = 0

    def add(self, update: Update) -> Vector | None:
        """Take a step along the mean of what is remembered and not too old."""
        self.version = update.version + update.staleness
        self.remember(update.client, update.delta)
        self.started[update.client] = update.version
        limit = self.settings.age_limit
        for client in [i for i, then in self.started.items() if self.version - then > limit]:
            self.forget(client)
            del self.started[client]
        rate, number = self.settings.server_lr, len(self.started)
        if number:
            self.model = elementwise(lambda x, h: x + rate * (h / number), self.model, self.total)
        # An upload that is itself too old has no part in this version.
        weight = 1 / number if update.client in self.started else 0.0
        self.state_weights = [weight]
        self.version_report = {
            "weights": [rate * weight],
            "effective_number": float(number),
        }
        return self.model


@dataclass(frozen=True)
class ACEDMethod(Remembering):
    """ACE without the clients whose last update is older than a limit."""

    name = "aced"
    label = "ACED"
    colour = "#5fb0b0"
    rule = ACEDRule
    table = Row(
        aggregated="the last updates of the clients that are recent enough",
        when="every upload",
        weight="η over their number",
        memory="(N + 2)·d, N·d of it optionally in half precision or a memory-mapped file",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
    age_limit: int = setting(
        50, "versions since its start after which an update no longer counts", least=0
    )
