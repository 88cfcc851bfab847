"""Sensitivities of small models and their sketches, by compiled code.

Where a model is small, calling the operations takes longer than what they compute. Compiled into a
single call, sensitivity and sketch of a linear model take about a fifth of the time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedpsa_strategy.calibration import Calibration
from fedpsa_strategy.errors import CompilationError
from fedpsa_strategy.parameter_sensitivity import (
    LossFunction,
    gradient_moments,
    num_trainable,
    sensitivity,
)
from fedpsa_strategy.sketch import HALF_WORDS, Sketch, fold, signs_of_bits

log = logging.getLogger("flwr")

_SMALL = 2**17  # parameters of a model up to which the calls are what costs
_MOST_VARIANTS = 8  # that are compiled for one model
_MOST_OPERATIONS = 500  # of the code: more take a compiler too long, and are not small
_TOLERANCE = 1e-3  # of the largest sensitivity, when the compiled code is tried out

_Compiled = Callable[..., Any]
_UNKNOWN: Any = object()

# For every model a few pairs: a kind of batch, loss and sketch, and the code for it.
_known: WeakKeyDictionary[nn.Module, list[tuple[Any, _Compiled | None]]] = WeakKeyDictionary()
_seconds = 0.0


def compile_seconds() -> float:
    """Return how long compiling sensitivities has taken in this process."""
    return _seconds


def compiled_sensitivity(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: LossFunction | None = None
) -> Tensor:
    """Return what `sensitivity` returns, up to rounding.

    Compiled are models on a CPU with at most 2^17 parameters, all of linear layers in 32 or 64
    bits; others gain nothing, and are left to `sensitivity`. So are, with a warning, models that
    cannot be recorded or compiled and those whose compiled code turns out to compute something
    else. Which it is does not depend on the parameters' values: it is the same in every process.
    Model and loss have to be the same objects in every call, because the code is kept with them.
    What the forward pass does must follow from inputs, parameters and buffers alone: it is recorded
    once.

    Parameters
    ----------
    model, inputs, targets, loss_fn
        See `sensitivity`.

    Raises
    ------
    CompilationError
        If there is no working compiler.
    """
    code, tensors = _code(model, list(model.parameters()), inputs, targets, loss_fn)
    if code is None:
        return sensitivity(model, inputs, targets, loss_fn)
    found: Tensor = code(inputs, targets, *tensors)
    return found


def sketched_sensitivity(
    sketch: Sketch,
    calibration: Calibration,
    model: nn.Module,
    loss_fn: LossFunction | None = None,
) -> NDArray[np.float64]:
    """Return the sketch of the compiled sensitivity to a calibration batch.

    A short Rademacher sketch is part of the compiled code, where one thread executes it: several
    would add up in any order. It has the same bits as the sketch alone of the same sensitivities.

    Parameters
    ----------
    sketch : Sketch
        The projection.
    calibration : Calibration
        The batch.
    model, loss_fn
        See `compiled_sensitivity`.

    Raises
    ------
    CompilationError
        If there is no working compiler.
    """
    parameters = list(model.parameters())
    batch = calibration.tensors(str(parameters[0].device))
    half_words = sketch.half_words
    if half_words is not None and torch.get_num_threads() == 1:
        code, tensors = _code(model, parameters, *batch, loss_fn, sketch)
        if code is not None:
            rows, _ = code(*batch, *tensors, torch.from_numpy(half_words))
            found: NDArray[np.float64] = rows.numpy()
            return found
    return sketch(compiled_sensitivity(model, *batch, loss_fn))


def _code(
    model: nn.Module,
    parameters: list[nn.Parameter],
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction | None,
    sketch: Sketch | None = None,
) -> tuple[_Compiled | None, list[Tensor]]:
    """Return the compiled code, None if there is to be none, and the tensors of the model for it.

    With a sketch it is code for all sketches of its form: the half words are another argument.
    """
    tensors = [tensor.detach() for tensor in (*parameters, *model.buffers())]
    key = (
        loss_fn,
        None if sketch is None else (sketch.size, sketch.dim),
        torch.get_num_threads(),
        [parameter.requires_grad for parameter in parameters],
        [(t.shape, t.stride(), t.dtype, t.device) for t in (inputs, targets, *tensors)],
    )
    known = _known.setdefault(model, [])
    compiled = next((code for other, code in known if other == key), _UNKNOWN)
    if compiled is _UNKNOWN:
        compiled = None
        if len(known) < _MOST_VARIANTS:
            if _suits(model, inputs, sketch):
                compiled = _compile(model, inputs, targets, loss_fn, sketch)
            known.append((key, compiled))
    return compiled, tensors


def _suits(model: nn.Module, inputs: Tensor, sketch: Sketch | None) -> bool:
    modules = list(model.modules())
    return (
        # The sketch itself says that it is one of another model.
        (sketch is None or sketch.size == num_trainable(model))
        and all(type(module) is nn.Linear for module in modules if module._parameters)
        # Tensors cannot be exchanged reliably in a layer that has two names.
        and len(modules) == len(list(model.named_modules(remove_duplicate=False)))
        and sum(parameter.numel() for parameter in model.parameters()) <= _SMALL
        and all(tensor.device.type == "cpu" for tensor in (inputs, *model.parameters()))
        and all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    )


class _Recorded(nn.Module):
    """The sensitivity as a module, for which torch can exchange the tensors of the model."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self._loss = (loss_fn,)  # in a tuple: a loss that is a module is no part of the model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return |g θ - ½ F θ²|.

        Without `sensitivity`'s operations in place and `alpha`: torch 2.13 compiles a matrix
        product and the `add` behind it into one, and loses the factor.
        """
        moments = gradient_moments(self.model, inputs, targets, *self._loss)
        parts = []
        for parameter in filter(lambda p: p.requires_grad, self.model.parameters()):
            value = parameter.detach()
            part = torch.zeros_like(value)
            if parameter in moments:  # else the loss does not depend on it
                gradient, fisher = (moment * (1 / len(inputs)) for moment in moments[parameter])
                part = ((gradient - 0.5 * fisher * value) * value).abs()
            parts.append(part.flatten().float())
        return torch.cat(parts)


def _sketched(vector: Tensor, half_words: Tensor, dim: int) -> Tensor:
    """Do what a short sketch does, in the same order."""
    sums = torch.zeros(len(half_words), HALF_WORDS, dtype=torch.float64)
    sums = sums.scatter_add(1, half_words.long(), vector.double().expand(len(half_words), -1))
    signs = torch.from_numpy(signs_of_bits(HALF_WORDS))
    rows: Tensor = fold(sums[:, None] * signs).flatten()[:dim]
    return rows * (1 / math.sqrt(dim))


def _compile(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction | None,
    sketch: Sketch | None,
) -> _Compiled | None:
    """Return the compiled code, or None, with a warning, if it must not be used."""
    global _seconds
    started, found = time.perf_counter(), None
    with _values_to_try(model):
        try:
            graph, arguments = _record(model, inputs, targets, loss_fn, sketch)
            if (size := len(graph.graph.nodes)) > _MOST_OPERATIONS:
                reason = f"it takes {size} operations"
            else:
                compiled = _compile_graph(graph, arguments)
                found = compiled(*arguments)
        except CompilationError:
            raise
        except Exception as error:
            reason = f"it cannot be recorded or compiled ({type(error).__name__}: {error})"
        finally:
            _seconds += time.perf_counter() - started
        # Behind the recording, which may have left placeholders in the model.
        expected = sensitivity(model, inputs, targets, loss_fn)
    if found is not None:
        vector = found if sketch is None else found[1]
        error_size = float((vector - expected).abs().max())
        if not error_size <= _TOLERANCE * float(expected.abs().max()):
            reason = f"its compiled code is off by {error_size:.2g}"
        elif sketch is None or found[0].tolist() == sketch(vector).tolist():
            return compiled
        else:
            reason = "its compiled code adds up in another order"
    what = "sensitivity" if sketch is None else "sketch"
    log.warning("The %s of %s is not compiled: %s", what, type(model).__name__, reason)
    return None


@contextmanager
def _values_to_try(model: nn.Module) -> Iterator[None]:
    """Give the parameters values that are the same in every process, then their own again."""
    generator = torch.Generator().manual_seed(0)
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            scale = max(1, parameter.shape[-1]) ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, own, strict=True):
                parameter.copy_(value)


def _record(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction | None,
    sketch: Sketch | None,
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the operations, and the arguments they were recorded with.

    They compute the sensitivity, or with a sketch that and its sketch.
    """
    recorded = _Recorded(model, loss_fn)
    trainable = {name: p.requires_grad for name, p in recorded.named_parameters()}
    names = [*trainable, *(name for name, _ in recorded.named_buffers())]

    def with_tensors(inputs: Tensor, targets: Tensor, *tensors: Tensor) -> Tensor:
        leaves = {
            name: tensor.detach().requires_grad_(trainable.get(name, False))
            for name, tensor in zip(names, tensors, strict=True)
        }
        result: Tensor = torch.func.functional_call(recorded, leaves, (inputs, targets))
        return result

    def with_sketch(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        assert sketch is not None
        vector = with_tensors(*arguments[:-1])
        return _sketched(vector, arguments[-1], sketch.dim), vector

    tensors = (tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
    arguments = [inputs, targets, *tensors]
    if sketch is not None:
        arguments.append(torch.from_numpy(sketch.half_words))
    function = with_tensors if sketch is None else with_sketch
    graph: torch.fx.GraphModule = make_fx(function, tracing_mode="fake")(*arguments)
    return graph, arguments


def _compile_graph(graph: torch.fx.GraphModule, arguments: list[Any]) -> _Compiled:
    import torch._inductor

    try:
        compiled: Any = torch._inductor.compile(graph, arguments, options={"cpp_wrapper": True})
    except Exception as error:
        if not _lacks_compiler(error):
            raise
        raise CompilationError(
            "the sensitivities could not be compiled, which needs a working C++ compiler such as "
            'g++ (on PATH or in CXX): install one, or set step = "eager". '
            f"torch says: {type(error).__name__}: {error}"
        ) from error
    return compiled  # type: ignore[no-any-return]


def _lacks_compiler(error: BaseException | None) -> bool:
    """Tell whether an error, or what caused it, is that of a missing or broken C++ compiler."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    while error is not None:
        if isinstance(error, CppCompileError | InvalidCxxCompiler):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False
