"""A node's own data file."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from task.datasets import DatasetInfo
from task.errors import ShardFileError
from task.tensors import Shard, normalised


def read_own_file(path: Path, info: DatasetInfo) -> Shard:
    """Read and check an ``.npz`` file with the arrays ``x`` and ``y``."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            missing = [name for name in ("x", "y") if f"{name}.npy" not in names]
            if missing:
                raise ShardFileError(f"{path}: no array named {' or '.join(missing)}, only {names}")
            x, y = (_read_array(archive, name) for name in ("x", "y"))
    except ShardFileError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ShardFileError(
            f"{path}: not an .npz file of plain arrays x (n samples) and y (n integer labels), as "
            f"numpy.savez writes it ({reason})"
        ) from error
    if x.ndim < 1 or x.shape[1:] != info.shape:
        raise ShardFileError(f"{path}: x has shape {x.shape}, {info.name} needs (n, *{info.shape})")
    if len(x) == 0:
        raise ShardFileError(f"{path}: no samples")
    if y.shape != (len(x),):
        raise ShardFileError(f"{path}: y has shape {y.shape}, {len(x)} samples need ({len(x)},)")
    if y.dtype.kind not in "iu":
        raise ShardFileError(f"{path}: y is {y.dtype}, labels must be integers")
    if y.min() < 0 or y.max() >= info.num_classes:
        raise ShardFileError(
            f"{path}: labels {y.min()} to {y.max()} are outside 0 to {info.num_classes - 1}"
        )
    if x.dtype == np.uint8:
        inputs = normalised(x, info)
    elif x.dtype.kind == "f":
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    else:
        raise ShardFileError(f"{path}: x is {x.dtype}, inputs must be uint8 pixels or floats")
    if not bool(torch.isfinite(inputs).all()):
        raise ShardFileError(f"{path}: x has values that are not finite in float32")
    return Shard(x=inputs, y=torch.from_numpy(y.astype(np.int64)))


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        # To the end, where the checksum is compared.
        if file.read(1):
            raise ValueError(f"the array {name} is followed by something else")
    return array
