"""Steps of stochastic gradient descent, eager or compiled.

For the loss F of a batch, the start x₀ of the local training and a proximal weight ρ, a step is

    y ← y - η (∇F(y) + ρ (y - x₀))
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = ("eager", "compiled")
AUTOCAST = ("off", "bfloat16")  # float16 would need its losses scaled

# Variants of the compiled epoch: per architecture, size of a batch, loss and use of the proximal
# term, a few for one and for many numbers of samples. Beyond the limit torch raises an error.
_MOST_COMPILED_VARIANTS = 256

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
    autocast: str = "off",
) -> Training:
    """Return a function of all inputs, all targets and the orders in which to visit them.

    The orders are a matrix with a row for every epoch. It takes one step per batch, the last,
    shorter one of an epoch included, which updates the model, and returns the mean of the batches'
    losses.

    Parameters
    ----------
    kind : str
        ``"eager"`` or ``"compiled"``. They agree to rounding, not to the bit: within a
        thousandth of the way the parameters move. Compiled, all full batches of an epoch are one
        call; the last, shorter one is an eager step, so that clients of all sizes share the code.
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
    autocast : str (default: "off")
        ``"bfloat16"`` computes what torch thinks safe in 16 bits; for eager steps.
    """
    if autocast not in AUTOCAST:
        raise ValueError(f"unknown autocast {autocast!r}; choose from {', '.join(AUTOCAST)}")
    if autocast != "off" and kind == "compiled":
        raise ValueError(f"autocast {autocast!r} needs eager steps")
    if kind not in STEPS:
        raise ValueError(f"unknown step {kind!r}; choose from {', '.join(STEPS)}")
    parameters = trainable(model)
    # Also switched off, torch's own takes a good part of a small model's step.
    precision: AbstractContextManager[Any] = nullcontext()
    if autocast != "off":
        precision = torch.autocast(parameters[0].device.type, torch.bfloat16)
    start = [parameter.detach().clone() for parameter in parameters] if proximal else []

    def step(x: Tensor, y: Tensor) -> Tensor:
        with precision:
            loss = batch_loss(loss_fn, model(x), y)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                if start:
                    gradient = gradient.add(parameter - start[index], alpha=proximal)
                parameter.add_(gradient, alpha=-learning_rate)
        return loss.detach()

    def training(inputs: Tensor, targets: Tensor, orders: Tensor) -> Tensor:
        losses: list[Tensor] = []
        full = orders.shape[1] // batch_size * batch_size if kind == "compiled" else 0
        for order in orders:
            if full:
                batches = order[:full].view(-1, batch_size)
                losses += _compiled_epoch(
                    model, inputs, targets, batches, learning_rate, proximal, start, loss_fn
                )
            rest = order[full:]
            if len(rest):
                x = in_layout_of(model, inputs.index_select(0, rest))
                y = targets.index_select(0, rest)
                parts = zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
                losses += [step(*part) for part in parts]
        return torch.stack(losses).mean(dtype=torch.float64)

    return training


def in_layout_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs in the memory format in which the model is fastest.

    Convolutions take about a quarter less time on channels-last inputs; a model without any would
    only have to copy them back.
    """
    if x.dim() == 4 and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _epoch(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    batches: Tensor,
    rate: Tensor,
    weight: Tensor,
    start: Sequence[Tensor],
    loss_fn: LossFn | None,
) -> Tensor:
    """Do the same as eager steps, in the form in which an epoch compiles as a whole.

    Every row of ``batches`` is one; returns their losses. What a step changes goes through the
    loop: parameters and buffers by name.
    """
    # A range needs a number: so a batch's size is never compiled as an unknown, as that of a client
    # is, which dropout could not do with.
    size = len(range(batches.shape[1]))
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())

    def step(index: Tensor, losses: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        batch = batches.index_select(0, index).view(size)
        x = in_layout_of(model, inputs.index_select(0, batch))
        y = targets.index_select(0, batch)
        before = dict(zip(values, state, strict=False))

        def loss_of(values: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
            after = {name: b.clone() for name, b in zip(buffers, state[len(values) :], strict=True)}
            outputs = torch.func.functional_call(model, values | after, (x,))
            loss = batch_loss(loss_fn, outputs, y)
            return loss, (loss, list(after.values()))

        by_name, (loss, after) = torch.func.grad(loss_of, has_aux=True)(before)
        gradients = [by_name[name] for name in before]
        if start:
            pairs = zip(gradients, before.values(), start, strict=True)
            gradients = [gradient + weight * (value - first) for gradient, value, first in pairs]
        moved = zip(before.values(), gradients, strict=True)
        return (
            index + 1,
            losses.index_copy(0, index, loss.double()[None]),
            *(value - rate * gradient for value, gradient in moved),
            *after,
        )

    index = torch.zeros(1, dtype=torch.int64, device=inputs.device)
    losses = torch.zeros(len(batches), dtype=torch.float64, device=inputs.device)
    changing = (*values.values(), *buffers.values())
    while_loop: Callable[..., tuple[Tensor, ...]] = torch.while_loop
    _, losses, *end = while_loop(
        lambda index, *_: index[0] < len(batches), step, (index, losses, *changing)
    )
    for tensor, value in zip(changing, end, strict=True):
        tensor.copy_(value)
    return losses


@cache
def _compiled(device_type: str) -> Callable[..., Tensor]:
    # The model is an argument: torch guards its structure, not its identity, so that all models of
    # one architecture share the code. The first client of another size means compiling again, for
    # any number of samples; the code of a step, and so its rounding, stays. fullgraph, else parts
    # could silently run eagerly. On a CPU also what calls the kernels is compiled: in Python it
    # takes a good part of a small model's time.
    compiled: Callable[..., Tensor] = torch.compile(  # type: ignore[call-overload]
        _epoch,
        fullgraph=True,
        options={"cpp_wrapper": True} if device_type == "cpu" else None,
        recompile_limit=_MOST_COMPILED_VARIANTS,
    )
    return compiled


def _compiled_epoch(model: nn.Module, *arguments: Any) -> Tensor:
    device = next(model.parameters()).device
    # Tensors, because a changed Python number would mean compiling again.
    tensors = (
        torch.tensor(argument, dtype=torch.float64, device=device)
        if isinstance(argument, float)
        else argument
        for argument in arguments
    )
    try:
        return _compiled(device.type)(model, *tensors)
    except Exception as error:
        raise CompiledStepError(
            'the training step could not be compiled: step = "compiled" needs a working C++ '
            "compiler such as g++ (on PATH or in CXX), and a model whose layers occur once and "
            'whose forward pass changes nothing but buffers. Otherwise set step = "eager". '
            f"torch says: {type(error).__name__}: {error}"
        ) from error
