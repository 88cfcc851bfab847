"""What integer targets are to a model's outputs, and how many of them it gets right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from task.errors import TaskError

LossFn = Callable[[Any, Tensor], Tensor]

IGNORED = -100
"""Class of positions that do not count, as in torch's cross-entropy."""

KINDS = (
    "integer targets are classes if the outputs have one more dimension, the second or the last, "
    "with a number for each of at least two classes, and 0 or 1 if there is one output for each "
    "target; float targets are numbers, and only the loss is reported"
)


@dataclass(frozen=True)
class Kind:
    """What integer targets are.

    Attributes
    ----------
    num_classes : int
        How many there are; 2 for targets that are 0 or 1.
    class_dim : int | None
        Dimension of the outputs that runs over the classes; None: one output decides for each
        target.
    threshold : float
        Above it such an output means 1.
    """

    num_classes: int
    class_dim: int | None
    threshold: float = 0.0

    def count(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many of the targets are right, and how many there are."""
        if self.class_dim is None:
            right = (logits.reshape(targets.shape) > self.threshold) == targets
            return right.sum(), torch.tensor(targets.numel(), device=targets.device)
        right = logits.argmax(dim=self.class_dim) == targets
        if targets.dim() == 1:
            return right.sum(), torch.tensor(len(targets), device=targets.device)
        return right.sum(), (targets != IGNORED).sum()


CLASSES = Kind(0, 1)
"""One class per sample."""


def logits_of(outputs: Any) -> Tensor | None:
    """Return a model's output tensor: itself, or what its outputs have as `logits`."""
    if isinstance(outputs, Tensor):
        return outputs
    found = getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("logits")
    return found if isinstance(found, Tensor) else None


def possible_kinds(logits: Tensor, targets: Tensor, all_targets: Tensor, what: str) -> list[Kind]:
    """Return what integer targets may be, judged by the shapes of some and the values of all.

    `TaskError` says that they cannot be anything that is known.
    """
    shape, low, high = tuple(targets.shape), int(all_targets.min()), int(all_targets.max())
    found = []
    for dim in dict.fromkeys((1, logits.dim() - 1)):
        others = (*logits.shape[:dim], *logits.shape[dim + 1 :])
        if logits.dim() == len(shape) + 1 and others == shape and logits.shape[dim] > 1:
            found.append(Kind(logits.shape[dim], dim))
    if found:
        counted = all_targets if len(shape) == 1 else all_targets[all_targets != IGNORED]
        low = int(counted.min()) if counted.numel() else 0
        fitting = [kind for kind in found if low >= 0 and high < kind.num_classes]
        if not fitting:
            sizes = " or ".join(str(kind.num_classes) for kind in found)
            raise TaskError(
                f"{what}: targets are classes {low} to {high}, but the model has {sizes} outputs: "
                f"classes must lie in 0 to {found[0].num_classes - 1}"
            )
        return fitting
    ones = [dim for dim in (1, logits.dim() - 1) if logits.dim() > 1 and logits.shape[dim] == 1]
    shapes = [tuple(logits.squeeze(dim).shape) for dim in ones]
    if shape != tuple(logits.shape) and shape not in shapes:
        raise TaskError(
            f"{what}: integer targets {kind_text(targets)} do not fit the model's outputs "
            f"{kind_text(logits)}: {KINDS}"
        )
    if low < 0 or high > 1:
        raise TaskError(
            f"{what}: the model has one output for each target, so that targets must be 0 or 1, "
            f"but they are {low} to {high}: {KINDS}"
        )
    return [Kind(2, None)]


def chosen_kind(kinds: list[Kind], outputs: Any, targets: Tensor, loss_fn: LossFn) -> Kind:
    """Return which of several kinds it is, and with which threshold, as the loss takes it."""
    logits = logits_of(outputs)
    assert logits is not None
    if kinds[0].class_dim is None:
        # At 0, a probability is a certain 0 and costs nothing; a logit is undecided.
        cost = _loss(loss_fn, outputs, torch.zeros_like(logits), torch.zeros_like(targets))
        return Kind(2, None, 0.5 if cost is not None and cost <= 1e-6 else 0.0)
    costs = []
    for kind in kinds if len(kinds) > 1 else ():
        assert kind.class_dim is not None
        classes = torch.arange(kind.num_classes, device=targets.device)
        classes = classes.reshape([-1 if i == kind.class_dim else 1 for i in range(logits.dim())])
        sure = (targets.unsqueeze(kind.class_dim) == classes).to(logits.dtype) * 10
        cost = _loss(loss_fn, outputs, sure, targets)
        costs.append(float("inf") if cost is None else cost)
    return kinds[costs.index(min(costs))] if costs else kinds[0]


def kind_text(value: Any) -> str:
    """Return what a value is, for the text of an error."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _loss(loss_fn: LossFn, outputs: Any, logits: Tensor, targets: Tensor) -> float | None:
    """Return the loss of other outputs of the same form; None if there is none."""
    try:
        if isinstance(outputs, Tensor):
            changed: Any = logits
        else:
            changed = copy.copy(outputs)
            if hasattr(outputs, "logits"):
                changed.logits = logits
            else:
                changed["logits"] = logits
        with torch.no_grad():
            return float(loss_fn(changed, targets).double().sum())
    except Exception:  # anything may come out of a user's loss
        return None
