"""FedPSA as a Flower strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedpsa_strategy.methods.base import Sketched, SketchedRule
from fedpsa_strategy.methods.fedpsa import FedPSAMethod
from fedpsa_strategy.server.callbacks.sketches import Sketches
from fedpsa_strategy.server.strategies import MethodStrategy


class FedPSA(MethodStrategy):
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
        `audit_fraction`, ...), `memory_path` for a method that also remembers clients, and
        arguments of `AsyncStrategy`.
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
            method = FedPSAMethod.taken_from(kwargs)
        if not issubclass(method.rule, SketchedRule):
            raise TypeError(
                f"{method.label} needs sketches: its rule {method.rule.__name__} must be a "
                "subclass of fedpsa_strategy.methods.base.SketchedRule"
            )
        sketches = Sketches(
            sketch_fn,
            seed=kwargs.get("seed", 0),
            calibration_arrays=calibration_arrays,
            audit_fraction=method.audit_fraction,
            audit_tolerance=method.audit_tolerance,
        )
        if (keys := getattr(sketch_fn, "trainable_keys", None)) is not None:
            kwargs.setdefault("trainable", keys())
        super().__init__(method=method, sketch=sketches.of_model, **kwargs)
        self.callbacks.append(sketches)
