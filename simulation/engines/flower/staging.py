"""A lean copy of the app for Flower to bundle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pathspec

# The kinds of files that Flower puts into a bundle.
_SUFFIXES = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
_NAMES = {".gitignore", "LICENSE"}


@contextmanager
def staged_app(app_dir: Path, folder: Path) -> Iterator[Path]:
    """Copy what Flower may bundle of an app, for as long as the ``with`` block runs.

    To bundle an app, Flower looks at every single file below its folder, and only then at what to
    leave out. With a virtual environment in that folder this takes seconds at each start; the copy
    has no such folders, nor any that git ignores, and gives the same bundle.
    """
    target = Path(tempfile.mkdtemp(prefix="app-", dir=folder))
    try:
        for path in _files(app_dir):
            copy = target / path.relative_to(app_dir)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _files(app_dir: Path) -> Iterator[Path]:
    ignore_file = app_dir / ".gitignore"
    patterns = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.exists() else []
    ignored = pathspec.GitIgnoreSpec.from_lines(patterns)
    for parent, folders, names in os.walk(app_dir):
        here = Path(parent)
        # Changed in place: os.walk then does not enter what is left out.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and not (here / name / "pyvenv.cfg").exists()
            and not ignored.match_file(f"{(here / name).relative_to(app_dir).as_posix()}/")
        ]
        for name in names:
            path = here / name
            if (path.suffix in _SUFFIXES or name in _NAMES) and not path.is_symlink():
                yield path
