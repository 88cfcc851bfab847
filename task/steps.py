"""Steps of stochastic gradient descent, eager or compiled.

For the loss F of a batch, the start x₀ of the local training and a proximal weight ρ, a step is

    y ← y - η (∇F(y) + ρ (y - x₀))
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger("flwr")

STEPS = ("eager", "compiled")

# One compiled variant per model, size of a batch, size of a last, shorter batch and use of the
# proximal term. Beyond the limit torch raises an error (see fullgraph below).
_MOST_COMPILED_VARIANTS = 256

# A call of compiled code costs about as much as two steps of a small model. So such a model takes
# all steps of a task in one call, by a loop that is compiled too.
_SMALL_MODEL = 2**17

Training = Callable[[Tensor, Tensor, Tensor], Tensor]
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


def make_training(
    kind: str,
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None = None,
) -> Training:
    """Return a function of all inputs, all targets and the orders in which to visit them.

    The orders are a matrix with a row for every epoch. It takes one step per batch, the last,
    shorter one of an epoch included, which updates the model, and returns the mean of the batches'
    losses.

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
        return _eager_training(model, batch_size, learning_rate, proximal, loss_fn)
    if kind == "compiled":
        make = _looped_training if _can_loop(model) else _compiled_training
        return make(model, batch_size, learning_rate, proximal, loss_fn)
    raise ValueError(f"unknown step {kind!r}; choose from {', '.join(STEPS)}")


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


# --- One call per step ----------------------------------------------------------------------------


def _step_by_step(
    model: nn.Module, batch_size: int, step: Callable[[Tensor, Tensor], Tensor]
) -> Training:
    def training(inputs: Tensor, targets: Tensor, orders: Tensor) -> Tensor:
        losses = []
        for order in orders:
            x = in_layout_of(model, inputs.index_select(0, order))
            y = targets.index_select(0, order)
            batches = zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
            losses += [step(*batch) for batch in batches]
        return torch.stack(losses).mean(dtype=torch.float64)

    return training


def _eager_training(
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None,
) -> Training:
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

    return _step_by_step(model, batch_size, step)


def _compiled_training(
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None,
) -> Training:
    parameters = trainable(model)
    start = _start(parameters, proximal)
    rate, weight, device = _numbers(model, learning_rate, proximal)
    compiled = _compiled(_whole_step, device.type)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with _autograd_in_graphs():
            loss: Tensor = _call(compiled, model, x, y, rate, weight, start, loss_fn)
        return loss

    return _step_by_step(model, batch_size, step)


def _whole_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rate: Tensor,
    weight: Tensor,
    start: Sequence[Tensor],
    loss_fn: LossFn | None,
) -> Tensor:
    """Do the same as an eager step, in the form in which it compiles into a single graph."""
    parameters = trainable(model)
    loss = batch_loss(loss_fn, model(x), y)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            gradient = gradients[index]
            if start:
                gradient = gradient + weight * (parameter - start[index])
            parameter.sub_(rate * gradient)
    return loss.detach()


# --- One call for all steps -----------------------------------------------------------------------


# The cases in which a loop was refused, for every model that met one.
_refused: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def _can_loop(model: nn.Module) -> bool:
    """Tell whether a compiled loop is worth it and possible: what it changes must go through it.

    A parameter that has several names might keep its value under one of them.
    """
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False)]
    return (
        parameters[0].device.type == "cpu"
        and sum(parameter.numel() for parameter in parameters) <= _SMALL_MODEL
        and len(set(map(id, parameters))) == len(parameters)
        and next(model.buffers(), None) is None
    )


def _looped_training(
    model: nn.Module,
    batch_size: int,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None,
) -> Training:
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    start = _start(list(values.values()), proximal)
    rate, weight, device = _numbers(model, learning_rate, proximal)
    compiled = _compiled(_all_steps, device.type)

    def one_by_one(*data: Tensor) -> Tensor:
        return _compiled_training(model, batch_size, learning_rate, proximal, loss_fn)(*data)

    def training(inputs: Tensor, targets: Tensor, orders: Tensor) -> Tensor:
        epochs, num_samples = orders.shape
        full, rest = divmod(num_samples, batch_size)
        case = (batch_size, rest, bool(start), loss_fn)
        if case in _refused.get(model, ()):
            return one_by_one(inputs, targets, orders)
        data = (inputs.detach(), targets.detach(), orders.flatten())
        _share_code(*data)
        counts = (torch.tensor(epochs), torch.tensor(full), batch_size, rest)
        try:
            # Values that share the model's memory: a forward pass that gets at a parameter by
            # another way, where it would not see it change, is refused for that.
            total, *ends = _call(
                compiled, model, values, *data, *counts, rate, weight, start, loss_fn
            )
        except CompiledStepError as error:
            if not _follows_from_model(error):
                raise
            loss = one_by_one(inputs, targets, orders)
            # Only now: what fails either way is the samples' fault, and no other client's matter.
            _refused.setdefault(model, []).append(case)
            log.warning("%s is compiled step by step: %s", type(model).__name__, error.__cause__)
            return loss
        for value, end in zip(values.values(), ends, strict=True):
            value.copy_(end)
        return cast(Tensor, total / (epochs * (full + bool(rest))))

    return training


