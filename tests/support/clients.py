"""A small model, and an honest client that trains it."""

import torch
from flwr.app import Message
from torch import nn

from fedpsa_strategy import make_reply


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def trained_reply(message: Message) -> Message:
    """What an honest client answers: a little training, then make_reply."""
    local = model()
    local.load_state_dict(message.content["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(message.content["config"]["seed"] % 2**32)
    for _ in range(3):
        x = torch.randn(8, 5, generator=generator)
        loss = nn.functional.cross_entropy(local(x), torch.arange(8) % 3)
        gradients = torch.autograd.grad(loss, list(local.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(local.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return make_reply(message, local, num_examples=8)
