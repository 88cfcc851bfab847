"""Random numbers without hidden state.

Every random choice of a run is a pure function of the run's seed, a purpose and counters. Nothing
has to be saved to resume a run, and two methods with one seed meet the same choices.
"""

from __future__ import annotations

from hashlib import blake2b

MAX_SEED = 2**63 - 1  # what fits a signed 64-bit integer on the wire


def derive(seed: int, purpose: str, *counters: int) -> int:
    """Return an integer in [0, 2**63), the same on every machine.

    Different purposes never share numbers; the counters say which of a purpose's numbers it is
    (task, client, attempt, ...).
    """
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def model_seed(seed: int) -> int:
    """Return the seed of the first model, for generators that take 32 bits."""
    return derive(seed, "model") % 2**32


def uniform(seed: int, purpose: str, *counters: int) -> float:
    """Return a float in [0, 1) with 53 random bits, derived like `derive`."""
    return (derive(seed, purpose, *counters) >> 10) / 2**53
