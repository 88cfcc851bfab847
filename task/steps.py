"""One step of stochastic gradient descent, eager or compiled.

For the loss F of a batch, the start x₀ of the local training and a proximal weight ρ, a step is

    y ← y - η (∇F(y) + ρ (y - x₀))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = ("eager", "compiled")

# One compiled variant per model, batch shape and use of the proximal term: a process that trains on
# all datasets needs a few dozen. Beyond the limit torch raises an error (see fullgraph below).
_MOST_COMPILED_VARIANTS = 64

Step = Callable[[Tensor, Tensor], Tensor]
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


def make_step(
    kind: str,
    model: nn.Module,
    learning_rate: float,
    proximal: float,
    loss_fn: LossFn | None = None,
) -> Step:
    """Return a function that takes a batch, updates the model and returns the batch's loss.

    Parameters
    ----------
    kind : str
        ``"eager"`` or ``"compiled"``. They agree to rounding, not to the bit: within a
        thousandth of the way the parameters move.
    model : nn.Module
        The model; its parameters now are the start x₀ of the proximal term.
    learning_rate : float
        The rate η.
    proximal : float
        The weight ρ; 0 leaves the term out. The loss returned is that of the data alone.
    loss_fn : Callable[[Tensor, Tensor], Tensor] | None (default: None)
        Loss per sample; None is cross-entropy.
    """
    if kind == "eager":
        return _eager_step(model, learning_rate, proximal, loss_fn)
    if kind == "compiled":
        return _compiled_step(model, learning_rate, proximal, loss_fn)
    raise ValueError(f"unknown step {kind!r}; choose from {', '.join(STEPS)}")


def _eager_step(
    model: nn.Module, learning_rate: float, proximal: float, loss_fn: LossFn | None
) -> Step:
    parameters = trainable(model)
    start = [parameter.detach().clone() for parameter in parameters] if proximal else []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = batch_loss(loss_fn, model(x), y)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            if start:
                distance = torch._foreach_sub(parameters, start)
                gradients = torch._foreach_add(gradients, distance, alpha=proximal)
            torch._foreach_add_(parameters, gradients, alpha=-learning_rate)
        return loss.detach()

    return step


def _whole_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    learning_rate: Tensor,
    proximal: Tensor,
    start: Sequence[Tensor],
    loss_fn: LossFn | None,
) -> Tensor:
    """Do the same as the eager step, in the form in which it compiles into a single graph."""
    parameters = trainable(model)
    loss = batch_loss(loss_fn, model(x), y)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            gradient = gradients[index]
            if start:
                gradient = gradient + proximal * (parameter - start[index])
            parameter.sub_(learning_rate * gradient)
    return loss.detach()


@cache
def _compiled() -> Callable[..., Tensor]:
    # The model is an argument: torch guards its structure, not its identity, so that all models of
    # one architecture share the compiled code. fullgraph, else parts could silently run eagerly.
    return torch.compile(_whole_step, fullgraph=True, dynamic=False)


def _compiled_step(
    model: nn.Module, learning_rate: float, proximal: float, loss_fn: LossFn | None
) -> Step:
    device = next(model.parameters()).device
    start = [parameter.detach().clone() for parameter in trainable(model)] if proximal else []
    # As tensors, because a changed Python number would mean compiling anew.
    rate = torch.tensor(learning_rate, device=device)
    weight = torch.tensor(proximal, device=device)
    compiled = _compiled()

    def step(x: Tensor, y: Tensor) -> Tensor:
        try:
            return compiled(model, x, y, rate, weight, start, loss_fn)
        except Exception as error:
            if not _from_compiler(error):
                raise
            raise CompiledStepError(
                'the training step could not be compiled: step = "compiled" needs a working C++ '
                'compiler such as g++ (on PATH or in CXX). Install one or set step = "eager". '
                f"torch says: {type(error).__name__}: {error}"
            ) from error

    return step


def _from_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


@contextmanager
def compiler_settings(kind: str) -> Iterator[None]:
    """Hold the compiler settings that the steps of a kind need."""
    if kind != "compiled":
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(
        trace_autograd_ops=True, recompile_limit=_MOST_COMPILED_VARIANTS
    ):
        yield
