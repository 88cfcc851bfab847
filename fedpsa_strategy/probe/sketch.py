"""The random projection R that compresses a sensitivity vector to a few numbers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

# Rows of R that share one random word per parameter.
_GROUP = 16
# A vector of up to 2^16 numbers is added up per half word of 8 bits.
_HALF_WORDS = 1 << _GROUP // 2
# Words of 16 bits in one step of Philox's counter (4 x 64 bits).
_WORDS_PER_STEP = 16
# Columns of a Gaussian R that share a Philox stream: a part of R's definition, unlike `block`.
_GAUSSIAN_COLUMNS = 2048
# Keeps the streams of the Gaussian columns apart from those of the Rademacher groups.
_GAUSSIAN_STREAM = 1 << 32
# Columns at either end of R that enter the fingerprint.
_PROBED_COLUMNS = 256


@dataclass(frozen=True)
class Sketch:
    """Random projection `s~ = R s` of a long vector to `dim` numbers, without storing R.

    R (`dim` x `size`) has i.i.d. entries of mean 0 and variance 1/`dim`, so the cosine of two
    sketches estimates the cosine of the two vectors. R depends on nothing but the arguments:
    the same `size`, `dim`, `seed` and `kind` give the same R in every process and on every
    machine, and the sums run in a fixed order, so that neither the block size nor the number of
    threads changes a bit of the sketch.

    Rademacher rows come in groups of 16. Group `g` has a Philox stream with the key
    (`seed`, `g`) that gives every parameter one word of 16 bits; bit `j` of the word is the sign
    of row `16 g + j` (0 means plus). Parameters with equal words have equal signs in all 16
    rows, so their values are added up per word first, and only those 2^16 sums meet the signs:
    one addition per parameter instead of 16. A vector with fewer entries than there would be
    sums is added up per half word instead, and these are kept for the next call.

    Parameters
    ----------
    size : int
        Length `d` of the vectors, 1 to 2**40.
    dim : int (default: 16)
        Length `k` of a sketch, 1 to 1024.
    seed : int (default: 0)
        Seed of R, 0 to 2**64 - 1.
    kind : {"rademacher", "gaussian"} (default: "rademacher")
        Law of the entries: ±1/√k, or N(0, 1/k), which takes far longer.
    block : int (default: 2**17)
        Parameters handled at a time, 1 to 2**20; trades memory for speed (Rademacher only) and
        has no influence on the result.

    Raises
    ------
    ValueError
        If an argument is outside its range.
    """

    size: int
    dim: int = 16
    seed: int = 0
    kind: Literal["rademacher", "gaussian"] = "rademacher"
    block: int = field(default=2**17, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        limits = {"size": (1, 2**40), "dim": (1, 1024), "seed": (0, 2**64 - 1), "block": (1, 2**20)}
        for name, (lowest, highest) in limits.items():
            value = check_integer(name, getattr(self, name), lowest, highest)
            object.__setattr__(self, name, value)
        if self.kind not in ("rademacher", "gaussian"):
            raise ValueError(f"kind must be 'rademacher' or 'gaussian', not {self.kind!r}")

    def __call__(self, vector: ArrayLike | Tensor) -> NDArray[np.float64]:
        """Return the sketch `R @ vector`.

        Parameters
        ----------
        vector : array or torch tensor of shape (size,)
            Floating-point numbers of any precision, on any device.

        Returns
        -------
        array of float64, shape (dim,)
            The sketch; a NaN or an infinity in the vector shows in it.

        Raises
        ------
        ValueError
            If the vector has another shape or is not floating-point.
        """
        values: Any = vector.detach() if hasattr(vector, "detach") else np.asarray(vector)
        if tuple(values.shape) != (self.size,):
            raise ValueError(
                f"vector must be one-dimensional with size={self.size} numbers, "
                f"but its shape is {tuple(values.shape)}"
            )
        if not (values.is_floating_point() if _is_tensor(values) else values.dtype.kind == "f"):
            raise ValueError(f"vector must be floating-point, but its dtype is {values.dtype}")
        with np.errstate(invalid="ignore", over="ignore"):
            product = self._rademacher if self.kind == "rademacher" else self._gaussian
            return product(values) * (1 / math.sqrt(self.dim))

    def columns(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return `R[:, start:stop]`, the factor 1/√k included.

        For inspection: the sketch itself never forms it.
        """
        stop = check_integer("stop", stop, 0, self.size)
        start = check_integer("start", start, 0, stop)
        entries = np.empty((self.dim, stop - start))
        if self.kind == "rademacher":
            for row in range(self.dim):
                bits = self._words(row // _GROUP, start, stop) >> (row % _GROUP) & 1
                entries[row] = 1.0 - 2.0 * bits
        else:
            position = start
            while position < stop:
                block, offset = divmod(position, _GAUSSIAN_COLUMNS)
                end = min(stop, (block + 1) * _GAUSSIAN_COLUMNS)
                normals = np.empty((offset + end - position, self.dim))
                self._draw_normals(block, normals)
                entries[:, position - start : end - start] = normals[offset:].T
                position = end
        return entries * (1 / math.sqrt(self.dim))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the arguments and of columns at both ends of R, 32 hex digits.

        The columns are there to notice a node whose generator differs from this one's.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.kind} {self.size:d} {self.dim:d} {self.seed:d}".encode())
        for start in (0, max(0, self.size - _PROBED_COLUMNS)):
            columns = self.columns(start, min(self.size, start + _PROBED_COLUMNS))
            # Normal numbers may differ in their last bit between math libraries: harmless.
            digest.update((np.round(columns, 6) + 0.0).astype("<f8").tobytes())
        return digest.hexdigest()

    def _rademacher(self, values: Any) -> NDArray[np.float64]:
        if self._half_words is not None:
            return self._rademacher_of_few(values, self._half_words)
        sums = [np.zeros(1 << min(rows, _GROUP)) for rows in range(self.dim, 0, -_GROUP)]
        # Whole steps of the generators, which then go on from block to block.
        block = -(-self.block // _WORDS_PER_STEP) * _WORDS_PER_STEP
        generators = [self._philox(group) for group in range(-(-self.dim // _GROUP))]
        # Buffers, because a fresh array of this size costs more in page faults than the sums do.
        index_buffer = np.empty(min(block, self.size), dtype=np.intp)
        value_buffer = np.empty(len(index_buffer), dtype=np.float64)
        for start in range(0, self.size, block):
            stop = min(self.size, start + block)
            index, value = index_buffer[: stop - start], value_buffer[: stop - start]
            value[:] = _on_cpu(values[start:stop])
            for generator, sums_of_group in zip(generators, sums, strict=True):
                index[:] = _next_words(generator, stop - start)
                if len(sums_of_group) < 1 << _GROUP:
                    index &= len(sums_of_group) - 1
                # Unlike bincount this continues the sums, in parameter order over all blocks.
                np.add.at(sums_of_group, index, value)
        return np.concatenate(list(map(_signed_sums, sums)))

    def _rademacher_of_few(self, values: Any, half_words: NDArray[np.uint8]) -> NDArray[np.float64]:
        value = _on_cpu(values).astype(np.float64)
        sums = np.empty((len(half_words), 1, _HALF_WORDS))
        for row, of_row in enumerate(half_words):
            sums[row] = np.bincount(of_row, value, minlength=_HALF_WORDS)
        rows: NDArray[np.float64] = _fold(sums * _signs_of_bits(_HALF_WORDS)).reshape(-1)
        return rows[: self.dim]

    @cached_property
    def _half_words(self) -> NDArray[np.uint8] | None:
        """For each 8 rows, the half word of every parameter, without bits that belong to no row.

        None where the sketch is not made of them. Kept: drawing them anew takes a short sketch
        longer than the sums do. And as bytes, though `bincount` turns them into indices: after
        training, nothing longer is in the cache.
        """
        if self.kind != "rademacher" or self.size > 1 << _GROUP:
            return None
        starts = range(0, self.dim, _GROUP // 2)
        found = np.empty((len(starts), self.size), dtype=np.uint8)
        for row, start in enumerate(starts):
            group, shift = divmod(start, _GROUP)
            used = (1 << min(self.dim - start, _GROUP // 2)) - 1
            found[row] = self._words(group, 0, self.size) >> shift & used
        return found

    def _gaussian(self, values: Any) -> NDArray[np.float64]:
        total = np.zeros(self.dim)
        products = np.empty((_GAUSSIAN_COLUMNS, self.dim))
        for block in range(-(-self.size // _GAUSSIAN_COLUMNS)):
            start = block * _GAUSSIAN_COLUMNS
            value = _on_cpu(values[start : start + _GAUSSIAN_COLUMNS]).astype(np.float64)
            used = products[: len(value)]
            self._draw_normals(block, used)
            used *= value[:, None]
            products[len(value) :] = 0
            total += _fold(products.T)
        return total

    def _words(self, group: int, start: int, stop: int) -> NDArray[np.uint16]:
        generator = self._philox(group)
        step, skipped = divmod(start, _WORDS_PER_STEP)
        generator.advance(step)
        return _next_words(generator, skipped + stop - start)[skipped:]

    def _draw_normals(self, block: int, out: NDArray[np.float64]) -> None:
        np.random.Generator(self._philox(_GAUSSIAN_STREAM + block)).standard_normal(out=out)

    def _philox(self, stream: int) -> np.random.Philox:
        return np.random.Philox(key=np.array([self.seed, stream], dtype=np.uint64))


def _next_words(generator: np.random.Philox, count: int) -> NDArray[np.uint16]:
    """Return the next words of a stream; what is left of the last 64 bits is lost."""
    raw: NDArray[np.uint64] = generator.random_raw(-(-count // 4))
    return raw.astype("<u8", copy=False).view("<u2")[:count]


def _is_tensor(vector: Any) -> bool:
    return hasattr(vector, "is_floating_point")


def _on_cpu(vector: Any) -> NDArray[Any]:
    if not _is_tensor(vector):
        return np.asarray(vector)
    # NumPy has no bfloat16 and some devices have no float64: hence in this order.
    on_cpu = vector.cpu()
    return np.asarray((on_cpu if on_cpu.element_size() >= 4 else on_cpu.double()).numpy())


def _signed_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each bit, the sum over bins where it is 0 minus the sum where it is 1."""
    rows = np.empty(len(sums).bit_length() - 1)
    for bit in reversed(range(len(rows))):
        zero, one = np.split(sums, 2)
        rows[bit] = _fold(zero - one)
        sums = zero + one
    return rows


@cache
def _signs_of_bits(count: int) -> NDArray[np.float64]:
    """Return 1 or -1 for bit j of i, in row j and column i."""
    bits = np.arange(count) >> np.arange(count.bit_length() - 1)[:, None] & 1
    signs: NDArray[np.float64] = np.where(bits, -1.0, 1.0)
    return signs


def _fold(terms: Any) -> Any:
    """Sum a power of two of terms over the last axis.

    Element-wise halving: the order of `np.sum` and of matrix products depends on the machine.
    """
    while (length := terms.shape[-1]) > 1:
        terms = terms[..., : length // 2] + terms[..., length // 2 :]
    return terms[..., 0]


def check_integer(name: str, value: int, lowest: int, highest: int) -> int:
    """Return an argument as a plain int, or raise a ValueError that names it.

    NumPy's integers count, booleans do not; both ends are included.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, not {value}")
    return int(value)
