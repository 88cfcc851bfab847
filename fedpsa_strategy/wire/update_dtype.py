"""The number format in which updates travel: as they are, or in half the bytes.

NumPy has no bfloat16. Its bits are the upper half of a float32's, and travel as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.methods.base import Vector

UPDATE_DTYPES = ("float32", "float16", "bfloat16")
UPDATE_DTYPE_KEY = "update-dtype"
"""The key in the train config; without it updates travel in the model's own dtypes."""


def check_update_dtype(value: Any) -> str:
    """Return the name of a number format, or raise a ValueError that lists them."""
    if value not in UPDATE_DTYPES:
        raise ValueError(f"update_dtype is {value!r}, must be one of {UPDATE_DTYPES}")
    return str(value)


def wire_dtype(update_dtype: str, own: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a float array that is `own` on both sides travels."""
    return {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}.get(update_dtype, own)


def decode(values: NDArray[Any], update_dtype: str, out: Vector) -> None:
    """Write the numbers of an array that was received into `out`, exactly."""
    if update_dtype != "bfloat16":
        out[:] = values
        return
    direct = out.dtype == np.float32
    bits = out.view(np.uint32) if direct else np.empty(out.shape, np.uint32)
    np.left_shift(values, 16, out=bits, dtype=np.uint32)
    if not direct:
        with np.errstate(invalid="ignore"):  # NaN is for the caller to notice
            out[:] = bits.view(np.float32)
