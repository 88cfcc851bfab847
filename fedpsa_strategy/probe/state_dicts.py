"""The edge between Flower's records and NumPy's arrays or torch's state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpsa_strategy.wire.layout import read_array


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


def parameter_views(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a model's parameters as NumPy's arrays, valid for as long as they stay in their place.

    Without those on other devices and of types that NumPy lacks; and without buffers, because a
    forward pass may put other tensors in their places.
    """
    return {
        name: parameter.detach().numpy()
        for name, parameter in model.named_parameters()
        if parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64)
    }


def load_values(
    model: nn.Module, views: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]]
) -> None:
    """Load what `read_arrays` returned, faster than `load_state_dict` where that is possible.

    Parameters
    ----------
    model : nn.Module
        The model.
    views : Mapping[str, NDArray[Any]]
        Its `parameter_views`.
    values : Mapping[str, NDArray[Any]]
        Its values.
    """
    if {key: value.shape for key, value in values.items()} == {
        key: view.shape for key, view in views.items()
    }:
        for key, view in views.items():
            np.copyto(view, values[key])
    else:  # a model that has more than these; or it says what is wrong
        model.load_state_dict(as_tensors(values))


def as_tensors(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Return copies of arrays as tensors."""
    return {key: torch.from_numpy(value.copy()) for key, value in values.items()}
