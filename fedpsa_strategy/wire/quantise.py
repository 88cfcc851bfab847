"""Numbers in 8 or 4 bits: blocks with a scale each, rounded at random and without bias.

This is QSGD (Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding, NeurIPS 2017) with buckets of 128 numbers, normalised by their largest. For a block x and
L = 127 or 7 levels on either side of zero,

    scale = max |x_i| / L,    q_i = floor(x_i / scale + u_i),    u_i uniform in [0, 1),

so that E[scale · q_i] = x_i. The u_i are derived from a seed: nothing is remembered between two
updates, and equal seeds give equal bits.

Packed, an array is a row of bytes: all scales as little-endian float32, then the levels, which are
signed bytes, or two to a byte, the first in the lower half.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.errors import InvalidReplyError

BLOCK = 128
BITS = {"int8": 8, "int4": 4}

_AT_ONCE = 1 << 16  # numbers; a multiple of BLOCK
_SCALE = np.dtype("<f4")


def packed_size(count: int, bits: int) -> int:
    """Return how many bytes so many numbers take."""
    return _num_blocks(count) * _SCALE.itemsize + (count * bits + 7) // 8


def pack(values: NDArray[Any], bits: int, seed: int) -> NDArray[np.uint8]:
    """Return the floats of an array in 8 or 4 bits; the seed decides how each one is rounded.

    A block that holds NaN, or numbers beyond float32, gets a scale that is not finite.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    highest = _highest(bits)
    scales = np.empty(_num_blocks(flat.size), _SCALE)
    levels = np.empty(flat.size, np.int8)
    draw = np.random.Philox(key=np.array([seed, bits], np.uint64))
    with np.errstate(all="ignore"):  # what is not finite is for the server to refuse
        for start in range(0, flat.size, _AT_ONCE):
            part = flat[start : start + _AT_ONCE].astype(np.float32)
            rows = np.zeros((_num_blocks(part.size), BLOCK), np.float32)
            rows.reshape(-1)[: part.size] = part
            scale = np.abs(rows).max(axis=1) / np.float32(highest)
            scales[start // BLOCK :][: len(scale)] = scale
            steps = rows / np.where(scale > 0, scale, np.float32(1))[:, None]
            low = np.floor(steps)
            # 24 bits of each word: a float32 holds them exactly, and they stay below 1.
            words = draw.random_raw(-(-rows.size // 2)).astype("<u8", copy=False).view("<u4")
            chance = (words[: rows.size] >> np.uint32(8)) * np.float32(2.0**-24)
            # Compared with the fraction, not added to it: a sum would be rounded once more.
            low += chance.reshape(rows.shape) < steps - low
            rounded = np.where(np.isfinite(low), low, 0).clip(-highest, highest)
            levels[start : start + part.size] = rounded.reshape(-1)[: part.size]
    return np.concatenate([scales.view(np.uint8), _packed(levels, bits)])


def unpack(packed: NDArray[np.uint8], bits: int, out: NDArray[Any], name: str) -> None:
    """Write the numbers of a packed array into `out`, which says how many there are.

    What no honest client packs raises InvalidReplyError; `name` is what its text calls the array.
    Scales that are not finite make numbers that are not, for the caller to notice.
    """
    num_blocks, highest = _num_blocks(out.size), _highest(bits)
    scales = packed[: num_blocks * _SCALE.itemsize].copy().view(_SCALE).astype(np.float32)
    if (scales < 0).any():
        raise InvalidReplyError(f"{name} has a scale below 0, which no client makes")
    payload = packed[num_blocks * _SCALE.itemsize :]
    step = _AT_ONCE * bits // 8
    with np.errstate(all="ignore"):
        for index, start in enumerate(range(0, out.size, _AT_ONCE)):
            part = out[start : start + _AT_ONCE]
            levels = _unpacked(payload[index * step : (index + 1) * step], bits)
            if levels.size > part.size and levels[part.size :].any():
                raise InvalidReplyError(f"{name} ends with a half byte that is not 0")
            if levels.size and int(levels.min()) < -highest:
                raise InvalidReplyError(
                    f"{name} holds the level {int(levels.min())}: they go from {-highest} to "
                    f"{highest}"
                )
            of_part = scales[start // BLOCK : start // BLOCK + _num_blocks(part.size)]
            part[:] = levels[: part.size] * np.repeat(of_part, BLOCK)[: part.size]


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _highest(bits: int) -> int:
    return int(math.ldexp(1, bits - 1)) - 1


def _packed(levels: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return levels.view(np.uint8)
    halves = np.zeros(levels.size + levels.size % 2, np.uint8)
    halves[: levels.size] = levels.view(np.uint8) & 0x0F
    return np.bitwise_or(halves[::2], np.left_shift(halves[1::2], 4, dtype=np.uint8))


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    if bits == 8:
        return packed.view(np.int8)
    halves = np.empty(2 * packed.size, np.int8)
    # The sign is the highest of four bits: moved to the top of the byte, and back with its sign.
    halves[::2] = np.left_shift(packed, 4, dtype=np.uint8).view(np.int8) >> 4
    halves[1::2] = packed.view(np.int8) >> 4
    return halves
