"""The sensitivity of a model's loss to each of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from fedpsa_strategy.probe.layer_moments import LAYERS, Moments
from fedpsa_strategy.probe.per_sample import LossFn, losses_of, moments_of_any_model

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Samples that show whether rows of layers' inputs are samples.
_FEW = 8

# By model, the shapes of layers' inputs whose rows are known to be the samples.
_SHAPES_SEEN: WeakKeyDictionary[nn.Module, set[tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()


class _Call(NamedTuple):
    """What a forward hook saw of one call: the input, its version, where the output came from."""

    activation: Tensor
    version: int
    edge: GradientEdge | None


def sensitivity(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFn | None = None,
    *,
    memory_limit: int = 64 * 2**20,
) -> Tensor:
    """Return `s = |g θ - ½ F θ²|` for every trainable parameter θ of a model.

    `g` is the gradient of the mean loss over the calibration batch and `F` the diagonal of the
    empirical Fisher matrix, the mean over the samples of the squared per-sample gradient. Both
    follow from one forward and one backward pass: hooks keep each layer's input, the backward
    pass of the summed loss gives the gradient of each layer's output, and a row of either
    belongs to one sample. Where a parameter is used in any other way than by exactly one call of
    a layer known here (tied weights, attention, a bare `nn.Parameter`, ...), all per-sample
    gradients come from `torch.func.vmap` instead, which is slower; and where that cannot serve,
    from one backward pass per sample, with a warning that says what it costs.

    The model is evaluated in eval mode. Its mode, gradients and hooks and the global random state
    are the same afterwards.

    Parameters
    ----------
    model : nn.Module
        Maps a batch of inputs to outputs, sample by sample.
    inputs, targets : Tensor
        The calibration batch, `m` samples along the first dimension.
    loss_fn : callable (default: cross-entropy)
        Maps (outputs, targets) to one loss per sample, as `reduction="none"` does; dimensions
        after the first are averaged.
    memory_limit : int (default: 64 MiB)
        Bytes of per-sample gradients held at a time; one sample's are the least possible.

    Returns
    -------
    Tensor of float32, shape (d,)
        The sensitivities in `named_parameters()` order on the model's device, not finite where
        the gradients are not.

    Raises
    ------
    ValueError
        If the batch is empty, inputs and targets differ in length, or `loss_fn` does not return
        one loss per sample.
    """
    moments = _gradient_moments(model, inputs, targets, loss_fn, memory_limit)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return torch.zeros(0, device=inputs.device)
    samples, sizes = len(inputs), [p.numel() for p in parameters]
    result = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(result, sizes), strict=True):
        if parameter in moments:  # else the loss does not depend on it
            gradient, square = moments[parameter]
            value = parameter.detach()
            # (g - ½ F θ) θ, in place: memory traffic is a good part of the cost.
            square.mul_(value).mul_(-0.5 / samples).add_(gradient, alpha=1 / samples)
            part.copy_(square.mul_(value).abs_().flatten())
    return result


def _gradient_moments(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: LossFn | None, memory_limit: int
) -> dict[nn.Parameter, Moments]:
    """Return moments of the per-sample gradients of all parameters on which the loss depends."""
    if len(inputs) == 0 or len(targets) != len(inputs):
        raise ValueError(
            "inputs and targets must have the same number of samples, at least 1, "
            f"not {len(inputs)} and {len(targets)}"
        )
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        return {}
    # Copies: a forward pass or a loss may write into them, and the batch has to stay the same.
    batch = inputs.detach().to(device, copy=True), targets.detach().to(device, copy=True)
    loss_fn = loss_fn or partial(functional.cross_entropy, reduction="none")
    cuda = [device] if device.type == "cuda" else []
    with evaluation(model), torch.enable_grad(), torch.random.fork_rng(devices=cuda):
        moments = _moments_from_hooks(model, loss_fn, batch, memory_limit)
        if moments is None:
            moments = moments_of_any_model(model, loss_fn, batch, memory_limit)
    return moments


def num_trainable(model: nn.Module) -> int:
    """Return d, the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def trainable_vector(model: nn.Module) -> Tensor:
    """Return a copy of the trainable parameters θ as one vector, in the order of `sensitivity`."""
    parts = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(parts) if parts else torch.zeros(0)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, then each one back into its own mode."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training


