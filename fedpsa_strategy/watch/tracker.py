"""What takes a run's numbers to a program that is an optional package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from fedpsa_strategy.server.events import Event


class Tracker(ABC):
    """A listener that is closed when its `with` block ends."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Take note of an event."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Hand on what is pending, and end; `error` is what ended the run before its time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)


def missing(name: str, error: ImportError, packages: str) -> ModuleNotFoundError:
    """Return the error of a package that is not installed, which says how to install it."""
    return ModuleNotFoundError(
        f"{name} cannot be imported ({error}); install it with: pip install {packages}"
    )


def first_line(error: Exception) -> str:
    """Return the beginning of what an error says; some of these packages say pages."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def kept_id(file: Path | None) -> str | None:
    """Return the id that a resumed run has in the other program; None for a new run."""
    return file.read_text(encoding="utf-8").strip() if file and file.is_file() else None
