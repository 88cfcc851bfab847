"""Steps of stochastic gradient descent, eager or compiled.

For the loss F of a batch, the start x₀ of the local training and a proximal weight ρ, a step is

    y ← y - η (∇F(y) + ρ (y - x₀))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = ("eager", "compiled")

# One compiled variant per model, number of steps in a call, size of a last, shorter batch and use
# of the proximal term. Beyond the limit torch raises an error (see fullgraph below).
_MOST_COMPILED_VARIANTS = 256

# A call of compiled code costs about as much as two steps of a small model. So such a model takes
# up to so many steps in a call, which a large one would only take longer to compile for.
_STEPS_PER_CALL = 20
_SMALL_MODEL = 2**17

Epoch = Callable[[Tensor, Tensor, Tensor], Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]


class CompiledStepError(RuntimeError):
    """The compiled training step cannot be had here."""


def trainable(model: nn.Module) -> list[Tensor]:
    """Return the parameters that training changes."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch_loss(loss_fn: LossFn | None, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of a per-sample loss; None is cross-entropy, fused with its mean."""
    if loss_fn is None:
        return functional.cross_entropy(outputs, targets)
    return loss_fn(outputs, targets).mean()


def make_epoch(
    kind: str,
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None = None,
) -> Epoch:
    """Return a function that takes all inputs and targets, and the order in which to visit them.

    It takes one step per batch, the last, shorter one included, which updates the model, and
    returns the batches' losses.

    Parameters
    ----------
    kind : str
        ``"eager"`` or ``"compiled"``. They agree to rounding, not to the bit: within a
        thousandth of the way the parameters move.
    model : nn.Module
        The model; its parameters now are the start x₀ of the proximal term.
    batch_size : int
        Samples per step.
    learning_rate : float
        The rate η.
    proximal : float
        The weight ρ; 0 leaves the term out. The losses returned are those of the data alone.
    loss_fn : Callable[[Tensor, Tensor], Tensor] | None (default: None)
        Loss per sample; None is cross-entropy.
    """
    if kind == "eager":
        return _eager_epoch(model, batch_size, learning_rate, proximal, loss_fn)
    if kind == "compiled":
        return _compiled_epoch(model, batch_size, learning_rate, proximal, loss_fn)
    raise ValueError(f"unknown step {kind!r}; choose from {', '.join(STEPS)}")


def _eager_epoch(
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None,
) -> Epoch:
    parameters = trainable(model)
    start = _start(parameters, proximal)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = batch_loss(loss_fn, model(x), y)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            if start:
                distance = torch._foreach_sub(parameters, start)
                gradients = torch._foreach_add(gradients, distance, alpha=proximal)
            torch._foreach_add_(parameters, gradients, alpha=-learning_rate)
        return loss.detach()

    def epoch(inputs: Tensor, targets: Tensor, order: Tensor) -> Tensor:
        batches = zip(
            torch.split(in_layout_of(model, inputs.index_select(0, order)), batch_size),
            torch.split(targets.index_select(0, order), batch_size),
            strict=True,
        )
        return torch.stack([step(x, y) for x, y in batches])

    return epoch


def in_layout_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs in the memory format in which the model is fastest.

    Convolutions take about a quarter less time on channels-last inputs; a model without any would
    only have to copy them back.
    """
    if x.dim() == 4 and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _start(parameters: Sequence[Tensor], proximal: float) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters] if proximal else []


def _whole_steps(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    order: Tensor | None,
    batch_size: int,
    learning_rate: Tensor,
    proximal: Tensor,
    start: Sequence[Tensor],
    loss_fn: LossFn | None,
) -> Tensor:
    """Do the same as eager steps, in the form in which they compile into a single graph."""
    parameters = trainable(model)
    losses = []
    for x, y in _batches(model, inputs, targets, order, batch_size):
        loss = batch_loss(loss_fn, model(x), y)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                gradient = gradients[index]
                if start:
                    gradient = gradient + proximal * (parameter - start[index])
                parameter.sub_(learning_rate * gradient)
        losses.append(loss.detach())
    return torch.stack(losses)


def _batches(
    model: nn.Module, inputs: Tensor, targets: Tensor, order: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; without an order the samples are in theirs already."""
    if order is None:
        yield from zip(
            torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True
        )
        return
    for part in torch.split(order, batch_size):
        yield in_layout_of(model, inputs.index_select(0, part)), targets.index_select(0, part)


