"""Small files in the formats of public datasets."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(array):
    """Return an array of bytes in MNIST's format."""
    header = struct.pack(f">{array.ndim + 1}I", 0x0800 | array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_dataset(folder: Path, sizes=(3, 2), *, zipped=False, seed=0):
    """Write training and test images as MNIST has them; return all of them, and their labels."""
    images = np.random.default_rng(seed).integers(0, 256, (sum(sizes), 28, 28), dtype=np.uint8)
    labels = np.arange(sum(sizes)) * 3 % 10
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", slice(0, sizes[0])), ("t10k", slice(sizes[0], None))):
        for name, array in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            data = idx(array)
            path = folder / f"{part}-{name}-ubyte"
            if zipped:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
    return images[:, np.newaxis], labels
