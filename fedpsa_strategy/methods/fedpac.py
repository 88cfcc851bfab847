"""FedPAC: personalised, synchronous, with class centroids and collaborating heads.

The model is an encoder and a linear head. Client i sends its trained model y_i (n_i samples),
class centroids c_ik with class counts n_ik, and statistics (h_i, v_i) of its features under the
encoder it was given. At the end of a round

    encoder <- Σ n_i y_i / Σ n_i                        (the shared head likewise)
    c_k     <- Σ_i n_ik c_ik / Σ_i n_ik                 (kept where nobody has class k)
    head of client i <- Σ_j a_j head_j,   a = argmin  aᵀ (diag(v) + D_i) a   with a >= 0, Σ a = 1,
    D_i[j, l] = Σ_k (h_i[k] - h_j[k]) · (h_i[k] - h_l[k]),

with negative eigenvalues of the matrix clipped to 0, entries of a below 1e-3 set to 0 and the rest
renormalised; the client keeps its own head where that fails. The global model is the mean encoder
with the mean head; each client gets the mean encoder with its own head. Source: Xu et al.,
Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.methods.base import (
    Given,
    Method,
    Row,
    Rule,
    Update,
    Vector,
    effective_number,
    setting,
    weighted_step,
)

# What a client sends beside its model, all indexed by class.
CENTROIDS, COUNTS, FEATURES, VARIANCE = "centroids", "class-counts", "features", "variance"

_SMALLEST_WEIGHT = 1e-3
_ITERATIONS = 5000
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class _Member:
    """One client's contribution to the round."""

    client: int
    model: Vector
    num_examples: float
    extra: Mapping[str, NDArray[Any]]


class FedPACRule(Rule):
    """The server's half of FedPAC (formula: see the module).

    Attributes
    ----------
    head : slice
        Where the head lies in the model's vector; all of it unless it is said.
    """

    not_saved = ("head",)

    def __init__(self, settings: Any, given: Given | None = None) -> None:
        super().__init__(settings, given)
        self.head = slice(None)

    def start(self, model: Vector) -> None:
        """Begin from `model` with no personal heads and no centroids."""
        super().start(model)
        self.heads: dict[int, Vector] = {}
        self.counts: dict[int, NDArray[Any]] = {}  # class counts by client
        self.centroids: NDArray[Any] | None = None
        self.known: NDArray[np.bool_] | None = None  # classes that have a centroid
        self.round: list[_Member] = []

    def start_for(self, client: int) -> Vector:
        """Return the encoder with the client's own head; the model as long as it has none."""
        if client not in self.heads:
            return self.model
        start = self.model.copy()
        start[self.head] = self.heads[client]
        return start

    def add(self, update: Update) -> Vector | None:
        """Collect the update until the round ends."""
        model = update.start + update.delta
        self.round.append(_Member(update.client, model, update.num_examples, update.extra))
        return None

    def finish_round(self) -> Vector | None:
        """Average the encoders, align the centroids, combine the heads."""
        if not self.round:
            return None
        total = sum(member.num_examples for member in self.round)
        weights = [member.num_examples / total for member in self.round]
        models = [member.model for member in self.round]
        self._combine_heads()
        self._update_centroids()
        self.model = weighted_step(np.zeros_like(self.model), weights, models)
        self.round = []
        self.state_weights = weights
        self.version_report = {"weights": weights, "effective_number": effective_number(weights)}
        return self.model

    def _combine_heads(self) -> None:
        features = np.stack([member.extra[FEATURES] for member in self.round]).astype(np.float64)
        variances = np.array([float(member.extra[VARIANCE]) for member in self.round])
        heads = [member.model[self.head] for member in self.round]
        for own, member in enumerate(self.round):
            shares = head_weights(own, features, variances)
            self.heads[member.client] = weighted_step(np.zeros_like(heads[0]), shares, heads)
            self.counts[member.client] = member.extra[COUNTS]

    def _update_centroids(self) -> None:
        counts = np.stack([member.extra[COUNTS] for member in self.round]).astype(np.float64)
        centroids = np.stack([member.extra[CENTROIDS] for member in self.round]).astype(np.float64)
        per_class = counts.sum(axis=0)
        sums = (counts[:, :, None] * centroids).sum(axis=0)
        seen = per_class > 0
        means = sums / np.where(seen, per_class, 1.0)[:, None]
        if self.centroids is None or self.known is None:
            self.centroids, self.known = np.zeros(means.shape, np.float32), np.zeros_like(seen)
        self.centroids = np.where(seen[:, None], means, self.centroids).astype(np.float32)
        self.known = self.known | seen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self.round = [_Member(**member) for member in self.round]  # type: ignore[arg-type]


