"""Download a dataset with torchvision: ``python -m task.download NAME FOLDER``."""

import argparse
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TORCHVISION_CLASSES = {
    "mnist": "MNIST",
    "fmnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}

# A host that swallows packets must not hang a run: torchvision itself sets no limit.
_TIMEOUT_SECONDS = 20.0


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def download(name: str, folder: Path) -> None:
    """Download a dataset into ``folder``, in torchvision's layout.

    The files appear in ``folder`` only once they are complete, so that processes that look there at
    the same time never see half a dataset.
    """
    from task.torchvision_import import import_torchvision_datasets

    dataset_class = getattr(import_torchvision_datasets(), TORCHVISION_CLASSES[name])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        with _socket_timeout(_TIMEOUT_SECONDS):
            dataset_class(root=temporary, download=True)
        for part in Path(temporary).iterdir():
            target = folder / part.name
            try:
                part.rename(target)
            except OSError:
                # Either another process was faster, and its files are as good as ours, or
                # an incomplete folder is in the way and gets what it lacks.
                if part.is_dir() and target.is_dir():
                    shutil.copytree(part, target, dirs_exist_ok=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m task.download", description=__doc__)
    parser.add_argument("name", choices=sorted(TORCHVISION_CLASSES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    download(arguments.name, arguments.folder)


if __name__ == "__main__":
    main()
