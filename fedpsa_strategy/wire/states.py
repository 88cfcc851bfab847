"""Arrays that are not trained: BatchNorm's statistics, counters.

They are states, not steps: clients send their values, and those of a new version are a convex
combination of values that were really held. Sums of differences would not do: those of stale
clients can make a variance negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.wire.layout import States

# No honest statistic moves farther than this in one task, relative to its start.
_FARTHEST = 1e6


def combine_states(old: States, uploads: Sequence[States], weights: Sequence[float]) -> States:
    """Return the states of a new version: floats combined, integers of the newest upload.

    `uploads` are those of the accepted uploads, the newest last, `weights` the non-negative weights
    of the last of them; the old version has what is missing to 1.
    """
    members = [old, *uploads[len(uploads) - len(weights) :]]
    shares = [max(0.0, 1.0 - math.fsum(weights)), *weights]
    combined = {}
    for key, before in old.items():
        if before.dtype.kind != "f":
            combined[key] = uploads[-1][key]
            continue
        held = [
            (share, states[key]) for share, states in zip(shares, members, strict=True) if share > 0
        ]
        total = np.zeros(before.shape, np.float64)
        for share, values in held:
            total += share * values.astype(np.float64)
        # Rounding must not leave the range of the clients' values: a variance of 0 stays 0.
        lowest = np.minimum.reduce([values for _, values in held])
        highest = np.maximum.reduce([values for _, values in held])
        # An array also where it is a single number: NumPy makes scalars of those.
        combined[key] = np.asarray(np.clip(total.astype(before.dtype), lowest, highest))
    return combined


def check_states(states: States, start: States) -> None:
    """Refuse states that no client given `start` could honestly hold; raises InvalidReplyError.

    Floats must be finite and not impossibly far from the start, variances not negative.
    """
    for key, values in states.items():
        if values.dtype.kind != "f" or values.size == 0:
            continue
        if not np.isfinite(values).all():
            raise InvalidReplyError(f"array {key!r} is not finite")
        limit = _FARTHEST * max(1.0, float(np.abs(start[key]).max()))
        largest = float(np.abs(values).max())
        if largest > limit:
            raise InvalidReplyError(
                f"array {key!r} has an entry of size {largest:.3g}: more than {limit:.3g} is no "
                "statistic of data"
            )
        if key.rpartition(".")[2] == "running_var" and float(values.min()) < 0:
            raise InvalidReplyError(f"array {key!r} is a variance and has negative entries")
