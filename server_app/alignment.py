"""How well a client's gradient agrees with the server's: what κ is meant to tell without test data.

For an upload that turned the start model w_start into w_client = w_start + Δ,

    align = cos(∇L(w_client; D_test), ∇L(w_server; D_test)),

w_server being the current global model and D_test a fixed batch of the test data. It is recorded
beside κ and changes nothing in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from fedpsa_strategy import AsyncStrategy
from fedpsa_strategy.server.strategy import Task
from fedpsa_strategy.wire.replies import TrainReply
from task.tensors import Shard

BATCH_SIZE = 256

LossFn = Callable[[Tensor, Tensor], Tensor]


def record_alignment(
    strategy: AsyncStrategy,
    model: nn.Module,
    shard: Shard,
    loss_fn: LossFn,
    *,
    every: int,
    seed: int,
) -> None:
    """Let every n-th upload of a strategy carry a metric `align`.

    Parameters
    ----------
    strategy : AsyncStrategy
        Its `inspect` is wrapped, so that updates it refuses are not measured.
    model : nn.Module
        A workspace.
    shard : Shard
        The test data.
    loss_fn : Callable[[Tensor, Tensor], Tensor]
        Loss per sample.
    every : int
        n.
    seed : int
        Seed of the test batch.
    """
    gradient = _gradient_fn(model, _test_batch(shard, seed), loss_fn)
    inspect = strategy.inspect
    at_server: dict[int, Tensor] = {}  # by version; one entry at a time

    def inspect_and_measure(task: Task, reply: TrainReply) -> TrainReply:
        checked = inspect(task, reply)
        state = strategy.state
        if (state.uploads + 1) % every:
            return checked
        if state.version not in at_server:
            at_server.clear()
            at_server[state.version] = gradient(state.arrays)
        client = strategy.start_of(task)[0] + checked.delta
        align = _cosine(
            gradient(state.layout.write(client, checked.states)), at_server[state.version]
        )
        return replace(checked, metrics=MetricRecord({**checked.metrics, "align": align}))

    strategy.inspect = inspect_and_measure  # type: ignore[method-assign]


def _test_batch(shard: Shard, seed: int) -> Shard:
    generator = np.random.Generator(np.random.Philox(seed))
    chosen = generator.choice(len(shard), min(BATCH_SIZE, len(shard)), replace=False)
    return Shard(shard.x[chosen], shard.y[chosen])


def _gradient_fn(
    model: nn.Module, batch: Shard, loss_fn: LossFn
) -> Callable[[ArrayRecord], Tensor]:
    """Return the gradient of the mean loss with respect to all trainable parameters, flat."""

    def gradient(arrays: ArrayRecord) -> Tensor:
        model.load_state_dict(arrays.to_torch_state_dict())
        parameters = [item for item in model.parameters() if item.requires_grad]
        device = parameters[0].device
        training = model.training
        model.eval()
        try:
            loss = loss_fn(model(batch.x.to(device)), batch.y.to(device)).mean()
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        finally:
            model.train(training)
        return torch.cat([item.flatten() for item in gradients]).double()

    return gradient


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms > 0 else 0.0
