"""A bounded store of what a process has loaded recently."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that knows how much memory it holds."""

    @property
    def nbytes(self) -> int:
        """Number of bytes held."""


Value = TypeVar("Value", bound=Sized)


class RecentlyUsed(Generic[Value]):
    """Keep the values used last, up to a number of bytes.

    Bounded by bytes and not by count because one dataset's shard is fifty times another's. A value
    larger than the whole budget is handed out but not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], Value]) -> Value:
        """Return the value of ``key``, loading it if it is not held."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = load()  # outside the lock: loading one shard must not block the others
        with self._lock:
            if key not in self._values and value.nbytes <= self._max_bytes:
                self._values[key] = value
                self._held += value.nbytes
            while self._held > self._max_bytes:
                _, oldest = self._values.popitem(last=False)
                self._held -= oldest.nbytes
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._held = 0
