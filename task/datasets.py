"""The datasets: what they look like and where they are loaded from."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from task.cache import resolve_cache_dir
from task.dataset_files import Images, Labels
from task.download import download as download_files
from task.errors import DatasetFileError, DatasetNotFoundError
from task.layouts import LAYOUTS, Layout

__all__ = [
    "DATASETS",
    "DatasetFileError",
    "DatasetInfo",
    "DatasetNotFoundError",
    "dataset_info",
    "load_raw",
    "resolve_data_dir",
]

# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class DatasetInfo:
    """What a model or a loader has to know about a dataset.

    An image has `shape` (channels, height, width). Mean and deviation per channel are of pixels
    scaled to 0..1, `scale` being the pixel value that stands for 1.
    """

    name: str
    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0


_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR_STD = (0.247, 0.243, 0.262)

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo("digits", (1, 8, 8), 10, (0.3053,), (0.3760,), scale=16.0),
        DatasetInfo("mnist", (1, 28, 28), 10, (0.1307,), (0.3081,)),
        DatasetInfo("fmnist", (1, 28, 28), 10, (0.2860,), (0.3530,)),
        DatasetInfo("cifar10", (3, 32, 32), 10, _CIFAR_MEAN, _CIFAR_STD),
        DatasetInfo("cifar100", (3, 32, 32), 100, _CIFAR_MEAN, _CIFAR_STD),
    )
}


def dataset_info(name: str) -> DatasetInfo:
    """Return the description of a dataset, or say which names there are."""
    try:
        return DATASETS[name]
    except KeyError:
        raise ValueError(f"unknown dataset {name!r}; choose from {', '.join(DATASETS)}") from None


def resolve_data_dir(data_dir: str | Path = "") -> Path:
    """Return the folder with the dataset files as an absolute path.

    Empty means ``$FEDPSA_DATA``, else ``data`` inside the default cache folder.
    """
    chosen = str(data_dir) or os.environ.get("FEDPSA_DATA", "")
    if not chosen:
        return resolve_cache_dir() / "data"
    return Path(chosen).expanduser().absolute()


def load_raw(
    name: str, data_dir: str | Path = "", *, download: bool = True
) -> tuple[Images, Labels]:
    """Load all images of a dataset, the training part followed by the test part.

    The files are looked for in ``data_dir`` (in a folder of the usual name, then directly) and, for
    Fashion-MNIST, where Debian's package puts them; if they are nowhere, torchvision downloads them
    into ``data_dir``. MNIST and Fashion-MNIST share their file names, so files lying directly in
    ``data_dir`` are taken for whichever of the two is asked for. ``digits`` is part of
    scikit-learn.

    Images are uint8 of shape ``(n, *shape)``, labels int64 of shape ``(n,)``.

    Raises
    ------
    DatasetNotFoundError
        If the files are in none of the places; the text says where it looked and what to do.
    DatasetFileError
        If a file is damaged; the text names it.
    """
    info = dataset_info(name)
    if name == "digits":
        return _load_digits()
    folder = resolve_data_dir(data_dir)
    looked: list[str] = []
    arrays = _load_files(info, folder, looked)
    if arrays is None and download:
        try:
            download_files(name, folder)
        except Exception as error:  # torchvision lets every kind of network and file error through
            looked.append(f"download into {folder}: {type(error).__name__}: {error}")
        else:
            arrays = _load_files(info, folder, looked)
    elif arrays is None:
        looked.append("download: not tried (download=False)")
    if arrays is None:
        raise DatasetNotFoundError(_not_found_text(name, folder, looked))
    return arrays


def find_dataset(name: str) -> Path | None:
    """Return where the files of a dataset are; None if they are nowhere.

    Digits are part of scikit-learn, and so is the folder returned for them.
    """
    if name == "digits":
        from sklearn import datasets

        return Path(datasets.__file__).parent
    found = _find_files(dataset_info(name), resolve_data_dir(), [])
    return None if found is None else found[1][0].parent


def _load_files(info: DatasetInfo, folder: Path, looked: list[str]) -> tuple[Images, Labels] | None:
    """Load a dataset from the first place that has all its files; note the others in ``looked``."""
    found = _find_files(info, folder, looked)
    return None if found is None else found[0].read(found[1], info.shape, info.num_classes)


def _find_files(
    info: DatasetInfo, folder: Path, looked: list[str]
) -> tuple[Layout, list[Path]] | None:
    places = [
        (layout, place)
        for layout in LAYOUTS[info.name]
        for place in (folder / layout.folder, folder)
    ]
    if info.name == "fmnist":
        places.append((LAYOUTS[info.name][0], DEBIAN_FASHION_MNIST))
    for layout, place in places:
        paths, missing = layout.find(place)
        if not missing:
            return layout, paths
        looked.append(f"{place}: no {', '.join(missing)}")
    return None


def _not_found_text(name: str, folder: Path, looked: list[str]) -> str:
    commands = [f"python -m task.download {name} {folder}"]
    if name == "fmnist":
        commands.append("sudo apt-get install dataset-fashion-mnist")
    layouts = " or ".join(str(folder / layout.folder) for layout in LAYOUTS[name])
    return "\n".join(
        [
            f"the dataset {name!r} was not found. Looked at:",
            *(f"  - {place}" for place in looked),
            "Get it with (from the project's folder):",
            *(f"  {command}" for command in commands),
            f"or put the files into {layouts}, or name another folder with FEDPSA_DATA.",
        ]
    )


def _load_digits() -> tuple[Images, Labels]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, np.newaxis]
    return images, digits.target.astype(np.int64)
