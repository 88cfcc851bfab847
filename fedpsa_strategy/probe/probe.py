"""The probe: how a model responds to the calibration batch, as k numbers.

Server and clients have to use the same one: `config()` is what travels, `from_config()` rebuilds
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from fedpsa_strategy.probe.calibration import Calibration, fingerprint
from fedpsa_strategy.probe.check import check_fit, check_parameters, placed_like
from fedpsa_strategy.probe.per_sample import LossFn
from fedpsa_strategy.probe.sensitivity import num_trainable, sensitivity, trainable_vector
from fedpsa_strategy.probe.sketch import Sketch
from fedpsa_strategy.probe.state_dicts import (
    StateFn,
    fingerprint_of_rest,
    load_arrays,
    part_of,
)
from fedpsa_strategy.wire.contract import trainable_keys
from fedpsa_strategy.wire.layout import record_of

SIGNALS = ("sensitivity", "parameters")


class ProbeError(ValueError):
    """A node cannot make a sketch that the server could compare."""


@dataclass(frozen=True)
class Probe:
    """Sketches models; called with a module, it returns k floats.

    Parameters
    ----------
    calibration : Calibration
        The batch D_b.
    sketch : Sketch
        The projection R.
    signal : "sensitivity" or "parameters" (default: "sensitivity")
        What is sketched; the raw parameters are the ablation without sensitivity.
    loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
        Per-sample loss of (outputs, targets); None is cross-entropy.
    recipe : Mapping[str, Any] (default: None)
        Arguments of `Calibration.gaussian` with which a node draws the batch itself; without them
        the batch has to be sent as arrays.
    """

    calibration: Calibration
    sketch: Sketch
    signal: str = "sensitivity"
    loss_fn: LossFn | None = None
    recipe: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ValueError(f"signal is {self.signal!r}, must be one of {SIGNALS}")

    @classmethod
    def gaussian(
        cls,
        model: nn.Module,
        shape: Sequence[int],
        *,
        num_classes: int | None = None,
        vocabulary: int | None = None,
        target_shape: Sequence[int] = (),
        size: int = 64,
        seed: int = 0,
        dim: int = 16,
        sketch_seed: int = 0,
        kind: str = "rademacher",
        signal: str = "sensitivity",
        loss_fn: LossFn | None = None,
    ) -> Probe:
        """Make a probe with a Gaussian calibration batch that every node can draw by itself.

        Parameters
        ----------
        model : nn.Module
            The model to be trained. Its values do not matter; the batch has to fit it.
        shape : Sequence[int]
            Shape of one input, without the batch.
        num_classes : int (default: None)
            Number of classes that labels are drawn from; None: regression.
        vocabulary : int (default: None)
            Inputs are token ids below this number instead of Gaussian.
        target_shape : Sequence[int] (default: ())
            Regression: shape of one target.
        size : int (default: 64)
            Samples in the batch.
        seed : int (default: 0)
            Seed of the batch.
        dim : int (default: 16)
            k: length of the sketch.
        sketch_seed : int (default: 0)
            Seed of the projection.
        kind : str (default: "rademacher")
            Law of the projection, or "gaussian".
        signal : str (default: "sensitivity")
            See `Probe`.
        loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
            See `Probe`.

        Raises
        ------
        ValueError
            If an argument is outside its range or does not fit the model.
        """
        recipe: dict[str, Any] = {
            "shape": tuple(shape),
            "size": size,
            "seed": seed,
            "num_classes": num_classes,
            "vocabulary": vocabulary,
            "target_shape": tuple(target_shape),
        }
        check_parameters(model)
        sketch = Sketch(num_trainable(model), dim, sketch_seed, kind)  # type: ignore[arg-type]
        batch = Calibration.gaussian(**recipe)
        probe = cls(batch, sketch, signal, loss_fn, recipe)
        probe._check(model)
        return probe

    def __call__(self, model: nn.Module) -> list[float]:
        """Return the sketch of a model."""
        if self.signal == "parameters":
            found = self.sketch(trainable_vector(model))
        else:
            batch = self.calibration.tensors(*placed_like(model))
            found = self.sketch(sensitivity(model, *batch, self.loss_fn))
        sketch: list[float] = found.tolist()
        return sketch

    def sketch_fn(self, model: nn.Module, *, state_fn: StateFn | None = None) -> ServerSketch:
        """Return the server's half for `FedPSA(sketch_fn=...)`.

        Parameters
        ----------
        model : nn.Module
            A workspace. What of it does not travel has to have the values that clients have.
        state_fn : Callable[[nn.Module], Mapping[str, Tensor]] (default: None)
            Chooses and names the arrays that travel: see `arrays_of`.
        """
        self._check(model)
        return ServerSketch(self, model, state_fn)

    def _check(self, model: nn.Module) -> None:
        if self.signal == "sensitivity":
            check_fit(model, self.calibration, self.loss_fn, self.recipe)

    @property
    def fingerprint(self) -> str:
        """Hash of R and the rounded D_b: equal on nodes whose sketches can be compared."""
        return fingerprint(self.sketch, self.calibration)

    def config(self, transport: str = "seed") -> dict[str, Any]:
        """Return what clients need, for the train config.

        Parameters
        ----------
        transport : "seed" or "arrays" (default: "seed")
            Whether nodes draw the calibration batch, or get `arrays()` sent.
        """
        if transport == "seed" and self.recipe is None:
            raise ValueError("a calibration batch of given arrays can only travel as arrays")
        record: dict[str, Any] = {
            "sketch-size": self.sketch.size,
            "sketch-dim": self.sketch.dim,
            "sketch-seed": self.sketch.seed,
            "sketch-kind": self.sketch.kind,
            "sketch-signal": self.signal,
            "calibration-transport": transport,
            "fingerprint": self.fingerprint,
        }
        if transport == "seed":
            assert self.recipe is not None
            # Shapes of the whole batch: that of one label is empty, and Flower's mods that count
            # bytes cannot read an empty list.
            record |= {
                "calibration-shape": list(self.calibration.inputs.shape),
                "calibration-seed": self.recipe["seed"],
                "calibration-classes": self.recipe["num_classes"] or 0,
                "calibration-vocabulary": self.recipe["vocabulary"] or 0,
                "calibration-target-shape": list(self.calibration.targets.shape),
            }
        return record

    def arrays(self) -> ArrayRecord:
        """Return the calibration batch, for the transport "arrays"."""
        batch = self.calibration
        return record_of([("inputs", batch.inputs), ("targets", batch.targets)])

    @classmethod
    def from_config(
        cls,
        config: ConfigRecord,
        *,
        arrays: ArrayRecord | None = None,
        loss_fn: LossFn | None = None,
    ) -> Probe:
        """Rebuild the server's probe from a train message's config.

        Parameters
        ----------
        config : ConfigRecord
            Holds what `config()` returned.
        arrays : ArrayRecord (default: None)
            The calibration batch, for the transport "arrays".
        loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
            See `Probe`.

        Raises
        ------
        ProbeError
            When the config lacks something, or this node's R or D_b is not the server's.
        """
        values: Mapping[str, Any] = config
        try:
            if values["calibration-transport"] == "arrays":
                if arrays is None:
                    raise ProbeError("the calibration batch is not cached on this node")
                calibration = Calibration.real(arrays["inputs"].numpy(), arrays["targets"].numpy())
            else:
                size, *shape = values["calibration-shape"]
                calibration = _drawn(
                    tuple(shape),
                    size=size,
                    seed=values["calibration-seed"],
                    num_classes=values["calibration-classes"] or None,
                    vocabulary=values["calibration-vocabulary"] or None,
                    target_shape=tuple(values["calibration-target-shape"][1:]),
                )
            sketch = _sketch(*(values[f"sketch-{key}"] for key in ("size", "dim", "seed", "kind")))
            signal = str(values["sketch-signal"])
            probe = cls(calibration, sketch, signal, loss_fn)
            expected = values["fingerprint"]
        except KeyError as error:
            raise ProbeError(
                f"the train config lacks {error}: the server has to put Probe.config() into it"
            ) from None
        if probe.fingerprint != expected:
            raise ProbeError(
                f"this node's calibration batch and projection have the fingerprint "
                f"{probe.fingerprint}, the server's {expected}: its sketches could not be compared "
                "(other NumPy version? then use calibration-transport='arrays')"
            )
        return probe


@dataclass
class ServerSketch:
    """Sketches the arrays of a global model; `FedPSA` takes from it what clients have to know."""

    probe: Probe
    model: nn.Module  # the workspace into which arrays are loaded
    state_fn: StateFn | None = None  # see `arrays_of`

    def __call__(self, arrays: ArrayRecord) -> list[float]:
        """Return the sketch of these arrays."""
        load_arrays(self.model, arrays, self.state_fn)
        return self.probe(self.model)

    def trainable_keys(self) -> list[str]:
        """Return which arrays are trained; the strategy has no model to ask."""
        if self.state_fn is None:
            return trainable_keys(self.model)
        part = part_of(self.model, None, self.state_fn)
        return [name for name in part.tensors if name in part.trainable]

    def client_config(self) -> dict[str, Any]:
        """Return what clients need to make sketches that can be compared with these."""
        return self.probe.config()

    def base_fingerprint(self, arrays: ArrayRecord) -> str:
        """Return a hash of what is not among the arrays that travel; empty if all are."""
        return fingerprint_of_rest(self.model, part_of(self.model, arrays, self.state_fn))


# Long-lived workers meet the same batch and projection in every task.
_drawn = lru_cache(maxsize=4)(Calibration.gaussian)
_sketch = lru_cache(maxsize=4)(Sketch)
