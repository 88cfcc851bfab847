"""Sums of per-sample gradients and of their squares, layer by layer.

Each rule takes a layer, the name of one of its parameters, the layer's input `a` and the gradient
`δ` of the summed loss with respect to its output. A row of either belongs to one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional, grad

# Bytes of per-sample gradients beyond which squaring and adding them runs out of a CPU's cache.
_CACHE = 4 * 2**20

# Positions of a kernel up to which products of patches are faster than a grouped convolution.
_FEW_PLACES = 16


class Moments(NamedTuple):
    """Sums over the samples of one parameter's per-sample gradients and of their squares."""

    gradient: Tensor
    square: Tensor


def chunk_size(memory_limit: int, floats_per_sample: int) -> int:
    """Return how many samples' gradients fit into so many bytes, at least 1."""
    return max(1, memory_limit // (4 * floats_per_sample))


def added(total: Moments | None, gradients: Tensor) -> Moments:
    """Add the per-sample gradients of some samples to their moments."""
    gradients = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
    moments = Moments(gradients.sum(0), gradients.square().sum(0))
    return moments if total is None else Moments(*map(torch.add, total, moments))


_MomentsRule = Callable[[Any, str, Tensor, Tensor, int], Moments]
_GradientRule = Callable[[Any, str, Tensor, Tensor], Tensor]


def _in_chunks(gradients_of: _GradientRule) -> _MomentsRule:
    """Turn a rule for per-sample gradients into one for their moments, of bounded memory."""

    def moments_of(
        module: nn.Module, name: str, activation: Tensor, delta: Tensor, memory_limit: int
    ) -> Moments:
        parameter: Tensor = getattr(module, name)
        floats_per_sample = max(parameter.numel(), activation[0].numel())
        chunk = chunk_size(min(memory_limit, _CACHE), floats_per_sample)
        chunks = zip(torch.split(activation, chunk), torch.split(delta, chunk), strict=True)
        total = added(None, gradients_of(module, name, *next(chunks)))
        for some_activation, some_delta in chunks:
            total = added(total, gradients_of(module, name, some_activation, some_delta))
        return total

    return moments_of


def _linear(module: nn.Linear, name: str, activation: Tensor, delta: Tensor) -> Tensor:
    delta = delta.reshape(len(delta), -1, module.out_features)
    if name == "bias":
        return delta.sum(1)
    return delta.mT @ activation.reshape(len(delta), -1, module.in_features)


def _linear_moments(
    module: nn.Linear, name: str, activation: Tensor, delta: Tensor, memory_limit: int
) -> Moments:
    if activation.dim() > 2:
        return _in_chunks(_linear)(module, name, activation, delta, memory_limit)
    if name == "bias":
        return Moments(delta.sum(0), delta.square().sum(0))
    return _outer_moments(delta, activation)


def _outer_moments(delta: Tensor, activation: Tensor) -> Moments:
    # The gradient of one sample is the outer product of δ and a, its square that of δ² and a².
    return Moments(delta.T @ activation, delta.square().T @ activation.square())


def _convolution_moments(
    module: nn.Conv2d, name: str, activation: Tensor, delta: Tensor, memory_limit: int
) -> Moments:
    """Where a kernel meets few places, go sample by sample through products of its patches.

    Grouped convolutions take up to seventy times as long there.
    """
    places = delta[0, 0].numel()
    if name == "bias" or module.groups > 1 or places > _FEW_PLACES:
        return _in_chunks(_convolution)(module, name, activation, delta, memory_limit)
    shape, dtype = module.weight.shape, torch.promote_types(delta.dtype, torch.float32)
    patches = functional.unfold(
        _padded(module, activation), module.kernel_size, module.dilation, 0, module.stride
    ).to(dtype)
    delta = delta.reshape(len(delta), len(module.weight), places).to(dtype)
    if places == 1:  # a linear layer
        moments = _outer_moments(delta[..., 0], patches[..., 0])
    else:
        square = torch.zeros(shape[0], patches.shape[1], dtype=dtype, device=delta.device)
        gradient = torch.empty_like(square)
        for one_delta, one_patches in zip(delta, patches, strict=True):
            torch.mm(one_delta, one_patches.T, out=gradient)
            square.addcmul_(gradient, gradient)
        rows = delta.transpose(0, 1).flatten(1)
        moments = Moments(rows @ patches.transpose(1, 2).flatten(0, 1), square)
    return Moments(*(moment.reshape(shape) for moment in moments))


def _convolution(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, name: str, activation: Tensor, delta: Tensor
) -> Tensor:
    samples, shape = len(delta), module.weight.shape
    if name == "bias":
        return delta.reshape(samples, module.out_channels, -1).sum(2)
    padded = _padded(module, activation)
    gradient_of_weight: Any = (grad.conv1d_weight, grad.conv2d_weight, grad.conv3d_weight)
    # One convolution whose groups are the samples: the gradient of its weight is theirs, stacked.
    stacked: Tensor = gradient_of_weight[len(shape) - 3](
        padded.reshape(1, -1, *padded.shape[2:]),
        (samples * shape[0], *shape[1:]),
        delta.reshape(1, -1, *delta.shape[2:]),
        stride=module.stride,
        dilation=module.dilation,
        groups=samples * module.groups,
    )
    return stacked.reshape(samples, *shape)


def _padded(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, activation: Tensor) -> Tensor:
    if module.padding == "same":  # an odd one of the places goes to the end
        extents = zip(module.dilation, module.kernel_size, strict=True)
        sides = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for d, k in extents]
    elif module.padding == "valid":
        sides = [(0, 0) for _ in module.kernel_size]
    else:
        sides = [(int(places), int(places)) for places in module.padding]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    # `pad` begins with the last dimension.
    return functional.pad(activation, [side for both in reversed(sides) for side in both], mode)


