"""Arithmetic of flat vectors, with the same bits on any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]

# What several operations in a row touch has to stay in the processor's cache, and temporary arrays
# below the size from which on the system is asked for new memory each time.
_BLOCK = 2**14


def blocks(size: int) -> Iterator[slice]:
    """Yield parts of a vector, small enough that work on a part needs the main memory only once.

    For element-wise work alone, whose bits do not depend on how it is divided.
    """
    for start in range(0, size, _BLOCK):
        yield slice(start, start + _BLOCK)


def elementwise(formula: Callable[..., Any], first: Vector, *others: NDArray[Any]) -> Vector:
    """Return a formula of vectors, element by element, in the dtype of the first one.

    Computed in blocks: a large model takes no temporary arrays of its size.
    """
    result = np.empty_like(first)
    for part in blocks(len(first)):
        result[part] = formula(first[part], *(other[part] for other in others))
    return result


def weighted_step(model: Vector, weights: Sequence[float], deltas: Sequence[Vector]) -> Vector:
    """Return model + Σ weight_i Δ_i, summed in the given order.

    Element-wise operations alone, so that the result has the same bits on any number of threads.
    """
    if len(weights) != len(deltas):
        raise ValueError(f"{len(weights)} weights for {len(deltas)} updates")
    new = np.empty_like(model)
    factors = [model.dtype.type(weight) for weight in weights]
    scaled = np.empty_like(model[:_BLOCK])
    for part in blocks(len(model)):
        total = new[part]
        total[:] = model[part]
        for factor, delta in zip(factors, deltas, strict=True):
            total += np.multiply(delta[part], factor, out=scaled[: len(total)])
    return new


def inner_products(a: Vector, b: Vector) -> tuple[float, float, float]:
    """Return a·b, a·a and b·b of two long vectors, summed in double precision."""
    products, squares_a, squares_b = [], [], []
    for part in blocks(len(a)):
        x, y = a[part].astype(np.float64), b[part].astype(np.float64)
        products.append(float(np.sum(x * y)))  # not a dot product, which may use several threads
        squares_a.append(float(np.sum(x * x)))
        squares_b.append(float(np.sum(y * y)))
    return math.fsum(products), math.fsum(squares_a), math.fsum(squares_b)


def cosine_of(a: Vector, b: Vector) -> float:
    """Return cos(a, b) of two long vectors, 0 if either norm is 0, summed in double precision."""
    product, square_a, square_b = inner_products(a, b)
    length = math.sqrt(square_a) * math.sqrt(square_b)
    return max(-1.0, min(1.0, product / length)) if length > 0 else 0.0


def normalised(weights: Sequence[float]) -> list[float]:
    """Return non-negative weights, scaled to a sum of 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def effective_number(weights: Sequence[float]) -> float:
    """Return (Σw)² / Σw²: how many equally weighted updates these weights amount to."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares if squares > 0 else 0.0
