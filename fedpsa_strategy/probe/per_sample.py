"""Moments of per-sample gradients for models that the layers' own rules cannot serve.

`vectorised` takes all samples at once through `torch.func.vmap`. What has no vectorised form (code
that looks at values, packed sequences, nested tensors, sparse gradients, ...) goes `one_by_one`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedpsa_strategy.probe.layer_moments import Moments, added, chunk_size

LossFn = Callable[[Any, Tensor], Tensor]
"""Maps (outputs, targets) to losses whose first dimension runs over the samples."""

Batch = tuple[Tensor, Tensor]

log = logging.getLogger("flwr")


class Obstacle(NamedTuple):
    """What stopped the vectorised way."""

    place: str
    reason: str


# By model: the vectorised way is not tried a second time.
_OBSTACLES: WeakKeyDictionary[nn.Module, Obstacle] = WeakKeyDictionary()
_warned: set[tuple[str, Obstacle]] = set()

_LONGEST_REASON = 160


def losses_of(
    model: Callable[[Tensor], Any], loss_fn: LossFn, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Return one loss per sample, the mean of its own losses where it has several."""
    losses = loss_fn(model(inputs), targets)
    if losses.dim() == 0 or len(losses) != len(targets):
        raise ValueError(
            f"loss_fn must return one loss per sample (reduction='none'), so {len(targets)} along "
            f"the first dimension, but its shape is {tuple(losses.shape)}"
        )
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def moments_of_any_model(
    model: nn.Module, loss_fn: LossFn, batch: Batch, memory_limit: int
) -> dict[nn.Parameter, Moments]:
    """Return the moments, vectorised if the model can be, else with a warning one by one."""
    obstacle = _OBSTACLES.get(model)
    if obstacle is None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop because we have not")
                return vectorised(model, loss_fn, batch, memory_limit)
        except Exception as error:  # torch has many ways to say that it cannot vectorise
            obstacle = _obstacle(model, error)
    started = time.perf_counter()
    moments = one_by_one(model, loss_fn, batch)  # raises if the model itself is at fault
    _OBSTACLES[model] = obstacle
    _warn(model, obstacle, len(batch[0]), time.perf_counter() - started)
    return moments


def vectorised(
    model: nn.Module, loss_fn: LossFn, batch: Batch, memory_limit: int
) -> dict[nn.Parameter, Moments]:
    """Per-sample gradients of all parameters at once, from a vectorised `grad`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # All names of tied weights, but only one path to a shared layer: `functional_call` finds the
    # paths by itself too, and then leaves such a layer without its parameters.
    positions = {parameter: position for position, parameter in enumerate(parameters)}
    names = {
        name: positions[parameter]
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False)
        if parameter.requires_grad
    }

    def loss_of_one(values: list[Tensor], one_input: Tensor, one_target: Tensor) -> Tensor:
        named = {name: values[position] for name, position in names.items()}
        call = partial(torch.func.functional_call, model, named, tie_weights=False)
        return losses_of(call, loss_fn, one_input.unsqueeze(0), one_target.unsqueeze(0)).sum()

    gradients_of = torch.func.vmap(torch.func.grad(loss_of_one), randomness="different")
    chunk = chunk_size(memory_limit, sum(p.numel() for p in parameters))
    total: dict[nn.Parameter, Moments] = {}
    for inputs, targets in zip(*(torch.split(tensor, chunk) for tensor in batch), strict=True):
        # Each sample has its own (expanded) parameters, because recurrent layers write into
        # results of the parameters alone, which fails if only the inputs are vectorised.
        values = [p.detach().expand(len(inputs), *p.shape) for p in parameters]
        # The fused kernels of attention have no vectorised form.
        with sdpa_kernel(SDPBackend.MATH):
            all_gradients = gradients_of(values, inputs, targets)
        for parameter, gradients in zip(parameters, all_gradients, strict=True):
            total[parameter] = added(total.get(parameter), gradients)
    return total


def one_by_one(model: nn.Module, loss_fn: LossFn, batch: Batch) -> dict[nn.Parameter, Moments]:
    """Take a forward and a backward pass for each sample, as the definition says."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total: dict[nn.Parameter, Moments] = {}
    for inputs, targets in zip(*(torch.split(tensor, 1) for tensor in batch), strict=True):
        # Copies, which a forward pass or a loss may write into.
        loss = losses_of(model, loss_fn, inputs.clone(), targets.clone()).sum()
        if not loss.requires_grad:
            continue
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            total[parameter] = added(total.get(parameter), dense.unsqueeze(0))
    return total


def _warn(model: nn.Module, obstacle: Obstacle, samples: int, seconds: float) -> None:
    name = type(model).__qualname__
    if (name, obstacle) in _warned:
        return
    _warned.add((name, obstacle))
    log.warning(
        "A sketch of %s takes %.0f ms: %s does not work on many samples at once, so each of the %d "
        "samples of the calibration batch takes a backward pass of its own. A smaller batch takes "
        "less time. (torch: %s)",
        name,
        1000 * seconds,
        obstacle.place,
        samples,
        obstacle.reason,
    )


def _obstacle(model: nn.Module, error: Exception) -> Obstacle:
    """Name the layer that an error of the vectorised way comes from, and the error."""
    names = {module: name for name, module in model.named_modules()}
    found = None
    frame = error.__traceback__
    while frame is not None:  # the innermost call of a layer
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = owner
        frame = frame.tb_next
    if found is None:  # these fail elsewhere: in the backward pass, or before the first one
        suspects = (
            module
            for module in names
            if getattr(module, "sparse", False) or isinstance(module, torch.jit.ScriptModule)
        )
        found = next(suspects, None)
    if found is None:
        place = "its backward pass or loss"
    elif found is model:
        place = "its own forward pass"
    else:
        place = f"layer {names[found]!r} ({type(found).__name__})"
    reason = " ".join(str(error).split())
    if len(reason) > _LONGEST_REASON:
        reason = reason[: _LONGEST_REASON - 3] + "..."
    return Obstacle(place, reason or type(error).__name__)