def _share_code(*tensors: Tensor) -> None:
    """Let clients with more or fewer full batches use the same code, instead of compiling theirs.

    A last, shorter batch of another size is other code.
    """
    import torch._dynamo

    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _follows_from_model(error: BaseException | None) -> bool:
    """Tell whether a loop would be refused for the same reason in every process.

    Only then may its steps be compiled one by one, because they may round differently.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    while error is not None:
        if isinstance(
            error, OSError | CppCompileError | InvalidCxxCompiler | FailOnRecompileLimitHit
        ):
            return False
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return True


def _all_steps(
    model: nn.Module,
    values: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    order: Tensor,
    epochs: Tensor,
    full: Tensor,
    batch_size: int,
    rest: int,
    rate: Tensor,
    weight: Tensor,
    start: Sequence[Tensor],
    loss_fn: LossFn | None,
) -> tuple[Tensor, ...]:
    """Do the same as eager steps, in two loops: over epochs, and over their full batches.

    What changes goes through the loops: a counter, the sum of the losses and the parameters.
    """
    from torch._higher_order_ops import while_loop as untyped

    while_loop: Callable[..., tuple[Tensor, ...]] = untyped

    def step(
        position: Tensor, size: int, total: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        part = order.index_select(0, position + torch.arange(size))
        x, y = in_layout_of(model, inputs.index_select(0, part)), targets.index_select(0, part)

        def loss_of(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            loss = batch_loss(loss_fn, torch.func.functional_call(model, values, (x,)), y)
            return loss, loss

        by_name, loss = torch.func.grad(loss_of, has_aux=True)(
            dict(zip(values, parameters, strict=True))
        )
        gradients = list(by_name.values())
        if start:
            gradients = [
                gradient + weight * (parameter - first)
                for gradient, parameter, first in zip(gradients, parameters, start, strict=True)
            ]
        return total + loss, *(
            parameter - rate * gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        )

    def epoch(index: Tensor, total: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        position = index * (full * batch_size + rest)

        def batch(index: Tensor, total: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            return index + 1, *step(position + index * batch_size, batch_size, total, parameters)

        begin = (_zero(torch.int64), total, *parameters)
        _, total, *found = while_loop(lambda index, *_: index < full, batch, begin)
        if rest:
            total, *found = step(position + full * batch_size, rest, total, found)
        return index + 1, total, *found

    begin = (_zero(torch.int64), _zero(torch.float64), *values.values())
    return while_loop(lambda index, *_: index < epochs, epoch, begin)[1:]


def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


# --- The compiler ---------------------------------------------------------------------------------


def _numbers(
    model: nn.Module, learning_rate: float, proximal: float
) -> tuple[Tensor, Tensor, torch.device]:
    """Return η and ρ as tensors, because a changed Python number would mean compiling anew."""
    device = next(model.parameters()).device
    rate, weight = (torch.tensor(number, device=device) for number in (learning_rate, proximal))
    return rate, weight, device


@cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    # The model is an argument: torch guards its structure, not its identity, so that all models of
    # one architecture share the compiled code. fullgraph, else parts could silently run eagerly.
    # On a CPU also what calls the kernels is compiled: in Python it takes a third of small steps.
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        function,
        fullgraph=True,
        dynamic=False,
        options={"cpp_wrapper": True} if device_type == "cpu" else None,
        recompile_limit=_MOST_COMPILED_VARIANTS,
    )
    return compiled


def _call(compiled: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return compiled(*arguments)
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise CompiledStepError(
            'the training step could not be compiled: step = "compiled" needs a working C++ '
            'compiler such as g++ (on PATH or in CXX). Install one or set step = "eager". '
            f"torch says: {type(error).__name__}: {error}"
        ) from error


@cache
def _autograd_in_graphs() -> AbstractContextManager[Any]:
    import torch._dynamo

    # Made once: torch makes a class for every one of them.
    settings: AbstractContextManager[Any] = torch._dynamo.config.patch(trace_autograd_ops=True)
    return settings
