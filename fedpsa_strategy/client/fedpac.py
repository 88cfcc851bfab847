"""FedPAC's half on the client: statistics, the head alone, then the encoder drawn to centroids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from torch import Tensor, nn
from torch.nn import functional

from fedpsa_strategy.methods.fedpac import FedPACMethod
from fedpsa_strategy.seeds import derive

_STATISTICS_BATCH = 1000


class Samples(Protocol):
    """A node's data: all inputs, and their classes as integers."""

    @property
    def x(self) -> Tensor: ...  # noqa: D102

    @property
    def y(self) -> Tensor: ...  # noqa: D102


def train_from_message(
    model: nn.Module,
    shard: Samples,
    message: Message,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
) -> tuple[float, dict[str, ArrayRecord]]:
    """Train as a train message of FedPAC says; return the mean loss and the reply's records.

    The model, with an `encoder` and a linear `head`, is trained in place: the head, then the
    encoder, its features drawn to the centroids in the message's record `fedpac`. The config has
    FedPAC's settings; the other arguments are those of the encoder's training.
    """
    config = cast(ConfigRecord, message.content["config"])
    settings = FedPACMethod(
        alignment=cast(float, config["alignment"]),
        head_lr=cast(float, config["head-lr"]),
        head_epochs=cast(int, config["head-epochs"]),
    )
    received = cast(ArrayRecord, message.content["fedpac"])
    encoder, head = cast(nn.Module, model.encoder), cast(nn.Linear, model.head)
    x, y = shard.x.to(device), shard.y.to(device)
    counts = torch.bincount(y, minlength=head.out_features)
    before = _features(model, encoder, x)
    local = _class_means(before, y, counts)
    statistics = _statistics(before, y, counts, local)

    if settings.head_epochs:
        _descend(
            [*head.parameters()],
            lambda some: functional.cross_entropy(model(x[some]), y[some]),
            model,
            len(y),
            lr=settings.head_lr,
            epochs=settings.head_epochs,
            batch_size=batch_size,
            seed=derive(seed, "fedpac-head"),
        )
    known = torch.from_numpy(received["known"].numpy().astype(bool)).to(device)
    centroids = torch.from_numpy(received["centroids"].numpy().copy()).to(device)
    targets = torch.where(known[:, None], centroids, local)

    def drawn(some: Tensor) -> Tensor:
        features = encoder(x[some])
        loss = functional.cross_entropy(head(features), y[some])
        near = functional.mse_loss(features, targets[y[some]].to(features))
        return loss + settings.alignment * near

    loss = _descend(
        [*encoder.parameters()],
        drawn,
        model,
        len(y),
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
    after = _class_means(_features(model, encoder, x), y, counts)
    record = {"centroids": after.cpu(), "class-counts": counts.cpu(), **statistics}
    return loss, {"fedpac": ArrayRecord(record)}


def _features(model: nn.Module, encoder: nn.Module, x: Tensor) -> Tensor:
    """Return the features of all samples, in float32, as statistics travel."""
    model.eval()
    with torch.no_grad():
        return torch.cat([encoder(part) for part in torch.split(x, _STATISTICS_BATCH)]).float()


def _class_means(features: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return the mean feature of every class, 0 for classes without samples."""
    sums = torch.zeros(len(counts), features.shape[1], device=features.device)
    sums.index_add_(0, y, features)
    return sums / counts.clamp(min=1)[:, None]


def _statistics(features: Tensor, y: Tensor, counts: Tensor, means: Tensor) -> dict[str, Any]:
    """Return h[k] = p_k μ_k and v = (1/n)(Σ p_k mean||f||²_k - Σ p_k² ||μ_k||²)."""
    shares = counts / counts.sum()
    squares = torch.zeros(len(counts), device=features.device)
    squares.index_add_(0, y, features.square().sum(dim=1))
    mean_squares = squares / counts.clamp(min=1)
    spread = (shares * mean_squares).sum() - (shares.square() * means.square().sum(dim=1)).sum()
    return {
        "features": (shares[:, None] * means).cpu(),
        "variance": (spread / counts.sum()).clamp(min=0).cpu(),
    }


def _descend(
    parameters: Sequence[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    model: nn.Module,
    num_samples: int,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    seed: int,
) -> float:
    """Change these parameters alone by plain SGD; return the mean loss of the steps."""
    parameters = [item for item in parameters if item.requires_grad]
    device = parameters[0].device
    order = torch.Generator().manual_seed(seed)
    losses = []
    model.train()
    # Dropout draws from the global state: it must depend on the seed alone.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for _ in range(epochs):
            permutation = torch.randperm(num_samples, generator=order).to(device)
            for some in torch.split(permutation, batch_size):
                loss = loss_of(some)
                gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.add_(gradient, alpha=-lr)
                losses.append(loss.detach())
    return float(torch.stack(losses).double().mean())
