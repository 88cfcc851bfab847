"""The number format in which updates travel: as they are, or in half, a quarter or an eighth.

NumPy has no bfloat16. Its bits are the upper half of a float32's, and travel as uint16. Numbers in
8 or 4 bits travel as bytes: see `fedpsa_strategy.wire.quantise`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.methods.base import Vector
from fedpsa_strategy.wire.quantise import BITS, packed_size, unpack

UPDATE_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
UPDATE_DTYPE_KEY = "update-dtype"
"""The key in the train config; without it updates travel in the model's own dtypes."""


def check_update_dtype(value: Any) -> str:
    """Return the name of a number format, or raise a ValueError that lists them."""
    if value not in UPDATE_DTYPES:
        raise ValueError(f"update_dtype is {value!r}, must be one of {UPDATE_DTYPES}")
    return str(value)


@lru_cache(maxsize=4096)  # the arrays of a model have the same forms in all updates
def wire_form(
    update_dtype: str, own: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape in which a float array of `own` dtype and `shape` travels."""
    if update_dtype in BITS:
        count = int(np.prod(shape, dtype=np.int64))
        return np.dtype(np.uint8), (packed_size(count, BITS[update_dtype]),)
    halves = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
    return halves.get(update_dtype, own), shape


def decode(values: NDArray[Any], update_dtype: str, out: Vector, name: str) -> None:
    """Write the numbers of an array that was received, in one row, into `out`, exactly.

    What no honest client sends raises InvalidReplyError; `name` is what its text calls the array.
    """
    if update_dtype in BITS:
        unpack(values, BITS[update_dtype], out, name)
        return
    if update_dtype != "bfloat16":
        out[:] = values
        return
    direct = out.dtype == np.float32
    bits = out.view(np.uint32) if direct else np.empty(out.shape, np.uint32)
    np.left_shift(values, 16, out=bits, dtype=np.uint32)
    if not direct:
        with np.errstate(invalid="ignore"):  # NaN is for the caller to notice
            out[:] = bits.view(np.float32)
