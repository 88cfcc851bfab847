"""What a sensitivity is by its definition."""

from functools import partial

import torch
from torch.nn import functional

cross_entropy = partial(functional.cross_entropy, reduction="none")


def joined(tensors):
    vector = torch.cat([tensor.flatten() for tensor in tensors])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def by_definition(model, inputs, targets, loss_fn=cross_entropy):
    """s by its formula, one backward pass for each sample; sums have 32 bits at least."""
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for k in range(len(inputs)):
        loss = loss_fn(model(inputs[k : k + 1]), targets[k : k + 1]).mean()
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(joined([part.to_dense() for part in parts]))
    gradients, value = torch.stack(rows), joined([p.detach() for p in parameters])
    return (gradients.mean(0) * value - 0.5 * (gradients**2).mean(0) * value**2).abs()
