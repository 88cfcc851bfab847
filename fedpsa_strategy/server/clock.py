"""Clocks: what "now" means in a run, and in which order replies take effect.

With the `WallClock` a reply takes effect when it arrives. With the `VirtualClock` it takes effect
at the time it was dispatched plus its client's simulated response time, in exactly that order,
whatever order the replies really arrive in: stragglers are simulated while all clients compute at
full speed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.seeds import uniform

DAY = 86_400
"""Virtual units in a virtual day."""


@dataclass(frozen=True)
class Latency(ABC):
    """A law of simulated response times, in virtual time units.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the draws.
    per : "client" or "task" (default: "client")
        Whether a client draws its response time once and keeps it, or anew for every task.
    """

    seed: int = 0
    per: Literal["client", "task"] = "client"

    def __post_init__(self) -> None:
        if self.per not in ("client", "task"):
            raise ValueError(f"per must be 'client' or 'task', not {self.per!r}")

    def __call__(self, client: int, sequence: int) -> float:
        """Return the response time of task number `sequence`, which `client` works on."""
        number = client if self.per == "client" else sequence
        return self.quantile(uniform(self.seed, f"latency-per-{self.per}", number))

    @abstractmethod
    def quantile(self, u: float) -> float:
        """Return the response time below which a share `u` of all response times lies."""


@dataclass(frozen=True)
class ConstantLatency(Latency):
    """Every task takes `value` units."""

    value: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("value", self.value, above=0)

    def quantile(self, u: float) -> float:  # noqa: ARG002
        """Return the constant."""
        return self.value


@dataclass(frozen=True)
class _IntervalLatency(Latency):
    low: int = 10
    high: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.low <= self.high:
            raise ValueError(f"need 1 <= low <= high, not low={self.low}, high={self.high}")


@dataclass(frozen=True)
class UniformLatency(_IntervalLatency):
    """Integers drawn uniformly from `low` to `high`, both included."""

    def quantile(self, u: float) -> float:
        """Return the u-quantile."""
        return float(self.low + int(u * (self.high - self.low + 1)))


@dataclass(frozen=True)
class LongTailLatency(_IntervalLatency):
    """A Pareto law with exponent `shape`, truncated to `low` .. `high` and rounded to integers.

    Most of its mass lies near `low`; a few clients are very slow.
    """

    shape: float = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("shape", self.shape, above=0)

    def quantile(self, u: float) -> float:
        """Return the u-quantile."""
        tail = 1 - (self.low / self.high) ** self.shape
        return float(round(self.low * (1 - u * tail) ** (-1 / self.shape)))


class Clock(ABC):
    """What a run asks of its clock, whatever kind it is.

    Attributes
    ----------
    fixed_nodes : bool
        Whether exactly the nodes of the beginning take part until the end.
    real_time : bool
        Whether clients take as long as the run's time says: who is late can be left waiting for.
    """

    fixed_nodes: bool
    real_time: bool

    @abstractmethod
    def start(self, at: float = 0.0) -> None:
        """Begin to count, from `at` (not 0 when a run is resumed)."""

    @abstractmethod
    def hold(self, at: float = 0.0) -> None:
        """Stand still at `at` until the start: waiting for nodes does not count as run time."""

    @property
    @abstractmethod
    def now(self) -> float:
        """The current time of the run: seconds, or virtual units."""

    @abstractmethod
    def due(self, client: int, sequence: int) -> float | None:
        """Return when the reply to a task that is sent now takes effect; None: on arrival.

        Replies with such a time take effect in its order, ties in the order of the tasks; a task
        that was in flight when a run was interrupted is still due then.
        """

    @abstractmethod
    def moment(self, due: float | None) -> float:
        """Return the time up to which the run may continue: `due` is that of the reply at hand."""

    @abstractmethod
    def advance(self, to: float, end: float | None = None) -> bool:
        """Go on to a moment, or to the end if that comes first; tell whether it was reached."""

    @abstractmethod
    def gives_up(self, sent: float, last_reply: float, timeout: float) -> float:
        """Return when a reply is no longer waited for, in real seconds.

        Parameters
        ----------
        sent : float
            When its message was sent.
        last_reply : float
            When the last reply of any client came.
        timeout : float
            How long to wait.
        """

    @abstractmethod
    def stands_at(self, moment: float) -> bool:
        """Return whether a result of this moment is also one of the end, if the run ends now."""


class WallClock(Clock):
    """Real time in seconds since the start of the run.

    Parameters
    ----------
    source : Callable[[], float] (default: time.monotonic)
        Where the time comes from.
    """

    fixed_nodes = False
    real_time = True

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._origin = source()
        self._held: float | None = None

    def start(self, at: float = 0.0) -> None:
        """Begin to count, from `at`."""
        self._held = None
        self._origin = self._source() - at

    def hold(self, at: float = 0.0) -> None:
        """Stand still at `at` until the start."""
        self._held = at

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._source() - self._origin if self._held is None else self._held

    def due(self, client: int, sequence: int) -> float | None:  # noqa: ARG002
        """Return None: first come, first served."""
        return None

    def moment(self, due: float | None) -> float:  # noqa: ARG002
        """Return the time it is."""
        return self.now

    def advance(self, to: float, end: float | None = None) -> bool:  # noqa: ARG002
        """Return True: real time passes by itself, and late is late."""
        return True

    def gives_up(self, sent: float, last_reply: float, timeout: float) -> float:  # noqa: ARG002
        """Return the end of the timeout."""
        return sent + timeout

    def stands_at(self, moment: float) -> bool:  # noqa: ARG002
        """Return True: real time has always moved on, which says nothing about the model."""
        return True

    def __repr__(self) -> str:
        return "WallClock()"


class VirtualClock(Clock):
    """Simulated time, which stands still while clients compute and jumps from reply to reply.

    Parameters
    ----------
    latency : Latency
        The response time of each task.
    """

    fixed_nodes = True
    real_time = False

    now: float = 0.0  # virtual units since the start

    def __init__(self, latency: Latency) -> None:
        self.latency = latency

    def start(self, at: float = 0.0) -> None:
        """Set the time to `at`."""
        self.now = at

    def hold(self, at: float = 0.0) -> None:
        """Set the time to `at`: it moves only when it is told to."""
        self.now = at

    def due(self, client: int, sequence: int) -> float | None:
        """Return the time after the client's response time."""
        return self.now + self.latency(client, sequence)

    def moment(self, due: float | None) -> float:
        """Return when the reply takes effect; without one, time stands still."""
        return self.now if due is None else due

    def advance(self, to: float, end: float | None = None) -> bool:
        """Jump to a later moment, or to the end before it."""
        if to < self.now:
            raise ValueError(f"virtual time cannot go back from {self.now} to {to}")
        reached = end is None or to <= end
        self.now = to if reached or end is None else end
        return reached

    def gives_up(self, sent: float, last_reply: float, timeout: float) -> float:
        """Return the end of the timeout after the last sign of life of anybody.

        Simulated clients take turns on few processors: one that waits for its turn is not late.
        """
        return max(sent, last_reply) + timeout

    def stands_at(self, moment: float) -> bool:
        """Return whether it is this moment: the last point of a curve over time is the end."""
        return self.now == moment

    def __repr__(self) -> str:
        return f"VirtualClock({self.latency!r})"
