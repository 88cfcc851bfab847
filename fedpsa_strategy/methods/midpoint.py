"""Midpoint: cached update calibration whose clients start half an update behind the model.

The server remembers the last update h_i of every client, as CA2FL does, and expects β h_i as its
next one. Client i is sent

    x - θ β h_i,    θ = ½ (x itself if it was never seen),

so that its local path lies around x instead of running away from it, and Δ_i is the end of that
path minus its start. At K uploads, with h the mean of the h_j before this buffer, over the clients
seen so far (or over all N, as in CA2FL),

    d = β h + (1/K) Σ (Δ_i - β h_i),    h_i <- Δ_i,    m <- m + (d - m) / w,    x <- x + p d + b m.

β is what the last 50 uploads of clients seen before say of it, by least squares, anew for each
version: β = Σ Δ_i·h_i / Σ h_i·h_i, between 0 and 1, and 0 before the first of them. While the model
changes quickly old updates tell little of new ones, and the method is nearly the uniform buffer;
`fit_memory=False` keeps β = 1, as CA2FL has it.

A client's second upload within a buffer is calibrated by its first. The step p shrinks when updates
are stale: p = η min(1, c / (1 + mean τ)), τ averaged over the last 50 uploads. The movement b m is
off (b = 0) by default. With `shift_grows` θ is 0 while updates are as large as in the beginning,
and grows as they shrink: θ (1 - M/M0), M being the mean of the last 50 ||Δ||², M0 that of the first
50. The model that counts is x; nobody evaluates a shifted start.

θ = 0, β = 1, c = 0 (no limit), b = 0 over all N clients is CA2FL. A synchronous relative is the
relaxed start of FedInit, x + a (x - y_i) with y_i the client's last model (Sun, Shen, Tao,
Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed Initialization,
NeurIPS 2023). docs/MIDPOINT.md says why the shift helps, and where it does not.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from fedpsa_strategy.methods.base import (
    Buffered,
    Row,
    Update,
    Vector,
    blocks,
    elementwise,
    inner_products,
    setting,
)
from fedpsa_strategy.methods.remembering import Remembering, RememberingRule
from fedpsa_strategy.methods.thermometer import Thermometer

_WINDOW = 50  # uploads over which staleness and norms are averaged, and β is fitted


class MidpointRule(RememberingRule):
    """The server's half of Midpoint (formula: see the module)."""

    settings: MidpointMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.mean_before = np.zeros_like(model)  # h
        self.residual = np.zeros_like(model)  # Σ (Δ_i - h_i)
        self.buffered = 0
        self.staleness: deque[int] = deque(maxlen=_WINDOW)
        self.thermometer = Thermometer(1.0, 0.0, deque(maxlen=_WINDOW))
        self.movement = np.zeros_like(model) if self.settings.momentum else None  # m
        self.repeats: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # Δ_i·h_i, h_i·h_i
        self.expected = 0.0 if self.settings.fit_memory else 1.0  # β

    @property
    def shift(self) -> float:
        """The shift θ β; θ by the size of the last updates if it grows."""
        if not self.settings.shift_grows:
            return self.settings.shift * self.expected
        size = self.thermometer.temperature
        return self.settings.shift * self.expected * (0.0 if size is None else max(0.0, 1.0 - size))

    def start_for(self, client: int) -> Vector:
        """Return x - θ β h_i."""
        last, shift = self.memory.get(client), self.model.dtype.type(self.shift)
        if last is None or shift == 0:
            return self.model
        return elementwise(lambda x, h: x - shift * h, self.model, last)

    def add(self, update: Update) -> Vector | None:
        """Calibrate the update by what the client sent last; aggregate when the buffer is full."""
        number = self.model.dtype.type
        last = self.memory.get(update.client)
        if last is not None and self.settings.fit_memory:
            product, _, square = inner_products(update.delta, last)
            self.repeats.append((product, square))
            self.residual += number(1 - self.expected) * last
        self.residual += self.remember(update.client, update.delta)
        self.staleness.append(update.staleness)
        self.thermometer.push(update.squared_norm)
        self.buffered += 1
        size = self.settings.buffer_size
        if self.buffered < size:
            return None

        step = self.step
        model = np.empty_like(self.model)
        for part in blocks(len(model)):
            expected = number(self.expected) * self.mean_before[part]
            direction = expected + self.residual[part] / number(size)
            model[part] = self.model[part] + number(step) * direction
            if self.movement is not None:
                movement = self.movement[part]
                movement += (direction - movement) / number(self.settings.momentum_window)
                model[part] += number(self.settings.momentum) * movement
        over_all = self.settings.remembered_over == "all"
        self.mean_before = self.mean_of_memory(self.known_clients if over_all else len(self.memory))
        self.model = model
        self.residual[:] = 0
        self.buffered = 0
        self.state_weights = [1 / size] * size
        self.version_report = {
            "weights": [step / size] * size,
            "effective_number": float(size),
            "step": step,
            "expected": self.expected,
            "shift": self.shift,
        }
        if self.settings.fit_memory:
            self.expected = self._fitted()
        return self.model

    def _fitted(self) -> float:
        """Return the β with which β h_i was nearest to the last updates."""
        products, squares = zip(*self.repeats, strict=True) if self.repeats else ((), ())
        whole = math.fsum(squares)
        return max(0.0, min(1.0, math.fsum(products) / whole)) if whole > 0 else 0.0

    @property
    def step(self) -> float:
        """The step p, by the staleness of the last uploads."""
        limit = self.settings.step_limit
        if not limit:
            return self.settings.server_lr
        delay = 1 + sum(self.staleness) / len(self.staleness)
        return self.settings.server_lr * min(1.0, limit / delay)


@dataclass(frozen=True)
class MidpointMethod(Remembering, Buffered):
    """CA2FL whose clients start half an update behind the model: their paths surround it."""

    name = "midpoint"
    label = "Midpoint"
    colour = "#7a3fb0"
    rule = MidpointRule
    table = Row(
        aggregated="updates, calibrated by each client's last one",
        when="every K uploads",
        weight="p/K on the residual, plus p·β times the mean of all remembered updates; p falls"
        " with the mean staleness, β is fitted",
        client="starts from x − θ·β·(its last update)",
        memory="(N + 4)·d, N·d of it optionally in half precision or a memory-mapped file",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
    shift: float = setting(
        0.5, "θ: by how much of its last update a client starts behind the model", least=0, most=1
    )
    fit_memory: bool = setting(
        True,
        "β, the share of its last update that a client is expected to repeat, is fitted to the "
        "last uploads; false: all of it, as in CA2FL",
        former=False,
    )
    shift_grows: bool = setting(False, "θ grows from 0 to `shift` as the updates get smaller")
    step_limit: float = setting(
        2.0,
        "c: the step is at most c / (1 + mean staleness)",
        above=0,
        zero="no limit",
    )
    remembered_over: str = setting(
        "seen",
        "over whom remembered updates are averaged: the clients seen so far, or all",
        choices=("seen", "all"),
    )
    momentum: float = setting(0.0, "b: factor of the slow movement that is added", least=0)
    momentum_window: int = setting(50, "w: versions over which the movement is averaged", least=1)

    def unread(self) -> dict[str, str]:
        """Return the settings of parts that are switched off."""
        useless = {} if self.shift else {"shift-grows": "shift is 0"}
        return useless | ({} if self.momentum else {"momentum-window": "momentum is 0"})
