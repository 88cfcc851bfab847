"""Whether a user's own task can be trained and measured, judged by a few of its samples.

What is wrong here would not fail: a loss that broadcasts trains towards something else, and an
accuracy over targets that are not one class per sample is a number without meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.errors import TaskError
from task.steps import LossFn
from task.tensors import Shard

_KINDS = (
    "integer targets of shape (n,) are classes, for a model with a row of at least two outputs per "
    "sample; float targets are regression"
)


def check_own_task(model: nn.Module, shard: Shard, loss_fn: LossFn, what: str) -> None:
    """Refuse data, outputs and losses that do not fit each other.

    Parameters
    ----------
    model : nn.Module
        The task's model; neither its mode nor its buffers change.
    shard : Shard
        The samples: all are checked for their range, some go through model and loss.
    loss_fn : Callable[[Tensor, Tensor], Tensor]
        The task's loss.
    what : str
        The function that returned the samples, for the text of the error.

    Raises
    ------
    TaskError
        Says what was found, and what would be right.
    """
    for name, values in (("inputs", shard.x), ("targets", shard.y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            raise TaskError(f"{what}: {count} values of the {name} are NaN or infinite")
    x, targets = _some_samples(model, shard)
    outputs = _outputs(model, x, what)
    if not targets.is_floating_point():
        _check_classes(outputs, shard.y, what)
    losses = _losses(loss_fn, outputs, targets, what)
    fewer = _losses(loss_fn, outputs[:2], targets[:2], what)
    if not torch.allclose(losses[:2], fewer, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise TaskError(
            f"loss(outputs {_kind(outputs)}, targets {_kind(targets)}): the loss of a sample "
            "changes with the other samples of its batch. It must be computed sample by sample; "
            "shapes that differ, such as (n, 1) and (n,), broadcast to all pairs: give both the "
            "same shape"
        )


def check_cross_entropy(model: nn.Module, shard: Shard, loss_fn: LossFn, why: str) -> None:
    """Refuse a task whose loss is another than the cross-entropy of classes.

    Parameters
    ----------
    model, shard, loss_fn
        See `check_own_task`, which they have passed.
    why : str
        Who needs that, for the text of the error.
    """
    x, targets = _some_samples(model, shard)
    if not targets.is_floating_point():
        outputs = _outputs(model, x, "test_data")
        expected = functional.cross_entropy(outputs, targets, reduction="none")
        if torch.allclose(loss_fn(outputs, targets).flatten(), expected, rtol=1e-3, atol=1e-6):
            return
    raise TaskError(f"{why} trains with cross-entropy on classes, but this task's loss is another")


def _some_samples(model: nn.Module, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return three samples: the first, and twice one whose target is another.

    So a loss that mixes samples differs from that of the first two alone, whatever the order of the
    data: with equal targets, or the same ones on both sides, it would not.
    """
    different = (shard.y != shard.y[0]).reshape(len(shard), -1).any(dim=1)
    other = int(different.to(torch.uint8).argmax()) or len(shard) - 1
    device = next((item.device for item in model.parameters()), torch.device("cpu"))
    chosen = torch.tensor([0, other, other])
    return shard.x[chosen].to(device), shard.y[chosen].to(device)


def _outputs(model: nn.Module, x: Tensor, what: str) -> Tensor:
    # Copies, in case that a forward pass writes into its buffers even in eval mode.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = torch.func.functional_call(model, buffers, (x,))
    except Exception as error:  # anything may come out of somebody's forward pass
        raise TaskError(
            f"{what}: the model of make_model cannot take inputs {_kind(x)}: {error}"
        ) from error
    finally:
        for module, mode in before:
            module.training = mode
    if not isinstance(outputs, Tensor):
        raise TaskError(
            f"the model of make_model returns a {type(outputs).__name__}; it must return one "
            "tensor with a row of outputs per sample"
        )
    if outputs.dim() == 0 or len(outputs) != len(x):
        raise TaskError(
            f"the model of make_model returns outputs {_kind(outputs)} for {len(x)} samples; their "
            "first dimension must run over the samples"
        )
    return outputs


def _check_classes(outputs: Tensor, targets: Tensor, what: str) -> None:
    if targets.dim() != 1:
        raise TaskError(
            f"{what}: integer targets {_kind(targets)} are not one class per sample; targets per "
            f"token or pixel are not supported ({_KINDS})"
        )
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise TaskError(
            f"{what}: targets are integers, but the model's outputs for {len(outputs)} samples are "
            f"{_kind(outputs)}: {_KINDS}. For two classes give the model two outputs and use "
            "cross-entropy, or make the targets floats, which reports the loss and no accuracy"
        )
    low, high, classes = int(targets.min()), int(targets.max()), outputs.shape[1]
    if low < 0 or high >= classes:
        raise TaskError(
            f"{what}: targets are classes {low} to {high}, but the model has {classes} outputs: "
            f"classes must lie in 0 to {classes - 1}"
        )


def _losses(loss_fn: LossFn, outputs: Tensor, targets: Tensor, what: str) -> Tensor:
    call = f"loss(outputs {_kind(outputs)}, targets {_kind(targets)})"
    try:
        with torch.no_grad():
            losses = loss_fn(outputs.clone(), targets.clone())
    except Exception as error:  # anything may come out of somebody's loss
        raise TaskError(f"{what}: {call} failed: {error} ({_KINDS})") from error
    if not isinstance(losses, Tensor):
        raise TaskError(f"{call} returns a {type(losses).__name__}, not a tensor")
    if losses.dim() == 0:
        raise TaskError(
            f"{call} returns a single number; it must return one loss per sample, as "
            'reduction="none" does'
        )
    if len(losses) != len(outputs) or losses.numel() != len(outputs):
        raise TaskError(
            f"{call} returns losses of shape {tuple(losses.shape)}, not ({len(outputs)},): it must "
            "return one loss per sample. Outputs and targets of different shapes, such as (n, 1) "
            "and (n,), broadcast; several losses of one sample have to be averaged"
        )
    return losses.flatten()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