def _moments_from_hooks(
    model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, Tensor], memory_limit: int
) -> dict[nn.Parameter, Moments] | None:
    """Gradients from layer inputs and output gradients, or None if that could be wrong."""
    owners = _owners(model)
    if owners is None:
        return None
    with _recording(owners) as calls:
        loss = losses_of(model, loss_fn, *batch).sum()
    uses = _uses(loss)
    used = {parameter: owner for parameter, owner in owners.items() if uses[parameter]}
    modules = list(dict.fromkeys(module for module, _ in used.values()))
    if (
        any(uses[parameter] > 1 for parameter in used)
        or not all(_is_readable(calls[module], len(batch[0])) for module in modules)
        or not _rows_are_samples(model, batch[0], owners, modules, calls)
    ):
        return None
    edges = [edge for module in modules if (edge := calls[module][0].edge)]
    deltas = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
    if any(delta is None for delta in deltas):
        return None

    delta_of = dict(zip(modules, deltas, strict=True))
    total: dict[nn.Parameter, Moments] = {}
    for parameter, (module, name) in used.items():
        # Squares of half-precision gradients would underflow.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        activation, delta = calls[module][0].activation, delta_of[module].to(dtype)
        if activation.is_floating_point():
            activation = activation.to(dtype)
        moments_of = LAYERS[type(module)]
        total[parameter] = moments_of(module, name, activation, delta, memory_limit)
    return total


@contextmanager
def _recording(
    owners: dict[nn.Parameter, tuple[nn.Module, str]],
) -> Iterator[dict[nn.Module, list[_Call]]]:
    """Collect the calls of the layers that own parameters."""
    calls: dict[nn.Module, list[_Call]] = {module: [] for module, _ in owners.values()}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        activation = args[0] if args else kwargs["input"]
        # The edge and not the output itself, which an in-place activation may overwrite.
        edge = get_gradient_edge(output) if output.requires_grad else None
        calls[module].append(_Call(activation.detach(), activation._version, edge))

    with ExitStack() as hooks:
        for module in calls:
            handle = module.register_forward_hook(record, prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield calls


def _owners(model: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, str]] | None:
    """Return each trainable parameter's layer and name, or None if the hooks cannot serve it."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in model.modules():
        # Statistics of the batch at hand make the samples depend on each other.
        if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
            return None
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            # Exact types: a subclass or a patched `forward` may compute something else.
            if (
                parameter in owners
                or type(module) not in LAYERS
                or name not in ("weight", "bias")
                or "forward" in vars(module)
                or getattr(module, "scale_grad_by_freq", False)
            ):
                return None
            owners[parameter] = (module, name)
    return owners


def _uses(loss: Tensor) -> Counter[Tensor]:
    """Count for each parameter the operations on the way to the loss that read it.

    Looking at the graph is exact, needs no tolerance, and saves computing the autograd gradients
    of the weights that a comparison would take.
    """
    uses: Counter[Tensor] = Counter()
    stack: list[Node] = [loss.grad_fn] if loss.grad_fn else []
    seen = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if node.name() == "torch::autograd::AccumulateGrad":
                uses[node.variable] += 1  # type: ignore[attr-defined]
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return uses


def _is_readable(calls: list[_Call], size: int) -> bool:
    """Tell whether a layer was called once, on as many rows as samples, and is in the graph."""
    if len(calls) != 1:
        return False
    activation, version, edge = calls[0]
    return edge is not None and activation._version == version and activation.shape[:1] == (size,)


def _rows_are_samples(
    model: nn.Module,
    inputs: Tensor,
    owners: dict[nn.Parameter, tuple[nn.Module, str]],
    modules: list[nn.Module],
    calls: dict[nn.Module, list[_Call]],
) -> bool:
    """Tell whether each row of the layers' inputs belongs to the sample at its place.

    It does not where a sequence comes before the batch, where all samples share the input, as with
    embedded positions, or where rows are chosen by their values and happen to be as many as the
    samples. Some samples in another order show it; for a model whose layers see
    the shapes that they saw before, nobody looks again.
    """
    shapes = tuple(tuple(calls[module][0].activation.shape) for module in modules)
    seen = _SHAPES_SEEN.setdefault(model, set())
    if shapes not in seen:
        # A few from the last on, never the first, unless it is the only one: then two of it.
        step = -(-(len(inputs) - 1) // _FEW)
        order = torch.tensor(range(len(inputs) - 1, 0, -step) if step else [0, 0])
        with _recording(owners) as other_calls:
            model(inputs.index_select(0, order.to(inputs.device)))
        for module in modules:
            if not _is_readable(other_calls[module], len(order)):
                return False
            before = calls[module][0].activation
            expected = before.index_select(0, order.to(before.device))
            if not _nearly_equal(other_calls[module][0].activation, expected):
                return False
        seen.add(shapes)
    return True


def _nearly_equal(found: Tensor, expected: Tensor) -> bool:
    """Tell whether two activations are the same but for rounding, in any number format."""
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    # Of a model that diverged, what is finite.
    found, expected = (item.nan_to_num(0.0, 0.0, 0.0) for item in (found, expected))
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.05, atol=0.05 * scale)
