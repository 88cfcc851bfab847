"""Files that exist whole or not at all, with the right mode from their first byte on."""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE = 0o600
"""For keys: nobody but the owner reads them."""

PUBLIC = 0o644


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file under another name, then rename it.

    Parameters
    ----------
    path : Path
        The file.
    data : bytes
        What is in it.
    mode : int
        Its permissions, which never were wider.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask says
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
