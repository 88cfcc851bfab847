"""The models' shapes, sizes and initial parameters."""

import pytest
import torch
from torch import nn

from task.datasets import DATASETS
from task.models import make_model

# Weights and biases, layer by layer.
COUNTS = {
    "digits": (64 + 1) * 32 + (32 + 1) * 10,
    "fmnist": (784 + 1) * 10,
    "mnist": (
        (1 * 5 * 5 + 1) * 32 + (32 * 5 * 5 + 1) * 64 + (7 * 7 * 64 + 1) * 512 + (512 + 1) * 10
    ),
    "cifar10": (
        (3 * 5 * 5 + 1) * 64
        + (64 * 5 * 5 + 1) * 64
        + (5 * 5 * 64 + 1) * 384
        + (384 + 1) * 192
        + (192 + 1) * 10
    ),
}
COUNTS["cifar100"] = COUNTS["cifar10"] + (192 + 1) * 90


@pytest.mark.parametrize("dataset", DATASETS)
def test_shapes_and_parameter_counts(dataset):
    info = DATASETS[dataset]
    model = make_model(dataset, 0)
    assert model(torch.zeros(3, *info.shape)).shape == (3, info.num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[dataset]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_perceptrons_and_models_at_a_share_of_their_width():
    def size(*arguments):
        return sum(p.numel() for p in make_model(arguments[0], 0, *arguments[1:]).parameters())

    assert size("fmnist", "mlp") == (784 + 1) * 64 + (64 + 1) * 10
    assert size("cifar100", "mlp", 0.5) == (3072 + 1) * 32 + (32 + 1) * 100
    assert size("cifar10", "default", 0.25) == 51_274
    assert size("mnist", "default", 0.25) == 105_194
    assert size("digits", "default", 0.5) == (64 + 1) * 16 + (16 + 1) * 10
    assert size("fmnist", "default", 0.5) == COUNTS["fmnist"]  # a single layer has no width
    assert size("mnist", "default", 0.01)  # at least one channel everywhere
    thin = make_model("cifar100", 0, "default", 0.1)
    assert thin(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_convolutions_are_in_the_format_in_which_they_are_fast(dataset):
    model = make_model(dataset, 0)
    weights = [p for p in model.parameters() if p.dim() == 4]
    assert len(weights) == 2
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    with torch.no_grad():  # training, and loading another model, leaves them there
        weights[1].sub_(0.1 * torch.ones(weights[1].shape))
    model.load_state_dict({key: value.contiguous() for key, value in model.state_dict().items()})
    assert weights[1].is_contiguous(memory_format=torch.channels_last)


def test_the_papers_counts():
    assert COUNTS["mnist"] == 1_663_370
    assert COUNTS["cifar10"] == 797_962


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10", "cifar100"])
def test_encoder_and_head_make_up_the_model(dataset):
    info = DATASETS[dataset]
    model = make_model(dataset, 0)
    x = torch.randn(2, *info.shape, generator=torch.Generator().manual_seed(0))
    features = model.encoder(x)
    assert features.shape == (2, model.head.in_features)
    assert (features >= 0).all()
    assert torch.equal(model.head(features), model(x))
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert names == {"encoder", "head"}


def test_the_linear_model_has_no_encoder_and_a_zero_bias():
    model = make_model("fmnist", 0)
    assert not hasattr(model, "encoder")
    assert torch.equal(model.head.bias, torch.zeros(10))
    bound = 784**-0.5  # PyTorch's default for a linear layer
    assert bound * 0.99 < model.head.weight.abs().max() <= bound


def test_pooling_before_relu_changes_nothing():
    model = make_model("cifar10", 0)
    layers = list(model.encoder)
    swapped = nn.Sequential(
        *(layers[index] for index in (0, 2, 1, 3, 5, 4, *range(6, len(layers)))), model.head
    )
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    gradients = []
    for network in (model, swapped):
        network.zero_grad()
        network(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert torch.equal(model(x), swapped(x))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dataset", ["digits", "fmnist"])
def test_the_seed_decides_and_the_global_generator_is_untouched(dataset):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = make_model(dataset, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = make_model(dataset, 1), make_model(dataset, 2)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_initialisation_is_pytorchs_default():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        hidden, head = nn.Linear(64, 32), nn.Linear(32, 10)
    model = make_model("digits", 3)
    assert torch.equal(model.encoder[1].weight, hidden.weight)
    assert torch.equal(model.head.bias, head.bias)


def test_unknown_datasets_are_refused():
    with pytest.raises(ValueError, match="unknown dataset 'svhn'"):
        make_model("svhn", 0)
