"""Arrays on disk that many processes share through memory maps."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from task.errors import CacheError

_MANIFEST = "manifest.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# A second attempt is needed only if another process took the folder away in between.
_ATTEMPTS = 5


def resolve_cache_dir(cache_dir: str | Path = "") -> Path:
    """Return the cache folder as an absolute path.

    Parameters
    ----------
    cache_dir : str | Path (default: "")
        The folder. Empty means ``$FEDPSA_CACHE``, else ``$XDG_CACHE_HOME/fedpsa``, else
        ``~/.cache/fedpsa``.
    """
    chosen = str(cache_dir) or os.environ.get("FEDPSA_CACHE", "")
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
        chosen = str(Path(base) / "fedpsa")
    return Path(chosen).expanduser().absolute()


def cached_arrays(
    cache_dir: str | Path, key: str, make: Callable[[], Mapping[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Return named arrays from the cache, making them first if they are not there.

    A key is a folder of ``.npy`` files and a manifest. It is written under a temporary name and
    renamed at once, so a reader sees all of it or nothing; of several processes that make the same
    key at the same time, the first to finish wins and the others use its files. A folder that is
    incomplete, or whose files are cut short or not those of the manifest, is replaced.

    Parameters
    ----------
    cache_dir : str | Path
        The cache folder; empty means the default of ``resolve_cache_dir``.
    key : str
        Name of the folder: letters, digits, ``.``, ``_`` and ``-``.
    make : Callable[[], Mapping[str, NDArray]]
        Called without arguments, at most once, if the cache cannot answer. For one key it must
        always make the same arrays.

    Returns
    -------
    dict[str, NDArray]
        Read-only memory maps, by name.
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
        # Moved before it is deleted: nobody may find a folder that is half gone.
        folder.rename(aside)
    with contextlib.suppress(OSError):
        fresh.rename(folder)


def _write(folder: Path, values: Mapping[str, NDArray[Any]]) -> None:
    folder.mkdir()
    manifest = {}
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value, allow_pickle=False)
        manifest[name] = {"dtype": value.dtype.str, "shape": list(value.shape)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _open(folder: Path) -> dict[str, NDArray[Any]] | None:
    """Map the arrays of a folder; None if it is absent, incomplete or damaged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in manifest.items():
            # A file shorter than its header says cannot be mapped, which is an error here.
            array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
                return None
            arrays[name] = array
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    return arrays
