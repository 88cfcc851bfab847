"""ACE: every upload moves the model by the mean of the last updates of all clients.

The server remembers the last update U_i of every client (0 for those never seen). On an upload of
client j

    h <- h + (Δ_j - U_j) / N,    U_j <- Δ_j,    x <- x + η h,

so that h is always (1/N) Σ U_i, and each upload makes a version. Source: Chang, Yao, Krishnamurthy,
Shelton, Chakraborty, Swami, Oymak, Roy-Chowdhury, Mitigating Participation Imbalance Bias in
Asynchronous Federated Learning, 2025 (arXiv 2511.19066); the formula is that of its abstract and of
public code of its first author (xchang1121/AsyncFL). There the memory begins with an update of
every client from the first model; here it begins empty, as that of the other methods does. Every
upload is a whole step of the mean: the more clients work at once, the smaller η has to be.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import Row, Update, Vector, elementwise, setting
from fedpsa_strategy.methods.remembering import Remembering, RememberingRule


class ACERule(RememberingRule):
    """The server's half of ACE (formula: see the module)."""

    settings: ACEMethod

    def add(self, update: Update) -> Vector | None:
        """Take a step along the mean of all that is remembered."""
        self.remember(update.client, update.delta)
        rate, number = self.settings.server_lr, self.known_clients
        self.model = elementwise(lambda x, h: x + rate * (h / number), self.model, self.total)
        self.state_weights = [1 / number]
        self.version_report = {
            "weights": [rate / number],
            "effective_number": float(len(self.memory)),
        }
        return self.model


@dataclass(frozen=True)
class ACEMethod(Remembering):
    """Every upload moves the model by the mean of the last updates of all clients."""

    name = "ace"
    label = "ACE"
    colour = "#3f8f8f"
    rule = ACERule
    table = Row(
        aggregated="the last updates of all clients",
        when="every upload",
        weight="η/N",
        memory="(N + 2)·d, N·d of it optionally in half precision or a memory-mapped file",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
