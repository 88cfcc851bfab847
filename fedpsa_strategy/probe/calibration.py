"""The calibration batch D_b, on which server and clients measure sensitivities."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpsa_strategy.probe.sketch import Sketch, check_integer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Philox streams of inputs and targets: apart from each other and from those of a sketch, so that
# equal seeds do not make R and D_b dependent.
_INPUT_STREAM = 2 << 32
_TARGET_STREAM = 3 << 32


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration batch: `m` inputs and their targets, the same on every node.

    Made by `gaussian` or `real`. Two batches are equal if their fingerprints are.

    Parameters
    ----------
    inputs : array of float32 or int64
        Samples along the first dimension.
    targets : array of float32 or int64
        One label, or one array of them, per sample.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]

    @classmethod
    def gaussian(
        cls,
        shape: Sequence[int],
        *,
        size: int = 64,
        seed: int = 0,
        num_classes: int | None = None,
        vocabulary: int | None = None,
        target_shape: Sequence[int] = (),
    ) -> Calibration:
        """Draw a batch from a seed, which holds no client's data.

        Parameters
        ----------
        shape : sequence of int
            Shape of one input.
        size : int (default: 64)
            Number of samples `m`, 1 to 4096.
        seed : int (default: 0)
            Seed of inputs and targets, 0 to 2**64 - 1.
        num_classes : int (default: None)
            Number of classes from which labels are drawn uniformly; None for regression, whose
            targets are N(0, 1).
        vocabulary : int (default: None)
            Number of tokens from which inputs are drawn uniformly; None for N(0, 1) inputs.
        target_shape : sequence of int (default: ())
            Shape of one target.

        Returns
        -------
        Calibration
            The batch, in float32 and int64.

        Raises
        ------
        ValueError
            If an argument is outside its range.
        """
        size = check_integer("size", size, 1, 4096)
        seed = check_integer("seed", seed, 0, 2**64 - 1)
        return cls(
            _drawn("shape", shape, size, seed, _INPUT_STREAM, "vocabulary", vocabulary),
            _drawn(
                "target_shape", target_shape, size, seed, _TARGET_STREAM, "num_classes", num_classes
            ),
        )

    @classmethod
    def real(cls, inputs: ArrayLike, targets: ArrayLike) -> Calibration:
        """Take a batch of given samples.

        Parameters
        ----------
        inputs, targets : arrays
            1 to 4096 samples along the first dimension, all numbers finite. Floating-point
            numbers become float32 and integers int64.

        Returns
        -------
        Calibration
            A copy of the batch.

        Raises
        ------
        ValueError
            If the arrays differ in length, have no or too many samples, or hold anything else
            than finite numbers.
        """
        batch = cls(_checked("inputs", inputs), _checked("targets", targets))
        if len(batch.inputs) != len(batch.targets):
            raise ValueError(
                "inputs and targets must have the same number of samples, "
                f"not {len(batch.inputs)} and {len(batch.targets)}"
            )
        return batch

    def tensors(
        self, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return copies of inputs and targets, the same for every call: not to be written to.

        Parameters
        ----------
        device : str (default: "cpu")
            Where to put them.
        dtype : torch.dtype (default: None)
            Number format of what is floating-point; None is float32.
        """
        import torch

        key = (device, dtype or torch.float32)
        if key not in self._tensors:
            inputs, targets = (
                torch.tensor(
                    array, device=device, dtype=key[1] if array.dtype.kind == "f" else None
                )
                for array in (self.inputs, self.targets)
            )
            self._tensors[key] = (inputs, targets)
        return self._tensors[key]

    @cached_property
    def _tensors(self) -> dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of shapes, dtypes and values, 32 hex digits.

        Floating-point values count to three decimals: math libraries may differ in the last bits
        of a normal number, which does no harm.
        """
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.inputs, self.targets):
            digest.update(f"{array.dtype.name} {array.shape} ".encode())
            if array.dtype.kind == "f":
                # Adding zero turns -0.0, of other bits but of the same value, into 0.0.
                digest.update((np.round(array.astype("<f8"), 3) + 0.0).tobytes())
            else:
                digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def fingerprint(sketch: Sketch, calibration: Calibration) -> str:
    """Return one hash of R and D_b, 32 hex digits: equal on nodes whose sketches are comparable."""
    both = f"{sketch.fingerprint} {calibration.fingerprint}".encode()
    return hashlib.blake2b(both, digest_size=16).hexdigest()


def _drawn(
    shape_name: str,
    shape: Sequence[int],
    size: int,
    seed: int,
    stream: int,
    count_name: str,
    count: int | None,
) -> NDArray[Any]:
    """Draw integers below `count`, or normal numbers if it is None."""
    lengths = [check_integer(f"each length in {shape_name}", length, 1, 2**31) for length in shape]
    philox = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    generator = np.random.Generator(philox)
    if count is None:
        return generator.standard_normal((size, *lengths), dtype=np.float32)
    count = check_integer(count_name, count, 1, 2**31)
    return generator.integers(count, size=(size, *lengths), dtype=np.int64)


def _checked(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim == 0 or not 1 <= len(array) <= 4096:
        raise ValueError(
            f"{name} must hold 1 to 4096 samples along the first dimension, "
            f"but the shape is {array.shape}"
        )
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers, but the dtype is {array.dtype}")
    with np.errstate(over="ignore"):  # a warning less: what overflows is refused below
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, but hold NaN, an infinity or too large a number")
    return array