@dataclass(frozen=True)
class FedPACMethod(Method):
    """Synchronous and personal: a shared encoder, a head for each client."""

    name = "fedpac"
    label = "FedPAC"
    colour = "#8a6fc4"
    rule = FedPACRule
    rounds = True
    client_half = "fedpsa_strategy.client.fedpac:train_from_message"
    needs_head = True
    table = Row(
        aggregated="encoders; heads per client",
        when="when the whole round has answered",
        weight="n / Σn; heads by a small quadratic programme",
        client="head first, then the encoder with centroid alignment",
        memory="m·d + N heads + centroids",
        bytes="d + 2CF + C + 1 / d + CF + C (C classes, F features)",
    )

    alignment: float = setting(1.0, "λ: weight of the distance to the centroids", least=0)
    head_lr: float = setting(0.1, "learning rate of the head", above=0)
    head_epochs: int = setting(1, "epochs of the head's training", least=0)

    def client_config(self) -> dict[str, Any]:
        """Return the settings of the client's half."""
        return {
            "alignment": self.alignment,
            "head-lr": self.head_lr,
            "head-epochs": self.head_epochs,
        }


def head_weights(
    own: int, features: NDArray[np.float64], variances: NDArray[np.float64]
) -> list[float]:
    """Return the weights a with which the client at place `own` combines the heads of its round.

    `features` are h, the class-weighted mean features (clients, classes, features); `variances` are
    v.
    """
    fallback = [float(place == own) for place in range(len(variances))]
    differences = (features[own] - features).reshape(len(variances), -1)
    matrix = np.diag(variances) + differences @ differences.T
    if not np.isfinite(matrix).all():
        return fallback
    eigenvalues, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    matrix = (vectors * np.maximum(eigenvalues, 0.0)) @ vectors.T
    weights = minimise_on_simplex(matrix)
    weights[weights <= _SMALLEST_WEIGHT] = 0.0
    total = weights.sum()
    return [float(value) for value in weights / total] if total > 0 else fallback


def minimise_on_simplex(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return argmin aᵀ M a over a >= 0, Σ a = 1, by accelerated projected gradient steps."""
    size = len(matrix)
    weights = momentum = np.full(size, 1 / size)
    largest = float(np.abs(matrix).sum(axis=1).max())  # bounds the largest eigenvalue
    if largest == 0:
        return weights
    pace = 1.0
    for _ in range(_ITERATIONS):
        new = project_on_simplex(momentum - matrix @ momentum / largest)
        if np.abs(new - weights).max() < _TOLERANCE:
            return new
        # Restart the acceleration where it would lead uphill.
        next_pace = (
            1.0 if (momentum - new) @ (new - weights) > 0 else (1 + (1 + 4 * pace**2) ** 0.5) / 2
        )
        momentum = new + (pace - 1) / next_pace * (new - weights)
        weights, pace = new, next_pace
    return weights


def project_on_simplex(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest point with non-negative entries that sum to 1."""
    ordered = np.sort(point)[::-1]
    excess = np.cumsum(ordered) - 1
    last = np.nonzero(ordered - excess / np.arange(1, len(point) + 1) > 0)[0][-1]
    nearest: NDArray[np.float64] = np.maximum(point - excess[last] / (last + 1), 0.0)
    return nearest
