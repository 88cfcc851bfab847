"""Sketches: what clients are told to sketch, and what is checked of what they send."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import DivergedError, ForgeryError, InvalidReplyError
from fedpsa_strategy.methods.base import SketchedRule, Vector
from fedpsa_strategy.seeds import uniform
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.contract import BASE, CALIBRATION
from fedpsa_strategy.wire.replies import TrainReply
from fedpsa_strategy.wire.text import shown_names

_SUSPICIOUS_STEP = 3  # times the model: in deep models layers multiply even that to infinity
_LARGEST_SKETCH = 1e12


class Sketches(Callback):
    """FedPSA's half of the work on messages: see `FedPSA` for the parameters.

    Clients are told what to sketch, and are given the calibration batch if they need it. A reply
    without a usable sketch is refused, and so is an update after which a model has none; a seeded
    choice of uploads is audited.
    """

    def __init__(
        self,
        sketch_fn: Callable[[ArrayRecord], Sequence[float] | NDArray[Any]],
        *,
        seed: int = 0,
        calibration_arrays: ArrayRecord | None = None,
        audit_fraction: float = 0.0,
        audit_tolerance: float = 1e-3,
    ) -> None:
        check_range("audit_fraction", audit_fraction, least=0, most=1)
        check_range("audit_tolerance", audit_tolerance, least=0)
        self.sketch_fn = sketch_fn
        self.seed = seed
        self.calibration_arrays = calibration_arrays
        self.audit_fraction = audit_fraction
        self.audit_tolerance = audit_tolerance
        self._client_config: Mapping[str, Any] | None = None  # made when it is needed
        self._equipped: set[int] = set()  # nodes that have the calibration batch

    def begin(self, run: RunState) -> None:
        """Get ready; refuses an unusable sketch_fn before the first message."""
        super().begin(run)
        assert isinstance(run.rule, SketchedRule)
        self._rule = run.rule
        self._equipped.clear()
        self._first_norm = run.model.norm
        _ = self._rule.global_sketch
        base_fingerprint = getattr(self.sketch_fn, "base_fingerprint", None)
        self._base = base_fingerprint(run.arrays) if base_fingerprint is not None else ""

    def idle(self) -> None:
        """Sketch the newest version, with which every upload is compared."""
        # If it cannot be, the run ends with the upload that needs it, whenever that arrives.
        with contextlib.suppress(DivergedError):
            _ = self._rule.global_sketch

    def configure(self, task: Task, config: ConfigRecord) -> None:  # noqa: ARG002
        """Tell the client what to sketch, and how."""
        client_config = getattr(self.sketch_fn, "client_config", None)
        if client_config is not None and "fingerprint" not in config:
            if self._client_config is None:
                self._client_config = client_config()
            config.update(self._client_config)
        if self._base:
            config[BASE] = self._base

    def attach(self, task: Task) -> Mapping[str, ArrayRecord]:
        """Return the calibration batch with a node's first message."""
        if self.calibration_arrays is None or task.node_id in self._equipped:
            return {}
        return {CALIBRATION: self.calibration_arrays}

    def accepted(self, task: Task) -> None:
        """Note that the node has the calibration batch."""
        self._equipped.add(task.node_id)

    def rejected(self, task: Task) -> None:
        """Note that the node may have lost the calibration batch."""
        self._equipped.discard(task.node_id)

    def read(self, task: Task, message: Message, reply: TrainReply) -> TrainReply:  # noqa: ARG002
        """Check the form of a reply's sketch; raises InvalidReplyError."""
        sketch = reply.metrics.get("sketch")
        if sketch is None:
            raise InvalidReplyError(
                "the reply has no metric 'sketch': add fedpsa_mod to the ClientApp "
                "(ClientApp(mods=[fedpsa_mod(Net)]))"
            )
        own = self._rule.global_sketch
        if not isinstance(sketch, list) or len(sketch) != len(own):
            found = f"{len(sketch)} numbers" if isinstance(sketch, list) else repr(sketch)
            raise InvalidReplyError(
                f"metrics['sketch'] is {found}, need a list of {len(own)} numbers"
            )
        _check_length(sketch, own)
        return reply

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:
        """Recompute the sketch of a seeded choice of uploads: κ must not rest on a lie."""
        # Against the first model, not the current one, which such updates may have inflated.
        if math.sqrt(reply.squared_norm) > _SUSPICIOUS_STEP * max(1.0, self._first_norm):
            self._try_out(task, reply)
        fraction = self.audit_fraction
        if fraction > 0 and uniform(self.seed, "audit", task.sequence) < fraction:
            self._audit(task, sent)  # what was clipped is audited as it came
        return reply

    def of_model(self, model: Vector) -> NDArray[np.float64]:
        """Return the sketch of the global model, for the rule that holds it."""
        run = self.run
        arrays = run.arrays
        if model is not run.model.vector:
            arrays = run.layout.write(model, run.model.states)
        sketch = np.asarray(self.sketch_fn(arrays), np.float64)
        if sketch.ndim != 1 or sketch.size == 0:
            raise ValueError(
                f"sketch_fn must return a flat list of floats, not shape {sketch.shape}"
            )
        if not np.isfinite(sketch).all():
            raise DivergedError(
                f"the sketch of version {run.version} is not finite: training diverged "
                f"(a lower lr may help); {_suspect(arrays)}"
            )
        return sketch

    def _try_out(self, task: Task, reply: TrainReply) -> None:
        """Refuse an update after which a model has no finite sketch: it would end the run."""
        for model, name in ((task.start, "its start"), (self.run.model, "the global model")):
            if not np.isfinite(self._sketch_after(model.vector, reply)).all():
                norm = math.sqrt(reply.squared_norm)
                raise InvalidReplyError(
                    f"with the update, of norm {norm:.4g}, the sketch of {name} is not finite"
                )

    def _audit(self, task: Task, reply: TrainReply) -> None:
        expected = self._sketch_after(task.start.vector, reply)
        error = relative_error(np.asarray(reply.metrics["sketch"], np.float64), expected)
        if not error <= self.audit_tolerance:
            raise ForgeryError(
                f"the sketch is not that of the model that was sent: it differs by "
                f"{error:.2g} of its length, allowed is {self.audit_tolerance:g}"
            )

    def _sketch_after(self, model: Vector, reply: TrainReply) -> NDArray[np.float64]:
        """Return the sketch of a model with an update added."""
        arrays = self.run.layout.write(model + reply.delta, reply.states)
        return np.asarray(self.sketch_fn(arrays), np.float64)


