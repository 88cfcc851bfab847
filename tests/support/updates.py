"""Uploads as a rule sees them."""

import numpy as np

from fedpsa_strategy.methods.base import Update
from fedpsa_strategy.wire.replies import squared_norm

ZERO = np.zeros(2, np.float32)


def make_update(delta, *, sketch=None, staleness=0, client=0, start=(0.0, 0.0)):
    delta = np.asarray(delta, np.float32)
    return Update(
        client=client,
        delta=delta,
        squared_norm=squared_norm(delta),
        num_examples=1,
        version=0,
        staleness=staleness,
        start=np.asarray(start, np.float32),
        metrics={"sketch": sketch},
    )
