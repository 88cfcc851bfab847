"""The models, one per dataset.

A pooling layer stands in front of its ReLU: the two commute, in the gradient too and to the last
bit, and this way the ReLU touches a quarter of the values.
"""

import math

import torch
from torch import Tensor, nn

from task.datasets import DatasetInfo, dataset_info


class LinearClassifier(nn.Module):
    """One linear layer on the flattened input, its bias starting at zero."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_inputs, num_classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = x.flatten(1)
        if torch.compiler.is_compiling():
            # The same product the other way round, in half the time: BLAS is slow at few columns.
            return torch.addmm(self.head.bias[:, None], self.head.weight, x.t()).t()
        logits: Tensor = self.head(x)
        return logits


class EncoderClassifier(nn.Module):
    """An encoder of samples to ``(n, features)``, and a linear head that classifies these."""

    def __init__(self, encoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


def _wide(size: int, width: float) -> int:
    """Return a number of channels or units at a share of the full width."""
    return max(1, round(size * width))


def _perceptron(num_inputs: int, hidden: int, num_classes: int) -> nn.Module:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, hidden), nn.ReLU())
    return EncoderClassifier(encoder, nn.Linear(hidden, num_classes))


def _digits_model(info: DatasetInfo, width: float) -> nn.Module:
    return _perceptron(64, _wide(32, width), info.num_classes)


def _mlp(info: DatasetInfo, width: float) -> nn.Module:
    return _perceptron(math.prod(info.shape), _wide(64, width), info.num_classes)


def _mnist_model(info: DatasetInfo, width: float) -> nn.Module:
    first, second, hidden = (_wide(size, width) for size in (32, 64, 512))
    encoder = nn.Sequential(
        nn.Conv2d(1, first, kernel_size=5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size=5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * 7 * 7, hidden),
        nn.ReLU(),
    )
    return EncoderClassifier(encoder, nn.Linear(hidden, info.num_classes))


def _fmnist_model(info: DatasetInfo, width: float) -> nn.Module:  # noqa: ARG001
    return LinearClassifier(math.prod(info.shape), info.num_classes)


def _cifar_model(info: DatasetInfo, width: float) -> nn.Module:
    first, second, hidden, last = (_wide(size, width) for size in (64, 64, 384, 192))
    encoder = nn.Sequential(
        nn.Conv2d(3, first, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * 5 * 5, hidden),
        nn.ReLU(),
        nn.Linear(hidden, last),
        nn.ReLU(),
    )
    return EncoderClassifier(encoder, nn.Linear(last, info.num_classes))


_MODELS = {
    "digits": _digits_model,
    "mnist": _mnist_model,
    "fmnist": _fmnist_model,
    "cifar10": _cifar_model,
    "cifar100": _cifar_model,
}


def make_model(dataset: str, seed: int, model: str = "default", width: float = 1.0) -> nn.Module:
    """Build the model of a dataset with PyTorch's default initialisation.

    Weights of convolutions are in channels-last format, in which MNIST's model trains a sixth
    faster on a CPU. The global random generator is left as it was.

    Parameters
    ----------
    dataset : str
        A key of ``DATASETS``.
    seed : int
        Seed of the initial parameters.
    model : str (default: "default")
        The dataset's own model, or ``"mlp"``: a perceptron with a hidden layer of 64.
    width : float (default: 1.0)
        Share of the channels and hidden units, rounded, at least one; a single layer has none.
    """
    info = dataset_info(dataset)
    make = _mlp if model == "mlp" else _MODELS[dataset]
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed the CUDA generators.
        torch.default_generator.manual_seed(seed)
        built = make(info, width)
    # torch's own types do not know of memory formats here.
    return built.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
