"""FedPSA as a Flower strategy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from numpy.typing import NDArray

from fedpsa_strategy.errors import DivergedError, ForgeryError, InvalidReplyError
from fedpsa_strategy.methods.base import Given, Sketched, SketchedRule, Vector
from fedpsa_strategy.methods.fedpsa import FedPSAMethod
from fedpsa_strategy.seeds import uniform
from fedpsa_strategy.server.plausible import check_sketch_length, is_suspicious
from fedpsa_strategy.server.strategy import AsyncStrategy, Task
from fedpsa_strategy.wire.replies import TrainReply
from fedpsa_strategy.wire.text import shown_names

CALIBRATION_KEY = "calibration"


class FedPSA(AsyncStrategy):
    """Asynchronous buffered aggregation, weighted by how similarly models respond.

    The weights and the thermometer that sharpens them are described in
    `fedpsa_strategy.methods.fedpsa`. Clients have to send a `sketch` with their updates:
    see `fedpsa_strategy.client.reply`.

    Parameters
    ----------
    sketch_fn : Callable[[ArrayRecord], Sequence[float]]
        The sketch of a global model (k floats), made with the same calibration batch and projection
        as the clients'; called once per version. That of a `fedpsa_strategy.Probe` also tells
        clients how (its `client_config()` is added to a train config that lacks it) and which
        arrays are trainable.
    method : Sketched (default: None)
        Another method that needs sketches; None is FedPSA.
    calibration_arrays : ArrayRecord (default: None)
        The calibration batch, for nodes that cannot draw it themselves: sent to every node once,
        and again after a failure (the node may have lost it).
    **kwargs : Any
        Settings of `FedPSAMethod` (`buffer_size`, `queue_size`, `gamma`, `delta`, `thermometer`,
        `audit_fraction`, ...), and arguments of `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        sketch_fn: Callable[[ArrayRecord], Sequence[float] | NDArray[Any]],
        method: Sketched | None = None,
        calibration_arrays: ArrayRecord | None = None,
        **kwargs: Any,
    ) -> None:
        if method is None:
            own = {item.name for item in fields(FedPSAMethod)} & kwargs.keys()
            method = FedPSAMethod(**{name: kwargs.pop(name) for name in own})
        self.method = method
        self.audit_fraction = method.audit_fraction
        self.audit_tolerance = method.audit_tolerance
        self.sketch_fn = sketch_fn
        if (keys := getattr(sketch_fn, "trainable_keys", None)) is not None:
            kwargs.setdefault("trainable", keys())
        self.calibration_arrays = calibration_arrays
        self._client_config: Mapping[str, Any] | None = None  # made when it is needed
        self._equipped: set[int] = set()  # nodes that have the calibration batch
        rule = method.make_rule(Given(kwargs.get("num_clients") or 1, self._sketch_model))
        super().__init__(rule=rule, **kwargs)
        self._rule = cast(SketchedRule, rule)

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up a new run; refuses an unusable sketch_fn before the first message."""
        super().begin(arrays, node_ids)
        self._equipped.clear()
        self._first_norm = self.model_norm(0)
        _ = self._rule.global_sketch

    def prepare(self) -> None:
        """Sketch the newest version, with which every upload is compared."""
        # If it cannot be, the run ends with the upload that needs it, whenever that arrives.
        with contextlib.suppress(DivergedError):
            _ = self._rule.global_sketch

    def task_records(
        self, task: Task, arrays: ArrayRecord, config: ConfigRecord
    ) -> dict[str, ArrayRecord | MetricRecord | ConfigRecord]:
        """Return the records of a train message; a node's first one carries the batch."""
        records = super().task_records(task, arrays, config)
        if self.calibration_arrays is not None and task.node_id not in self._equipped:
            records[CALIBRATION_KEY] = self.calibration_arrays
        return records

    def task_config(self, task: Task, config: ConfigRecord) -> ConfigRecord:
        """Return the config of a train message; clients learn from it what to sketch, and how."""
        record = super().task_config(task, config)
        client_config = getattr(self.sketch_fn, "client_config", None)
        if client_config is not None and "fingerprint" not in record:
            if self._client_config is None:
                self._client_config = client_config()
            record.update(self._client_config)
        return record

    def reject(self, task: Task, reason: str, *, quarantine: bool = False) -> None:
        """Give up a task; whether its node still has the calibration batch is unknown now."""
        self._equipped.discard(task.node_id)
        super().reject(task, reason, quarantine=quarantine)

    def inspect(self, task: Task, reply: TrainReply) -> TrainReply:
        """Recompute the sketch of a seeded choice of uploads: κ must not rest on a lie."""
        # What is refused for its norm is not worth an audit; what is clipped is audited as it came.
        checked = super().inspect(task, reply)
        # Against the first model, not the current one, which such updates may have inflated.
        if is_suspicious(math.sqrt(checked.squared_norm), self._first_norm):
            self._try_out(task, checked)
        fraction = self.audit_fraction
        if fraction > 0 and uniform(self.seed, "audit", task.sequence) < fraction:
            self._audit(task, reply)
        return checked

    def _try_out(self, task: Task, reply: TrainReply) -> None:
        """Refuse an update after which a model has no finite sketch: it would end the run."""
        current = self.state.models[self.state.version]
        for start, name in ((self.start_of(task), "its start"), (current, "the global model")):
            if not np.isfinite(self._sketch_after(start[0], reply)).all():
                norm = math.sqrt(reply.squared_norm)
                raise InvalidReplyError(
                    f"with the update, of norm {norm:.4g}, the sketch of {name} is not finite"
                )

    def _sketch_after(self, model: Vector, reply: TrainReply) -> NDArray[np.float64]:
        """Return the sketch of a model with an update added."""
        arrays = self.state.layout.write(model + reply.delta, reply.states)
        return np.asarray(self.sketch_fn(arrays), np.float64)

    def _audit(self, task: Task, reply: TrainReply) -> None:
        expected = self._sketch_after(self.start_of(task)[0], reply)
        error = relative_error(np.asarray(reply.metrics["sketch"], np.float64), expected)
        if not error <= self.audit_tolerance:
            raise ForgeryError(
                f"the sketch is not that of the model that was sent: it differs by "
                f"{error:.2g} of its length, allowed is {self.audit_tolerance:g}"
            )

    def _take(self, task: Task, reply: TrainReply) -> None:
        self._equipped.add(task.node_id)
        super()._take(task, reply)

    def read_reply(self, task: Task, reply: Message) -> TrainReply:
        """Check a reply, its sketch included; raises InvalidReplyError."""
        checked = super().read_reply(task, reply)
        sketch = checked.metrics.get("sketch")
        if sketch is None:
            raise InvalidReplyError(
                "the reply has no metric 'sketch': add fedpsa_mod to the ClientApp "
                "(ClientApp(mods=[fedpsa_mod(Net)]))"
            )
        length = len(self._rule.global_sketch)
        if not isinstance(sketch, list) or len(sketch) != length:
            found = f"{len(sketch)} numbers" if isinstance(sketch, list) else repr(sketch)
            raise InvalidReplyError(
                f"metrics['sketch'] is {found}, need a list of {length} numbers"
            )
        check_sketch_length(sketch, self._rule.global_sketch)
        return checked

    def _sketch_model(self, model: Vector) -> NDArray[np.float64]:  # noqa: ARG002
        state = self.state  # the rule only ever asks for the current model, whose record is there
        sketch = np.asarray(self.sketch_fn(state.arrays), np.float64)
        if sketch.ndim != 1 or sketch.size == 0:
            raise ValueError(
                f"sketch_fn must return a flat list of floats, not shape {sketch.shape}"
            )
        if not np.isfinite(sketch).all():
            raise DivergedError(
                f"the sketch of version {state.version} is not finite: training diverged "
                f"(a lower lr may help); {_suspect(state.arrays)}"
            )
        return sketch


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
