"""How good personal heads are, each for its own client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from task.tensors import Shard

_BATCH = 1000  # samples per forward pass


def personal_accuracy(
    model: nn.Module,
    shard: Shard,
    heads: Mapping[int, tuple[Mapping[str, Any], Any]],
    *,
    device: torch.device,
) -> float | None:
    """Return the mean accuracy of personal models on their clients' class mixtures.

    For every client the test accuracy per class of (encoder, own head) is weighted by how often the
    client has that class: what it would see on fresh data of its own distribution. Heads are by
    client: the head's arrays (keys ending in weight and bias) and the class counts. None without
    any.
    """
    if not heads:
        return None
    model.eval()
    with torch.no_grad():
        features = torch.cat(
            [model.encoder(x.to(device)) for x in torch.split(shard.x, _BATCH)]  # type: ignore[operator]
        ).cpu()
    num_classes = len(next(iter(heads.values()))[1])
    per_class = torch.bincount(shard.y, minlength=num_classes).double()
    total = 0.0
    for arrays, counts in heads.values():
        tensors = {key.rsplit(".", 1)[-1]: torch.from_numpy(value) for key, value in arrays.items()}
        weight = tensors["weight"]  # a vector of the server's, wider than a model in 16 bits
        guesses = nn.functional.linear(features.to(weight), weight, tensors.get("bias")).argmax(1)
        hits = torch.bincount(shard.y[guesses == shard.y], minlength=num_classes).double()
        shares = torch.from_numpy(counts).double() * (per_class > 0)
        accuracy = hits / per_class.clamp(min=1)
        total += float((shares * accuracy).sum() / shares.sum().clamp(min=1))
    return total / len(heads)
