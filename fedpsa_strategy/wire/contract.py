"""What server and client say to each other beside arrays, metrics and the user's own config.

The server's train config asks for an update (`REPLY_ARRAYS = "delta"`), because a Δ can travel in
fewer bytes. A reply that carries one says so in a config record of its own. A reply without that
mark carries whole arrays, as Flower's apps send them, and the server subtracts the start it sent.

A marked reply has Δ of the trainable arrays in the usual record, and the values of all others
(BatchNorm's statistics, counters) in a second one: those are states, not steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

REPLY_ARRAYS = "reply-arrays"
"""Key in the train config: what the reply's arrays should be."""

DELTA = "delta"

MARK = "fedpsa"
"""Config record of a reply: says under "arrays" what it carries, and what making it cost."""

STATES = "fedpsa-states"
"""Array record of a reply: the values of the arrays that are not trained."""

SECONDS = "sensitivity-seconds"

BASE = "base-fingerprint"
"""Key in the train config: hash of what of the model does not travel, and has to be the same on
both sides if sketches are to be compared."""

CHECKSUM = "checksum"
"""Key in a mark: the checksum of Δ as it was made."""

CALIBRATION = "calibration"
"""Array record of a train message: the calibration batch, for nodes that cannot draw it."""


def trainable_keys(model: Any) -> list[str]:
    """Return the keys of a torch module's trainable arrays, as server and clients count them.

    A parameter that is used under several names is there under all of them.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.requires_grad]


def checksum(arrays: Mapping[str, Any]) -> int:
    """Return a checksum of the arrays of a record, in their order."""
    found = 0
    for array in arrays.values():
        found = zlib.crc32(array.data, found)
    return found


def mark(seconds: float | None = None, arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a reply's mark.

    With `seconds`, how long the sketch took, and of the arrays of Δ a checksum, which shows whether
    it is changed on the way out.
    """
    found: dict[str, Any] = {"arrays": DELTA}
    if seconds is not None:
        found[SECONDS] = seconds
    if arrays is not None:
        found[CHECKSUM] = checksum(arrays)
    return found
