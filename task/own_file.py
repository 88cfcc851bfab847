"""A node's own data file."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from task.datasets import DatasetInfo
from task.errors import ShardFileError
from task.tensors import Shard, normalised


def read_own_file(path: Path, info: DatasetInfo) -> Shard:
    """Read and check an ``.npz`` file with the arrays ``x`` and ``y``.

    Parameters
    ----------
    path : Path
        The file; see ``task.shards.file_shard``.
    info : DatasetInfo
        What the samples have to look like.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ("x", "y") if name not in file]
            if missing:
                raise ShardFileError(f"{path}: no array named {' or '.join(missing)}")
            x, y = file["x"], file["y"]
    except ShardFileError:
        raise
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ShardFileError(f"{path}: not an .npz file of plain arrays ({error})") from error
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
