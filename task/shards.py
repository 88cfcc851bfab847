"""The samples of one client or of the test set, ready for training."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from task.cache import cached_arrays, resolve_cache_dir
from task.datasets import DatasetInfo, dataset_info, load_raw, resolve_data_dir
from task.errors import ShardFileError
from task.memory import RecentlyUsed
from task.own_file import read_own_file
from task.partition import hold_out, split_test
from task.partition import partition as split_over_clients
from task.tensors import Shard, normalised

# Part of every cache key: raised when the same key would no longer mean the same numbers.
_CACHE_FORMAT = "v1"

# What the default folders depend on.
_FOLDER_VARIABLES = ("FEDPSA_DATA", "FEDPSA_CACHE", "XDG_CACHE_HOME", "HOME")

# All 50 Fashion-MNIST clients of the paper's setting fit; of CIFAR, where loading is nothing beside
# training, about twenty do.
_MEMORY_BYTES = 256 * 2**20


_recent: RecentlyUsed[Shard] = RecentlyUsed(_MEMORY_BYTES)


def dataset_source(
    dataset: str,
    *,
    test_fraction: float = 0.1,
    seed: int = 0,
    data_dir: str | Path = "",
    cache_dir: str | Path = "",
) -> "Source":
    """Return where the data of a dataset's clients and its test set come from.

    Parameters
    ----------
    dataset : str
        A key of ``DATASETS``.
    test_fraction : float (default: 0.1)
        Share of all samples that is set aside for testing and given to no client.
    seed : int (default: 0)
        Seed of the test split and of the partition.
    data_dir : str | Path (default: "")
        Folder with the dataset files; see ``task.datasets.resolve_data_dir``.
    cache_dir : str | Path (default: "")
        Folder of the memory-mapped arrays; see ``task.cache.resolve_cache_dir``.
    """
    # A worker asks for every task, and finding the folders takes longer than finding the shard.
    surroundings = (os.getcwd(), *map(os.environ.get, _FOLDER_VARIABLES))  # noqa: PTH109
    return _found_source(
        dataset, float(test_fraction), seed, str(data_dir), str(cache_dir), surroundings
    )


@lru_cache(maxsize=16)
def _found_source(
    dataset: str,
    test_fraction: float,
    seed: int,
    data_dir: str,
    cache_dir: str,
    _surroundings: tuple[str | None, ...],
) -> "Source":
    folders = resolve_data_dir(data_dir), resolve_cache_dir(cache_dir)
    return Source(dataset_info(dataset), test_fraction, seed, *folders)


# A key of the store of shards: `_found_source` returns the same object for the same arguments, and
# an object's identity is hashed more quickly than its fields.
@dataclass(frozen=True, eq=False)
class Source:
    """A dataset with its test split, in the cache."""

    info: DatasetInfo
    test_fraction: float
    seed: int
    data_dir: Path
    cache_dir: Path

    def client(
        self,
        partition_id: int,
        num_partitions: int,
        partition: str = "client-dirichlet",
        alpha: float = 0.5,
        held_out: int = 0,
    ) -> Shard:
        """Return the training data of one client.

        Parameters
        ----------
        partition_id, num_partitions : int
            Which client, ``0 .. num_partitions - 1``, of how many.
        partition, alpha
            How the samples are split; see ``task.partition.partition``.
        held_out : int (default: 0)
            How many training samples no client gets, for the server. The partition is drawn from
            all of them, and they are taken out of it.
        """
        if not 0 <= partition_id < num_partitions:
            raise ValueError(f"partition id {partition_id} is not one of 0 to {num_partitions - 1}")

        def load() -> Shard:
            split = self._partition(num_partitions, partition, alpha)
            start, stop = split["offsets"][partition_id : partition_id + 2]
            indices = split["indices"][start:stop]
            if held_out:
                indices = indices[~np.isin(indices, self._held_out(held_out))]
                if not len(indices):
                    raise ValueError(
                        f"held-out = {held_out} leaves client {partition_id} without a training"
                        " sample"
                    )
            return self._shard(indices)

        key = (self, num_partitions, partition, float(alpha), partition_id, held_out)
        return _recent.get(key, load)

    def held_out(self, number: int) -> Shard:
        """Return the training samples that no client gets."""
        return self._shard(self._held_out(number))

    def test(self) -> Shard:
        """Return the test set, which depends neither on the clients nor on their partition."""
        return _recent.get(self, lambda: self._shard(self._split()["test"]))

    def warm_cache(self, num_partitions: int, partition: str, alpha: float) -> None:
        """Make sure that every file that clients and server read is in the cache.

        Called once before clients start, so that they neither parse the dataset nor draw the
        partition. The cache remembers a dataset by its name and data folder: after other files were
        put into the same data folder, delete the cache.
        """
        self._arrays()
        self._split()
        self._partition(num_partitions, partition, alpha)

    def _held_out(self, number: int) -> NDArray[np.int64]:
        return hold_out(np.asarray(self._split()["train"]), number, self.seed)

    def _key(self, *parts: str) -> str:
        # Two data folders may hold different files under one dataset's name.
        place = hashlib.sha256(str(self.data_dir).encode()).hexdigest()[:8]
        return "_".join((self.info.name, place, *parts, _CACHE_FORMAT))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return all images (uint8) and labels."""

        def make() -> Mapping[str, NDArray[Any]]:
            images, labels = load_raw(self.info.name, self.data_dir)
            return {"images": images, "labels": labels}

        return cached_arrays(self.cache_dir, self._key("images"), make)

    def _split(self) -> dict[str, NDArray[Any]]:
        """Return the indices of the training and the test samples."""

        def make() -> Mapping[str, NDArray[Any]]:
            num_samples = len(self._arrays()["labels"])
            train, test = split_test(num_samples, self.test_fraction, self.seed)
            return {"train": train, "test": test}

        key = self._key("split", f"t{self.test_fraction!r}", f"s{self.seed}")
        return cached_arrays(self.cache_dir, key, make)

    def _partition(self, num_partitions: int, kind: str, alpha: float) -> dict[str, NDArray[Any]]:
        """Return all clients' indices in one array, and where each client's part begins."""

        def make() -> Mapping[str, NDArray[Any]]:
            train = self._split()["train"]
            labels = self._arrays()["labels"][train]
            clients = split_over_clients(kind, labels, num_partitions, alpha, self.seed)
            sizes = [len(client) for client in clients]
            return {
                "indices": train[np.concatenate(clients)],
                "offsets": np.concatenate([[0], np.cumsum(sizes)]),
            }

        key = self._key(
            kind,
            f"n{num_partitions}",
            f"a{float(alpha)!r}",
            f"t{self.test_fraction!r}",
            f"s{self.seed}",
        )
        return cached_arrays(self.cache_dir, key, make)

    def _shard(self, indices: NDArray[np.int64]) -> Shard:
        """Load the given rows, and no others, from the memory maps."""
        arrays = self._arrays()
        return Shard(
            x=normalised(np.asarray(arrays["images"][indices]), self.info),
            y=torch.from_numpy(np.asarray(arrays["labels"][indices])),
        )


def file_shard(path: str | Path, dataset_info: DatasetInfo) -> Shard:
    """Load a node's own data from an ``.npz`` file with the arrays ``x`` and ``y``.

    ``x`` has shape ``(n, *shape)``; as uint8 it is taken for raw pixels, which are scaled and
    normalised, as a float type for inputs already normalised. ``y`` holds ``n`` integer labels.
    `ShardFileError` says why the file cannot be used.
    """
    path = Path(path).expanduser().absolute()
    try:
        status = path.stat()
    except OSError as error:
        raise ShardFileError(f"{path}: cannot be read ({error.strerror})") from error
    if not path.is_file():  # reading a named pipe would wait forever
        raise ShardFileError(f"{path}: not a file")
    key = (path, status.st_mtime_ns, status.st_size, dataset_info)
    return _recent.get(key, lambda: read_own_file(path, dataset_info))
