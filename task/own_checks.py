"""Whether a user's own task can be trained and measured, judged by a few of its samples.

What is wrong here would not fail: a loss that broadcasts trains towards something else, and an
accuracy over targets that the outputs do not stand for is a number without meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.errors import TaskError
from task.kinds import KINDS, Kind, LossFn, chosen_kind, kind_text, logits_of, possible_kinds
from task.tensors import Shard


def check_own_task(model: nn.Module, shard: Shard, loss_fn: LossFn, what: str) -> Kind | None:
    """Refuse data, outputs and losses that do not fit each other, and say what would be right.

    All samples are checked for their range, some go through model and loss; neither the model's
    mode nor its buffers change. `what` is the function that returned the samples, for the text of
    the error.

    Returns
    -------
    Kind | None
        What the targets are to the outputs; None if there is no accuracy: targets are numbers, or
        the model returns neither a tensor nor something with `logits`.
    """
    for name, values in (("inputs", shard.x), ("targets", shard.y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            raise TaskError(f"{what}: {count} values of the {name} are NaN or infinite")
    if shard.y.dtype == torch.bool:
        raise TaskError(f"{what}: targets are bool; make them integers (targets.long())")
    x, targets = _some_samples(model, shard)
    outputs = _outputs(model, x, what)
    kinds: list[Kind] = []
    if not targets.is_floating_point() and (logits := logits_of(outputs)) is not None:
        kinds = possible_kinds(logits, targets, shard.y, what)
    losses = _losses(loss_fn, outputs, targets, what)
    first = outputs[:2] if isinstance(outputs, Tensor) else _outputs(model, x[:2], what)
    fewer = _losses(loss_fn, first, targets[:2], what)
    if not torch.allclose(losses[:2], fewer, rtol=_tolerance(losses), atol=1e-6, equal_nan=True):
        raise TaskError(
            f"loss(outputs {kind_text(outputs)}, targets {kind_text(targets)}): the loss of a "
            "sample changes with the other samples of its batch. It must be computed sample by "
            "sample; shapes that differ, such as (n, 1) and (n,), broadcast to all pairs: give "
            "both the same shape"
        )
    return chosen_kind(kinds, outputs, targets, loss_fn) if kinds else None


def check_cross_entropy(model: nn.Module, shard: Shard, loss_fn: LossFn, why: str) -> None:
    """Refuse a task whose loss is another than the cross-entropy of classes.

    It has passed `check_own_task`; `why` says who needs that, for the text of the error.
    """
    x, targets = _some_samples(model, shard)
    outputs = _outputs(model, x, "test_data")
    if (
        isinstance(outputs, Tensor)
        and outputs.dim() == 2
        and targets.dim() == 1
        and not targets.is_floating_point()
        and outputs.shape[1] > 1
    ):
        expected = functional.cross_entropy(outputs.double(), targets, reduction="none")
        found = loss_fn(outputs, targets).flatten().double()
        precision = torch.finfo(outputs.dtype).eps
        rtol, atol = max(1e-3, 4 * precision), max(1e-6, precision)
        if torch.allclose(found, expected, rtol=rtol, atol=atol):
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


def _outputs(model: nn.Module, x: Tensor, what: str) -> Any:
    # Copies, in case that a forward pass writes into its buffers even in eval mode.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = torch.func.functional_call(model, buffers, (x.clone(),))
    except Exception as error:  # anything may come out of a user's forward pass
        raise TaskError(
            f"{what}: the model of make_model cannot take inputs {kind_text(x)}: {error}"
        ) from error
    finally:
        for module, mode in before:
            module.training = mode
    logits = logits_of(outputs)
    if logits is not None and (logits.dim() == 0 or len(logits) != len(x)):
        raise TaskError(
            f"the model of make_model returns outputs {kind_text(logits)} for {len(x)} samples; "
            "their first dimension must run over the samples"
        )
    return outputs


def _losses(loss_fn: LossFn, outputs: Any, targets: Tensor, what: str) -> Tensor:
    call = f"loss(outputs {kind_text(outputs)}, targets {kind_text(targets)})"
    try:
        with torch.no_grad():
            given = outputs.clone() if isinstance(outputs, Tensor) else outputs
            losses = loss_fn(given, targets.clone())
    except Exception as error:  # anything may come out of a user's loss
        raise TaskError(f"{what}: {call} failed: {error} ({KINDS})") from error
    if not isinstance(losses, Tensor):
        raise TaskError(f"{call} returns a {type(losses).__name__}, not a tensor")
    if losses.dim() == 0:
        raise TaskError(
            f"{call} returns a single number; it must return one loss per sample, as "
            'reduction="none" does'
        )
    samples = len(targets)
    if len(losses) != samples or losses.numel() != samples:
        raise TaskError(
            f"{call} returns losses of shape {tuple(losses.shape)}, not ({samples},): it must "
            "return one loss per sample. Outputs and targets of different shapes, such as (n, 1) "
            "and (n,), broadcast; several losses of one sample have to be averaged"
        )
    return losses.flatten()


def _tolerance(losses: Tensor) -> float:
    """Return how far rounding may take a loss when the batch is another."""
    return 0.05 if losses.element_size() < 4 else 1e-3
