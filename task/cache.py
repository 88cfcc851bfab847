"""Arrays on disk that many processes share through memory maps."""

import contextlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from task.errors import CacheError

_MANIFEST = "manifest.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_CHUNK = 2**20
_CLOCK_TICK_NS = 10**9

# Files that this process has read and found whole.
_whole: set[tuple[Path, int, int, int, int]] = set()

# A second attempt is needed only if another process took the folder away in between.
_ATTEMPTS = 5


def resolve_cache_dir(cache_dir: str | Path = "") -> Path:
    """Return the cache folder as an absolute path.

    Empty means ``$FEDPSA_CACHE``, else ``$XDG_CACHE_HOME/fedpsa``, else ``~/.cache/fedpsa``.
    """
    chosen = str(cache_dir) or os.environ.get("FEDPSA_CACHE", "")
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
        chosen = str(Path(base) / "fedpsa")
    return Path(chosen).expanduser().absolute()


def cached_arrays(
    cache_dir: str | Path, key: str, make: Callable[[], Mapping[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Return named arrays from the cache as read-only memory maps, and make what is not there.

    A key is a folder of ``.npy`` files and a manifest. It is written under a temporary name and
    renamed at once, so a reader sees all of it or nothing; of several processes that make the same
    key at the same time, the first to finish wins and the others use its files. A folder that is
    incomplete, or whose files do not have the checksums of the manifest, is replaced. For one key
    `make` must always return the same arrays; it is called at most once.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"cache key {key!r} is not a plain file name")
    root = resolve_cache_dir(cache_dir)
    folder = root / key
    arrays = _open(folder)
    if arrays is not None:
        return arrays
    values = make()
    for _ in range(_ATTEMPTS):
        _publish(folder, values)
        arrays = _open(folder)
        if arrays is not None:
            return arrays
    raise CacheError(f"the cache folder {folder} is damaged and cannot be replaced; delete it")


def _publish(folder: Path, values: Mapping[str, NDArray[Any]]) -> None:
    """Put the arrays where ``folder`` is, unless another process has just done so."""
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=root) as scratch:
            fresh = Path(scratch) / "fresh"
            _write(fresh, values)
            try:
                fresh.rename(folder)
            except OSError:  # something is in the way: the winner's folder, or a damaged one
                if _open(folder) is None:
                    _replace(folder, fresh, Path(scratch) / "damaged")
    except OSError as error:
        raise CacheError(
            f"the cache folder {root} cannot be written ({error}); set FEDPSA_CACHE to one that can"
        ) from error


def _replace(folder: Path, fresh: Path, aside: Path) -> None:
    # Either rename fails if another process does the same and is faster; the caller looks again.
    with contextlib.suppress(OSError):
        # Moved before it is deleted: no process may find a folder that is half gone.
        folder.rename(aside)
    with contextlib.suppress(OSError):
        fresh.rename(folder)


def _write(folder: Path, values: Mapping[str, NDArray[Any]]) -> None:
    folder.mkdir()
    entries = {}
    for name, value in values.items():
        path = folder / f"{name}.npy"
        np.save(path, value, allow_pickle=False)
        entries[name] = _checksum(path)
    manifest = {"arrays": entries, "checksum": _checksum_of_entries(entries)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _open(folder: Path) -> dict[str, NDArray[Any]] | None:
    """Map the arrays of a folder; None if it is absent, incomplete or damaged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        entries = manifest["arrays"]
        if manifest["checksum"] != _checksum_of_entries(entries):
            return None
        arrays: dict[str, NDArray[Any]] = {}
        for name, checksum in entries.items():
            path = folder / f"{name}.npy"
            # First: NumPy would have Python's parser read the header of a damaged file.
            if not _is_whole(path, checksum):
                return None
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return arrays


def _is_whole(path: Path, checksum: int) -> bool:
    """Tell whether a file has this checksum, reading it once per process and state of the file."""
    status = path.stat()
    state = (path, status.st_ino, status.st_size, status.st_mtime_ns, checksum)
    if state in _whole:
        return True
    if _checksum(path) != checksum:
        return False
    # A change right after another one may leave the time of a file as it is.
    if time.time_ns() - status.st_mtime_ns > _CLOCK_TICK_NS:
        _whole.add(state)
    return True


def _checksum(path: Path) -> int:
    """Return a file's CRC-32: twice as fast as a cryptographic hash, and sure to see a flipped bit.

    A file of MNIST's size takes about 30 ms.
    """
    checksum, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _checksum_of_entries(entries: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())
