"""Local training and evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from task.hardware import move, repeatable, resolve_device, set_threads
from task.kinds import CLASSES, Kind, logits_of
from task.own_metrics import MetricsFn, on_cpu, own_metrics
from task.steps import CompiledStepError, LossFn, in_layout_of, make_training
from task.tensors import Shard

__all__ = ["CompiledStepError", "evaluate", "measure", "resolve_device", "set_threads", "train"]


def train(
    model: nn.Module,
    shard: Shard,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    seed: int,
    device: str | torch.device | None = "cpu",
    step: str = "eager",
    proximal: float = 0.0,
    loss_fn: LossFn | None = None,
    autocast: str = "off",
) -> float:
    """Train a model in place by plain SGD, without momentum.

    A pure function of its arguments: the global random generator is neither read nor changed, and
    equal arguments give bit-equal parameters for the same step and number of threads. Every epoch
    visits all samples in a new order, the last, shorter batch included. Steps that diverge are not
    interrupted: the loss returned is then not finite.

    Parameters
    ----------
    model : nn.Module
        The model; it is moved to ``device`` and stays there.
    shard : Shard
        The samples.
    lr : float
        Learning rate.
    epochs : int
        Passes over the samples.
    batch_size : int
        Samples per step.
    seed : int
        Seed of the order of the samples, and of dropout if the model has any.
    device : str | torch.device | None (default: "cpu")
        Where to train; see ``resolve_device``. None: where the model is, all of it.
    step : str (default: "eager")
        ``"eager"`` or ``"compiled"``; see ``task.steps``.
    proximal : float (default: 0.0)
        Weight ρ of the term (ρ/2)·‖y - x₀‖² that holds the parameters y near their start x₀.
    loss_fn : Callable[[Tensor, Tensor], Tensor] | None (default: None)
        Loss per sample; None is cross-entropy.
    autocast : str (default: "off")
        ``"bfloat16"``: matrix products and convolutions in 16 bits (``torch.autocast``); the
        parameters, and what is sent, stay as they are.

    Returns
    -------
    float
        Mean over the steps of the loss on their batch, without the proximal term.
    """
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs ({epochs}) and batch size ({batch_size}) must be at least 1")
    if device is None:
        place = next(model.parameters()).device
    else:
        place = resolve_device(device)
        move(model, place)
    x, y = shard.x.to(place), shard.y.to(place)
    orders = shuffled(len(shard), epochs, seed).to(place)
    with _mode(model, training=True), repeatable(place, seed):
        training = make_training(step, model, batch_size, lr, proximal, loss_fn, autocast)
        loss = training(x, y, orders)
    return float(loss)


def shuffled(num_samples: int, epochs: int, seed: int) -> Tensor:
    """Return the orders in which epochs visit the samples, a row for each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_samples, generator=generator) for _ in range(epochs)])


def evaluate(
    model: nn.Module,
    shard: Shard,
    *,
    device: str | torch.device = "cpu",
    batch_size: int = 1000,
) -> tuple[float, float | None]:
    """Return a model's mean loss and accuracy (None where targets are not classes).

    See `measure` for the parameters.
    """
    found = measure(model, shard, device=device, batch_size=batch_size)
    return found["loss"], found.get("accuracy")


def measure(
    model: nn.Module,
    shard: Shard,
    *,
    device: str | torch.device = "cpu",
    batch_size: int = 1000,
    loss_fn: LossFn | None = None,
    kind: Kind | None = CLASSES,
    metrics_fn: MetricsFn | None = None,
) -> dict[str, float]:
    """Return a model's mean loss, its accuracy if it has one, and more on request.

    The accuracy is the share of right targets, whether a sample has one or many.

    Parameters
    ----------
    model : nn.Module
        The model; it is moved to ``device`` and evaluated in eval mode, which is undone afterwards.
    shard : Shard
        The samples.
    device : str | torch.device (default: "cpu")
        Where to evaluate; see ``resolve_device``.
    batch_size : int (default: 1000)
        Samples per forward pass.
    loss_fn : Callable[[Any, Tensor], Tensor] | None (default: None)
        Loss per sample; None is cross-entropy.
    kind : Kind | None (default: CLASSES)
        What integer targets are; None: nothing that could be right.
    metrics_fn : Callable[[Any, Tensor], Mapping[str, float]] | None (default: None)
        Further numbers, from the outputs for all samples and their targets, on the CPU.
    """
    place = resolve_device(device)
    move(model, place)
    if shard.y.is_floating_point():
        kind = None
    loss = torch.zeros((), dtype=torch.float64, device=place)
    correct = torch.zeros((), dtype=torch.int64, device=place)
    positions = torch.zeros((), dtype=torch.int64, device=place)
    held: list[Any] = []
    with _mode(model, training=False), torch.no_grad():
        for x, y in zip(
            torch.split(shard.x, batch_size), torch.split(shard.y, batch_size), strict=True
        ):
            outputs = model(in_layout_of(model, x.to(place)))
            targets = y.to(place)
            if loss_fn is None:
                loss += functional.cross_entropy(outputs, targets, reduction="sum")
            else:
                losses = loss_fn(outputs, targets)
                # A sum of a thousand losses has no place in 16 bits.
                loss += losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()
            if kind is not None and (logits := logits_of(outputs)) is not None:
                right, among = kind.count(logits, targets)
                correct += right
                positions += among
            if metrics_fn is not None:
                held.append(on_cpu(outputs))
    found = {"loss": float(loss) / len(shard)}
    if kind is not None and int(positions):
        found["accuracy"] = float(correct) / int(positions)
    return found | (own_metrics(metrics_fn, held, shard.y) if metrics_fn is not None else {})


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Hold a model in training or eval mode; afterwards every module is back in its own."""
    before = [(module, module.training) for module in model.modules()]
    # Setting it takes longer than looking; a model with a method of its own may have other plans.
    if any(mode != training or type(m).train is not nn.Module.train for m, mode in before):
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            if module.training != mode:
                module.training = mode