@cache
def _compiled(device_type: str) -> Callable[..., Tensor]:
    # The model is an argument: torch guards its structure, not its identity, so that all models of
    # one architecture share the compiled code. fullgraph, else parts could silently run eagerly.
    # On a CPU also what calls the kernels is compiled: in Python it takes a third of small steps.
    options: dict[str, Any] | None = {"cpp_wrapper": True} if device_type == "cpu" else None
    return torch.compile(_whole_steps, fullgraph=True, dynamic=False, options=options)


def _compiled_epoch(
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None,
) -> Epoch:
    device = next(model.parameters()).device
    parameters = trainable(model)
    start = _start(parameters, proximal)
    # As tensors, because a changed Python number would mean compiling anew.
    rate = torch.tensor(learning_rate, device=device)
    weight = torch.tensor(proximal, device=device)
    compiled = _compiled(device.type)
    small = sum(parameter.numel() for parameter in parameters) <= _SMALL_MODEL
    most_steps = _STEPS_PER_CALL if small else 1

    def steps(inputs: Tensor, targets: Tensor, order: Tensor | None) -> Tensor:
        try:
            return compiled(model, inputs, targets, order, batch_size, rate, weight, start, loss_fn)
        except Exception as error:
            if not _from_compiler(error):
                raise
            raise CompiledStepError(
                'the training step could not be compiled: step = "compiled" needs a working C++ '
                'compiler such as g++ (on PATH or in CXX). Install one or set step = "eager". '
                f"torch says: {type(error).__name__}: {error}"
            ) from error

    def epoch(inputs: Tensor, targets: Tensor, order: Tensor) -> Tensor:
        sizes = _samples_per_call(len(order), batch_size, most_steps)
        if small:
            _allow_other_lengths(inputs, targets)
            # Batches that are gathered when their turn comes are still in the cache when used.
            parts = torch.split(order, sizes)
            return torch.cat([steps(inputs, targets, part) for part in parts])
        x = in_layout_of(model, inputs.index_select(0, order))
        y = targets.index_select(0, order)
        calls = zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)
        return torch.cat([steps(x, y, None) for x, y in calls])

    return epoch


_lengths_seen: set[int] = set()


def _allow_other_lengths(inputs: Tensor, targets: Tensor) -> None:
    """Where clients have different numbers of samples, let all share the compiled code.

    Else each would wait for a compiler. Code for one length alone is a little faster, and gives the
    same bits: batches are copied out of the samples either way.
    """
    import torch._dynamo

    _lengths_seen.add(len(inputs))
    if len(_lengths_seen) > 1:
        torch._dynamo.maybe_mark_dynamic(inputs, 0)
        torch._dynamo.maybe_mark_dynamic(targets, 0)


def _samples_per_call(num_samples: int, batch_size: int, most_steps: int) -> list[int]:
    """Share the full batches of an epoch out to as few and as equal calls as can be.

    Equal, because every other size has to be compiled; a last, shorter batch has its own call.
    """
    full, rest = divmod(num_samples, batch_size)
    num_calls = -(-full // most_steps)
    steps = [full // num_calls + (call < full % num_calls) for call in range(num_calls)]
    return [batch_size * count for count in steps] + [rest] * bool(rest)


def _from_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def compiler_settings(kind: str) -> AbstractContextManager[Any]:
    """Hold the compiler settings that the steps of a kind need."""
    return _compiled_settings() if kind == "compiled" else nullcontext()


@cache
def _compiled_settings() -> AbstractContextManager[Any]:
    import torch._dynamo

    # Made once: torch makes a class for every one of them.
    settings: AbstractContextManager[Any] = torch._dynamo.config.patch(
        trace_autograd_ops=True,
        recompile_limit=_MOST_COMPILED_VARIANTS,
        accumulated_recompile_limit=_MOST_COMPILED_VARIANTS,
    )
    return settings
