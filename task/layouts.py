"""The layouts in which the datasets' files are found in a folder, and how each is read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from task.dataset_files import (
    Images,
    Labels,
    checked,
    read_cifar_binary,
    read_cifar_pickle,
    read_idx,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One way in which a dataset's files lie in a folder, of this usual name inside a data folder.

    Every file is needed, training part first; each may also be there with ``.gz`` appended. `read`
    takes their paths, the shape of an image and the number of classes.
    """

    folder: str
    files: tuple[str, ...]
    read: Callable[[list[Path], Shape, int], tuple[Images, Labels]]

    def find(self, folder: Path) -> tuple[list[Path], list[str]]:
        """Return the paths of the files in ``folder`` and the names of those that are missing."""
        found, missing = [], []
        for name in self.files:
            candidates = (folder / name, folder / f"{name}.gz")
            path = next((path for path in candidates if path.is_file()), None)
            if path is None:
                missing.append(name)
            else:
                found.append(path)
        return found, missing


def _joined(parts: list[tuple[Images, Labels]]) -> tuple[Images, Labels]:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_idx(paths: list[Path], shape: Shape, num_classes: int) -> tuple[Images, Labels]:
    parts = []
    for image_path, label_path in zip(paths[::2], paths[1::2], strict=True):
        images = read_idx(image_path, 3)[:, np.newaxis]  # the files have no channel axis
        labels = read_idx(label_path, 1)
        parts.append(checked(label_path, images, labels, shape, num_classes))
    return _joined(parts)


def _read_batches(
    paths: list[Path],
    shape: Shape,
    num_classes: int,
    read: Callable[[Path, Shape], tuple[Images, NDArray[Any]]],
) -> tuple[Images, Labels]:
    return _joined([checked(path, *read(path, shape), shape, num_classes) for path in paths])


_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_CIFAR100_FILES = ("train", "test")


# The binary versions come first: nothing has to be unpickled for them.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "mnist": (Layout("MNIST/raw", _IDX_FILES, _read_idx),),
    "fmnist": (Layout("FashionMNIST/raw", _IDX_FILES, _read_idx),),
    "cifar10": (
        Layout(
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _CIFAR10_FILES),
            partial(_read_batches, read=partial(read_cifar_binary, label_bytes=1)),
        ),
        Layout(
            "cifar-10-batches-py",
            _CIFAR10_FILES,
            partial(_read_batches, read=partial(read_cifar_pickle, label_key=b"labels")),
        ),
    ),
    "cifar100": (
        Layout(
            "cifar-100-binary",
            tuple(f"{name}.bin" for name in _CIFAR100_FILES),
            partial(_read_batches, read=partial(read_cifar_binary, label_bytes=2)),
        ),
        Layout(
            "cifar-100-python",
            _CIFAR100_FILES,
            partial(_read_batches, read=partial(read_cifar_pickle, label_key=b"fine_labels")),
        ),
    ),
}
