"""Splits of a dataset into a test set and clients, as index arrays.

Every function is a pure function of its arguments. Random numbers come from a counter-based
generator seeded by (seed, purpose), so that no split depends on what was drawn before it.
"""

import math
import zlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

PARTITIONS = ("client-dirichlet", "fitted-dirichlet", "class-dirichlet", "iid")

# Below this a mixture's remaining mass is rounding noise and its ratios mean nothing.
_SMALLEST_MASS = 1e-280
# Until how near their mean is, in squared distance, mixtures are redrawn; how often at most; among
# how many new draws.
_FIT, _MOST_REDRAWS, _CANDIDATES = 1e-6, 20, 50


def _generator(seed: int, purpose: str) -> np.random.Generator:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    words = [seed, zlib.crc32(purpose.encode())]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def split_test(num_samples: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Set a random part of all samples aside; return training and test indices, ascending."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the test fraction must lie between 0 and 1, got {fraction}")
    num_test = round(num_samples * fraction)
    if not 0 < num_test < num_samples:
        raise ValueError(
            f"a test fraction of {fraction} leaves {num_samples} samples with an empty test or "
            "training set"
        )
    order = _generator(seed, "test").permutation(num_samples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def partition(
    kind: str, labels: NDArray[np.integer], num_clients: int, alpha: float, seed: int
) -> list[Indices]:
    """Split samples over clients.

    Parameters
    ----------
    kind : str
        ``"client-dirichlet"``, ``"fitted-dirichlet"``, ``"class-dirichlet"`` or ``"iid"``.
    labels : NDArray
        Label of every sample.
    num_clients : int
        Number of clients.
    alpha : float
        Concentration of the Dirichlet laws; ``"iid"`` takes no notice of it.
    seed : int
        Seed of the draws.

    Returns
    -------
    list[Indices]
        For every client the indices of its samples, ascending. No two clients share a sample and no
        client is empty.
    """
    if kind == "client-dirichlet":
        return by_client_dirichlet(labels, num_clients, alpha, seed)
    if kind == "fitted-dirichlet":
        return by_client_dirichlet(labels, num_clients, alpha, seed, fitted=True)
    if kind == "class-dirichlet":
        return by_class_dirichlet(labels, num_clients, alpha, seed)
    if kind == "iid":
        return iid(labels, num_clients, seed)
    raise ValueError(f"unknown partition {kind!r}; choose from {', '.join(PARTITIONS)}")


def hold_out(indices: Indices, number: int, seed: int) -> Indices:
    """Return randomly chosen indices, in ascending order."""
    if number >= len(indices):
        raise ValueError(f"cannot hold {number} of {len(indices)} training samples out")
    return np.sort(_generator(seed, "held-out").choice(indices, number, replace=False))


def by_client_dirichlet(
    labels: NDArray[np.integer],
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    fitted: bool = False,
) -> list[Indices]:
    """Give every client equally many samples in a class mixture of its own.

    The mixture of a client is drawn from Dir(α·p), p being the class frequencies of ``labels``. The
    concentration *per class* is thus α divided by about the number of classes, which is more skewed
    than the textbook's Dir(α) at the same α. Clients are served one after another. When a class
    runs out, its share goes to the classes left: in proportion to the client's mixture, or to what
    is left of each class if the mixture has nothing there.

    Fitted, mixtures are redrawn until their mean is p: all clients then get about the mixture that
    was drawn for them, and late ones no leftovers. The framework FLGo does the like.

    Every client gets ``len(labels) // num_clients`` samples; the remainder, fewer samples than
    clients, stays unused.
    """
    order, mixtures = draw_mixtures(labels, num_clients, alpha, seed, fitted=fitted)
    # A shuffled queue of samples for each class that occurs at all.
    supply = np.unique(labels, return_counts=True)[1]
    queue = order[np.argsort(labels[order], kind="stable")]
    position = np.concatenate([[0], np.cumsum(supply)[:-1]])
    size = len(labels) // num_clients
    remaining = supply
    clients = []
    for mixture in mixtures:
        counts = _counts(mixture, remaining, size)
        pieces = [
            queue[start : start + count] for start, count in zip(position, counts, strict=True)
        ]
        clients.append(np.sort(np.concatenate(pieces)))
        position = position + counts
        remaining = remaining - counts
    return clients


def draw_mixtures(
    labels: NDArray[np.integer],
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    fitted: bool = False,
) -> tuple[Indices, NDArray[np.float64]]:
    """Draw an order of the samples, and for each client the classes that it is meant to have."""
    _check(labels, num_clients, alpha)
    rng = _generator(seed, "client-dirichlet")
    order = rng.permutation(len(labels))
    share = np.unique(labels, return_counts=True)[1] / len(labels)
    mixtures = rng.dirichlet(alpha * share, size=num_clients)
    if fitted:
        _fit(mixtures, share, alpha, rng)
    return order, mixtures


def _fit(
    mixtures: NDArray[np.float64],
    share: NDArray[np.float64],
    alpha: float,
    rng: np.random.Generator,
) -> None:
    """Redraw mixtures one at a time until their mean is near the share of each class.

    Of some draws for a client the one that brings the mean nearest takes the place of its mixture,
    if it is an improvement.
    """
    total = mixtures.sum(axis=0)
    clients = len(mixtures)
    for turn in range(_MOST_REDRAWS * clients):
        if np.sum((total / clients - share) ** 2) <= _FIT:
            return
        own = mixtures[turn % clients]
        drawn = np.concatenate([own[None], rng.dirichlet(alpha * share, size=_CANDIDATES)])
        errors = np.sum(((total - own + drawn) / clients - share) ** 2, axis=1)
        best = drawn[np.argmin(errors)].copy()
        total += best - own
        mixtures[turn % clients] = best


def _counts(mixture: NDArray[np.float64], supply: Indices, size: int) -> Indices:
    """Return how many samples of each class make up ``size``, none above its supply."""
    counts: Indices = np.zeros_like(supply)
    # Each round either completes the client or empties a class, so this ends.
    while (needed := size - int(counts.sum())) > 0:
        left = supply - counts
        weights = np.where(left > 0, mixture, 0.0)
        if weights.sum() < _SMALLEST_MASS:
            weights = left.astype(np.float64)
        counts += np.minimum(_apportion(weights, needed), left)
    return counts


def _apportion(weights: NDArray[np.float64], total: int) -> Indices:
    """Round ``total`` times the normalised weights to integers of that sum (largest remainder)."""
    exact = weights / weights.sum() * total
    counts: Indices = np.floor(exact).astype(np.int64)
    # A class of weight zero must get nothing, however the rounding falls.
    remainder = np.where(weights > 0.0, exact - counts, -1.0)
    short = total - int(counts.sum())
    counts[np.argsort(-remainder, kind="stable")[:short]] += 1
    return counts


def by_class_dirichlet(
    labels: NDArray[np.integer], num_clients: int, alpha: float, seed: int
) -> list[Indices]:
    """Divide each class over the clients in proportions drawn from Dir(α), the textbook's split.

    All samples are used and clients differ in size. A client that would stay empty gets one random
    sample of the client that has most at that moment.
    """
    _check(labels, num_clients, alpha)
    rng = _generator(seed, "class-dirichlet")
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1]
        cuts = np.minimum((shares * len(members)).astype(np.int64), len(members))
        owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    sizes = np.bincount(owner, minlength=num_clients)
    for empty in np.flatnonzero(sizes == 0):
        donor = int(np.argmax(sizes))
        owner[rng.choice(np.flatnonzero(owner == donor))] = empty
        sizes[donor] -= 1
        sizes[empty] += 1
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def iid(labels: NDArray[np.integer], num_clients: int, seed: int) -> list[Indices]:
    """Give every client ``len(labels) // num_clients`` samples, whatever their labels."""
    _check(labels, num_clients, alpha=1.0)
    order = _generator(seed, "iid").permutation(len(labels))
    size = len(labels) // num_clients
    return [np.sort(chunk) for chunk in order[: size * num_clients].reshape(num_clients, size)]


def _check(labels: NDArray[np.integer], num_clients: int, alpha: float) -> None:
    if num_clients < 1:
        raise ValueError(f"at least one client is needed, got {num_clients}")
    if len(labels) < num_clients:
        raise ValueError(f"{len(labels)} samples cannot be split over {num_clients} clients")
    if not (math.isfinite(alpha) and alpha > 0.0):
        raise ValueError(f"alpha must be a positive number, got {alpha}")
