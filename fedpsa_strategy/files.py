"""Files that are written whole or not at all, and read without surprises."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""The mode of files that only their owner may read."""

PUBLIC = 0o644
"""The mode of files that all users may read."""


def write_atomically(path: Path, *parts: bytes | str, mode: int | None = None) -> None:
    """Write a file under a temporary name, make sure that it is on the disk, and rename it.

    Its folder is made if it does not exist; text is written as UTF-8. `mode` are its permissions,
    whatever the umask says; None: as far as the umask allows. If it cannot be written, the OSError
    names the file, and the old one, if any, stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode or 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None:
                    os.fchmod(descriptor, mode)
                file.writelines(p.encode() if isinstance(p, str) else p for p in parts)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        # A full disk is noticed by calls that do not know the file's name.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files that killed writers of `name`, a pattern, have left in a folder.

    Nobody else may be writing there.
    """
    for path in folder.glob(f".{name}.*"):
        path.unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter; one that exists keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def open_regular(path: Path) -> BinaryIO:
    """Open an ordinary file for reading; for a pipe or device raise OSError instead of waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def try_lock(path: Path) -> BinaryIO | None:
    """Take the lock that a file stands for; return what holds it until closed, None if it is taken.

    The system releases it when the process ends. The file, which holds the owner's process id, is
    made if it does not exist and never removed.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        # Some network file systems have no locks: better no protection than no run.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            file.close()
            raise
    file.truncate(0)
    file.write(b"%d\n" % os.getpid())
    file.flush()
    return file
