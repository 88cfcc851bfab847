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

from fedpsa_strategy.probe.state_dicts import load_arrays
from fedpsa_strategy.server.callbacks import Callback
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.replies import TrainReply
from task.tensors import Shard

BATCH_SIZE = 256

LossFn = Callable[[Tensor, Tensor], Tensor]


class Alignment(Callback):
    """Lets every n-th upload carry a metric `align`; the last of a strategy's callbacks.

    The model is a workspace, the loss one per sample, the seed that of the test batch.
    """

    def __init__(
        self, model: nn.Module, shard: Shard, loss_fn: LossFn, *, every: int, seed: int
    ) -> None:
        self._gradient = _gradient_fn(model, _test_batch(shard, seed), loss_fn)
        self._every = every
        self._at_server: tuple[int, Tensor] | None = None  # version and gradient

    def begin(self, run: RunState) -> None:
        """Forget the gradient of another run."""
        super().begin(run)
        self._at_server = None

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Return the reply, with the metric if it is its turn."""
        run = self.run
        if (run.uploads + 1) % self._every:
            return reply
        if self._at_server is None or self._at_server[0] != run.version:
            self._at_server = (run.version, self._gradient(run.arrays))
        client = run.layout.write(task.start.vector + reply.delta, reply.states)
        align = _cosine(self._gradient(client), self._at_server[1])
        return replace(reply, metrics=MetricRecord({**reply.metrics, "align": align}))


def _test_batch(shard: Shard, seed: int) -> Shard:
    generator = np.random.Generator(np.random.Philox(seed))
    chosen = generator.choice(len(shard), min(BATCH_SIZE, len(shard)), replace=False)
    return Shard(shard.x[chosen], shard.y[chosen])


def _gradient_fn(
    model: nn.Module, batch: Shard, loss_fn: LossFn
) -> Callable[[ArrayRecord], Tensor]:
    """Return the gradient of the mean loss with respect to all trainable parameters, flat."""

    def gradient(arrays: ArrayRecord) -> Tensor:
        load_arrays(model, arrays)
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
