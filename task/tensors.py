"""The samples a model trains on, as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from task.datasets import DatasetInfo


@dataclass(frozen=True)
class Shard:
    """Normalised inputs and their labels. Shared within the process: not to be written to.

    `x` is float32, contiguous, of shape ``(n, *shape)``, `y` int64 of shape ``(n,)``.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """Number of bytes held."""
        return self.x.nbytes + self.y.nbytes


def normalised(images: NDArray[np.uint8], info: DatasetInfo) -> Tensor:
    """Turn raw pixels into a dataset's normalised float32 inputs."""
    x = torch.from_numpy(images).to(torch.float32).div_(info.scale)
    per_channel = (-1, *([1] * (len(info.shape) - 1)))
    mean = torch.tensor(info.mean).view(per_channel)
    std = torch.tensor(info.std).view(per_channel)
    return x.sub_(mean).div_(std).contiguous()
