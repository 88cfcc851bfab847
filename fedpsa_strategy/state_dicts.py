"""The edge between Flower's records and torch's state dicts."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedpsa_strategy.layout import read_array


def read_state_dict(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record, as its `to_torch_state_dict` does but in a tenth of the time.

    Raises
    ------
    InvalidReplyError
        When an array is not what it says it is.
    """
    return {
        key: torch.from_numpy(
            read_array(array, f"arrays[{key!r}]", np.dtype(array.dtype), tuple(array.shape)).copy()
        )
        for key, array in arrays.items()
    }
