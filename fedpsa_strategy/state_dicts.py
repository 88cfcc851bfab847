"""The edge between Flower's records and NumPy's arrays or torch's state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedpsa_strategy.layout import read_array


def read_arrays(arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return read-only views of a record's arrays.

    Raises
    ------
    InvalidReplyError
        When an array is not what it says it is.
    """
    return {
        key: read_array(array, f"arrays[{key!r}]", np.dtype(array.dtype), tuple(array.shape))
        for key, array in arrays.items()
    }


def as_tensors(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Return copies of arrays as tensors."""
    return {key: torch.from_numpy(value.copy()) for key, value in values.items()}