def _layer_norm(module: nn.LayerNorm, name: str, activation: Tensor, delta: Tensor) -> Tensor:
    shape = module.normalized_shape
    if name == "weight":
        delta = delta * functional.layer_norm(activation, shape, eps=module.eps)
    return delta.reshape(len(delta), -1, *shape).sum(1)


def _group_norm(module: nn.GroupNorm, name: str, activation: Tensor, delta: Tensor) -> Tensor:
    if name == "weight":
        delta = delta * functional.group_norm(activation, module.num_groups, eps=module.eps)
    return delta.reshape(len(delta), module.num_channels, -1).sum(2)


def _batch_norm(module: Any, name: str, activation: Tensor, delta: Tensor) -> Tensor:
    if name == "weight":
        mean, variance = (
            statistic.to(delta.dtype) for statistic in (module.running_mean, module.running_var)
        )
        delta = delta * functional.batch_norm(activation, mean, variance, eps=module.eps)
    return delta.reshape(len(delta), module.num_features, -1).sum(2)


def _embedding_moments(
    module: nn.Embedding,
    name: str,  # noqa: ARG001
    activation: Tensor,
    delta: Tensor,
    memory_limit: int,  # noqa: ARG001
) -> Moments:
    """Only the rows of tokens that occur in a sample: all rows of all samples would be huge."""
    tokens = activation.reshape(len(activation), -1)
    vocabulary = module.num_embeddings
    first_key = vocabulary * torch.arange(len(tokens), device=tokens.device)
    keys, row = torch.unique(first_key[:, None] + tokens, return_inverse=True)
    gradients = _rows_added(delta.reshape(-1, delta.shape[-1]), row, len(keys))
    moments = Moments(
        _rows_added(gradients, keys % vocabulary, vocabulary),
        _rows_added(gradients.square(), keys % vocabulary, vocabulary),
    )
    if module.padding_idx is not None:
        for moment in moments:
            moment[module.padding_idx] = 0
    return moments


def _rows_added(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Add row i to row `index[i]` of the result, in an order that `index_put_` has not."""
    added: Tensor = torch.ops.aten.embedding_dense_backward(rows, index.flatten(), count, -1, False)
    return added


LAYERS: dict[type[nn.Module], _MomentsRule] = {
    nn.Linear: _linear_moments,
    nn.Conv1d: _in_chunks(_convolution),
    nn.Conv2d: _convolution_moments,
    nn.Conv3d: _in_chunks(_convolution),
    nn.BatchNorm1d: _in_chunks(_batch_norm),
    nn.BatchNorm2d: _in_chunks(_batch_norm),
    nn.BatchNorm3d: _in_chunks(_batch_norm),
    nn.LayerNorm: _in_chunks(_layer_norm),
    nn.GroupNorm: _in_chunks(_group_norm),
    nn.Embedding: _embedding_moments,
}
"""The rules, by the exact type of a layer."""
