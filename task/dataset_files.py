"""Readers of the public dataset file formats: idx, and CIFAR's binary and pickled batches."""

import codecs
import gzip
import io
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from task.errors import DatasetFileError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

# The third byte of an idx file's magic number is the element type: here always unsigned bytes.
_IDX_UNSIGNED_BYTE = 0x08

# What a CIFAR batch refers to, as Python 2 pickled it or as this NumPy would. Nothing else: pickles
# may otherwise run code, which is why torchvision's reader does not serve.
_NEW_ARRAY: Any = np.empty(0).__reduce__()[0]
_PICKLE_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", _NEW_ARRAY.__name__): _NEW_ARRAY,
    (_NEW_ARRAY.__module__, _NEW_ARRAY.__name__): _NEW_ARRAY,
    ("_codecs", "encode"): codecs.encode,
}


def read_bytes(path: Path) -> bytes:
    """Return a file's content, decompressed if its name ends in ``.gz``."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path, "rb") as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetFileError(f"{path}: damaged gzip file ({error})") from error
    except OSError as error:
        raise DatasetFileError(f"{path}: cannot be read ({error.strerror})") from error


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or gzipped, with so many dimensions."""
    data = read_bytes(path)
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise DatasetFileError(f"{path}: {len(data)} bytes are too few for an idx header")
    expected = (_IDX_UNSIGNED_BYTE << 8) | dimensions
    magic, *shape = struct.unpack(f">{dimensions + 1}I", data[:header])
    if magic != expected:
        raise DatasetFileError(f"{path}: idx magic number is {magic:#010x}, not {expected:#010x}")
    size = math.prod(shape)
    if len(data) - header != size:
        raise DatasetFileError(
            f"{path}: the header promises {size} bytes of data, the file has {len(data) - header}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def read_cifar_binary(
    path: Path, shape: tuple[int, ...], label_bytes: int
) -> tuple[Images, NDArray[np.uint8]]:
    """Read a CIFAR ``.bin`` file: per image the label bytes, then the planes R, G, B.

    Of the labels in front of each image the last counts: there is one for CIFAR-10, two (coarse,
    fine) for CIFAR-100. Returns images ``(n, *shape)`` and labels ``(n,)``.
    """
    data = np.frombuffer(read_bytes(path), dtype=np.uint8)
    record = label_bytes + int(np.prod(shape))
    if len(data) == 0 or len(data) % record:
        raise DatasetFileError(
            f"{path}: {len(data)} bytes are not a whole number of {record}-byte records"
        )
    records = data.reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, *shape), records[:, label_bytes - 1]


class _BatchUnpickler(pickle.Unpickler):
    """An unpickler that builds NumPy arrays and built-in containers only."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PICKLE_ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR batch") from None


def read_cifar_pickle(
    path: Path, shape: tuple[int, ...], label_key: bytes
) -> tuple[Images, NDArray[np.int64]]:
    """Read a batch of CIFAR's "python version": images ``(n, *shape)`` and labels ``(n,)``.

    The labels' key is ``b"labels"`` for CIFAR-10, ``b"fine_labels"`` for CIFAR-100.
    """
    try:
        batch = _BatchUnpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        images = np.asarray(batch[b"data"])
        labels = np.asarray(batch[label_key], dtype=np.int64)
    except DatasetFileError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DatasetFileError(f"{path}: not a CIFAR batch ({error!r})") from error
    size = int(np.prod(shape))
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != size:
        raise DatasetFileError(
            f"{path}: images are {images.dtype} {images.shape}, not uint8 (n, {size})"
        )
    return images.reshape(-1, *shape), labels


def checked(
    path: Path, images: Images, labels: NDArray[Any], shape: tuple[int, ...], num_classes: int
) -> tuple[Images, Labels]:
    """Return the images and labels of one part, if they fit each other and the dataset.

    The path is that of the file with the labels, named in the error.
    """
    if len(images) == 0:
        raise DatasetFileError(f"{path}: no images")
    if images.shape[1:] != shape:
        raise DatasetFileError(f"{path}: images have shape {images.shape[1:]}, not {shape}")
    if labels.ndim != 1 or len(labels) != len(images):
        raise DatasetFileError(f"{path}: {labels.shape} labels for {len(images)} images")
    wide = labels.astype(np.int64)
    if len(wide) and not (wide.min() >= 0 and wide.max() < num_classes):
        raise DatasetFileError(
            f"{path}: labels {wide.min()} to {wide.max()} are outside 0 to {num_classes - 1}"
        )
    return images, wide