def _check_length(sketch: Sequence[float], global_sketch: Sequence[float]) -> None:
    """Refuse a sketch that is too long to belong to any model that is being trained.

    How similar two sketches are does not depend on their lengths, so the limit need not be close.
    Sensitivities are about zero for a model that has learned the calibration batch, hence the 1.
    """
    length, own = math.hypot(*sketch), math.hypot(*global_sketch)
    limit = _LARGEST_SKETCH * max(1.0, own)
    if not length <= limit:
        raise InvalidReplyError(
            f"metrics['sketch'] has the length {length:.4g}, above {limit:.4g}: the global "
            f"model's has {own:.4g}"
        )


def relative_error(claimed: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return ||claimed - expected|| relative to the longer of both, at most 2.

    Whatever the vectors hold, nothing overflows: they are scaled before they are subtracted. What
    is not finite is infinitely far from everything.
    """
    if not (np.isfinite(claimed).all() and np.isfinite(expected).all()):
        return math.inf
    scale = max(float(np.abs(claimed).max()), float(np.abs(expected).max()))
    if scale == 0:
        return 0.0
    a, b = claimed / scale, expected / scale
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))


def _suspect(arrays: ArrayRecord) -> str:
    """Return which arrays of a model hold NaN or Inf, or if none does, the largest number."""
    largest = {
        key: float(np.abs(array.numpy()).max(initial=0.0))
        for key, array in arrays.items()
        if np.dtype(array.dtype).kind == "f"
    }
    if names := [key for key, value in largest.items() if not math.isfinite(value)]:
        return f"not finite are {shown_names(names)}"
    key = max(largest, key=largest.__getitem__)
    return f"all arrays are finite, the largest number is {largest[key]:.4g} in {key!r}"
