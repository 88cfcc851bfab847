"""The models, one per dataset.

A pooling layer stands in front of its ReLU: the two commute, in the gradient too and to the last
bit, and this way the ReLU touches a quarter of the values.
"""

import torch
from torch import Tensor, nn

from task.datasets import dataset_info


class LinearClassifier(nn.Module):
    """One linear layer on the flattened input, its bias starting at zero.

    Parameters
    ----------
    num_inputs : int
        Values per sample.
    num_classes : int
        Number of classes.
    """

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
    """An encoder that turns a sample into a feature vector, and a linear head that classifies it.

    Parameters
    ----------
    encoder : nn.Module
        Maps ``(n, *shape)`` to ``(n, features)``.
    head : nn.Linear
        The final layer.
    """

    def __init__(self, encoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


def _digits_model(num_classes: int) -> nn.Module:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
    return EncoderClassifier(encoder, nn.Linear(32, num_classes))


def _mnist_model(num_classes: int) -> nn.Module:
    encoder = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
    )
    return EncoderClassifier(encoder, nn.Linear(512, num_classes))


def _fmnist_model(num_classes: int) -> nn.Module:
    return LinearClassifier(28 * 28, num_classes)


def _cifar_model(num_classes: int) -> nn.Module:
    encoder = nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
    )
    return EncoderClassifier(encoder, nn.Linear(192, num_classes))


_MODELS = {
    "digits": _digits_model,
    "mnist": _mnist_model,
    "fmnist": _fmnist_model,
    "cifar10": _cifar_model,
    "cifar100": _cifar_model,
}


def make_model(dataset: str, seed: int) -> nn.Module:
    """Build the model of a dataset with PyTorch's default initialisation.

    Weights of convolutions are in channels-last format, in which MNIST's model trains a sixth
    faster on a CPU.

    Parameters
    ----------
    dataset : str
        A key of ``DATASETS``.
    seed : int
        Seed of the initial parameters. The global random generator is left as it was.
    """
    info = dataset_info(dataset)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed the CUDA generators.
        torch.default_generator.manual_seed(seed)
        model = _MODELS[dataset](info.num_classes)
    # torch's own types do not know of memory formats here.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
