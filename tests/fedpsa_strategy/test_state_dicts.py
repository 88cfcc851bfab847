"""Loading models from the arrays of messages."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedpsa_strategy.probe.state_dicts import load_values, read_arrays


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def with_a_frozen_half():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to(torch.bfloat16))
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        lambda: nn.BatchNorm1d(3),
        Tied,
        with_a_frozen_half,
    ],
)
def test_a_model_has_the_values_that_were_loaded(make):
    torch.manual_seed(0)
    source, model = make(), make()
    for tensor in source.state_dict().values():
        tensor.copy_(torch.arange(1, tensor.numel() + 1).reshape(tensor.shape))
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    state = {
        key: value.float() if value.dtype == torch.bfloat16 else value
        for key, value in source.state_dict().items()
    }
    load_values(model, read_arrays(ArrayRecord(state)))
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"weight": np.zeros((2, 3), np.float32)}, r"trains \['bias'\], which the arrays lack"),
        (
            {"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)},
            r"'weight' has shape \(3, 2\), in the model \(2, 3\)",
        ),
    ],
)
def test_values_of_another_model_are_refused(values, match):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=match):
        load_values(model, values)
