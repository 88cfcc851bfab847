"""How much of κ is noise of the sketch, and what κ could do to the weights of a buffer.

Clients train from one global model, as those of a buffer without staleness do. Their exact cosines
of sensitivities stand beside those of sketches of several lengths, with many projections each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.report import Report, parser
from fedpsa_strategy import Calibration, Sketch
from fedpsa_strategy.methods.fedpsa import cosine, softmax
from fedpsa_strategy.methods.vectors import effective_number
from fedpsa_strategy.probe.sensitivity import num_trainable, sensitivity
from task.datasets import dataset_info
from task.tasks import DatasetTask
from task.training import evaluate, train

LENGTHS = (16, 64, 256, 1024)
TEMPERATURES = (1.0, 0.5, 0.1, 0.05)
CLIENTS, BUFFER, CALIBRATION = 10, 5, 64
# Models: dataset, kind, width.
MODELS = {
    "perceptron on Fashion-MNIST": ("fmnist", "mlp", 1.0),
    "linear on Fashion-MNIST": ("fmnist", "default", 1.0),
    "MNIST's CNN, a quarter wide": ("mnist", "default", 0.25),
    "CIFAR-10's CNN, a quarter wide": ("cifar10", "default", 0.25),
    "perceptron on digits": ("digits", "mlp", 1.0),
}


@dataclass
class Found:
    """Cosines of one stage of training.

    Parameters
    ----------
    versions : int
        How many versions the global model has.
    accuracy : float
        Its test accuracy.
    exact : NDArray
        cos(s_i, s_global) by client.
    sketched : dict[int, NDArray]
        The same of sketches, by their length: (projections, clients).
    """

    versions: int
    accuracy: float
    exact: NDArray[np.float64]
    sketched: dict[int, NDArray[np.float64]]


def vector_of(model: nn.Module) -> torch.Tensor:
    """Return the parameters as a vector of their own."""
    # torch's own function refuses the order in which convolutions keep their weights.
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def measure(
    task: DatasetTask, stages: Sequence[int], projections: int, epochs: int, seed: int
) -> list[Found]:
    """Train with a uniform buffer and look at the cosines after some versions."""
    model, client = task.make_model(seed), task.make_model(seed)
    info, chance = dataset_info(task.dataset), np.random.default_rng(seed)
    batch = Calibration.gaussian(
        shape=info.shape, num_classes=info.num_classes, size=CALIBRATION, seed=seed
    )
    size = num_trainable(model)
    weights, found = vector_of(model), []

    def trained(index: int, number: int) -> torch.Tensor:
        nn.utils.vector_to_parameters(weights.clone(), client.parameters())
        shard = task.train_data({"partition-id": int(index), "num-partitions": task.num_clients})
        train(client, shard, lr=0.01, epochs=epochs, batch_size=64, seed=number)
        return vector_of(client)

    def response(vector: torch.Tensor) -> NDArray[np.float64]:
        nn.utils.vector_to_parameters(vector.clone(), client.parameters())
        return np.asarray(sensitivity(client, *batch.tensors()), np.float64)

    for version in range(max(stages) + 1):
        if version in stages:
            own = response(weights)
            chosen = chance.choice(task.num_clients, CLIENTS, replace=False)
            others = [response(trained(index, 10**6 + i)) for i, index in enumerate(chosen)]
            sketched = {}
            for length in LENGTHS:
                values = []
                for number in range(projections):
                    sketch = Sketch(size, length, number)
                    reference = sketch(own).tolist()
                    values.append([cosine(sketch(s).tolist(), reference) for s in others])
                sketched[length] = np.array(values)
            nn.utils.vector_to_parameters(weights.clone(), client.parameters())
            _, accuracy = evaluate(client, task.test_data())
            exact = np.array([exact_cosine(s, own) for s in others])
            found.append(Found(version, float(accuracy or 0), exact, sketched))
        buffer = chance.choice(task.num_clients, BUFFER, replace=False)
        ends = [trained(index, version * BUFFER + i) for i, index in enumerate(buffer)]
        weights = torch.stack(ends).mean(dim=0)
    return found


def exact_cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the cosine of two sensitivities."""
    return float(np.sum(a * b) / math.sqrt(float(np.sum(a * a)) * float(np.sum(b * b))))


def noise(found: Found, length: int) -> float:
    """Return the root mean square of sketched minus exact cosines."""
    return float(np.sqrt(np.mean((found.sketched[length] - found.exact) ** 2)))


def share_of_noise(found: Found, length: int) -> float:
    """Return which share of the variance of κ between clients is the sketch's."""
    errors = found.sketched[length] - found.exact
    # What all clients' errors have in common changes no weight.
    own = errors - errors.mean(axis=1, keepdims=True)
    total = found.sketched[length].var(axis=1).mean()
    return float(own.var(axis=1).mean() / total) if total > 0 else 0.0


def effective(kappas: NDArray[np.float64], temperature: float) -> float:
    """Return the effective number of a buffer of all these clients."""
    return effective_number(softmax(kappas.tolist(), temperature))


def _report_model(report: Report, name: str, stages: Sequence[Found]) -> list[dict[str, Any]]:
    """Report what was found with a model; return it as plain values."""
    report.table(
        name,
        ["versions", "accuracy (%)", "exact cosines, mean", "their deviation"]
        + [f"noise at k = {length} (share)" for length in LENGTHS],
        [
            [
                found.versions,
                f"{100 * found.accuracy:.1f}",
                f"{found.exact.mean():.3f}",
                f"{found.exact.std():.3f}",
                *(
                    f"{noise(found, length):.3f} ({100 * share_of_noise(found, length):.0f} %)"
                    for length in LENGTHS
                ),
            ]
            for found in stages
        ],
    )
    report.table(
        f"{name}: effective number of {CLIENTS} at a temperature, by exact cosines",
        ["versions", *(f"{temperature:g}" for temperature in TEMPERATURES)],
        [
            [found.versions, *(f"{effective(found.exact, t):.2f}" for t in TEMPERATURES)]
            for found in stages
        ],
    )
    return [
        {
            "versions": found.versions,
            "accuracy": found.accuracy,
            "exact": found.exact.tolist(),
            "noise": {length: noise(found, length) for length in LENGTHS},
            "share": {length: share_of_noise(found, length) for length in LENGTHS},
        }
        for found in stages
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    options = parser("benchmarks.sketch_noise", __doc__ or "")
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--stages", nargs="+", type=int, default=[1, 20, 80], metavar="N")
    options.add_argument("--projections", type=int, default=20, metavar="N")
    options.add_argument("--epochs", type=int, default=5, metavar="N")
    options.add_argument("--alpha", type=float, default=0.1)
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--data-dir", default="")
    options.add_argument("--label", default="")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(1)
    quoted = " ".join(f'"{name}"' for name in parsed.models)
    report = Report(
        "sketch_noise",
        "How much of κ is noise of the sketch",
        f"python -m benchmarks.sketch_noise --models {quoted} --stages "
        + " ".join(map(str, parsed.stages)),
        parsed.label,
    )
    report.text(
        f"α = {parsed.alpha:g}, {parsed.clients} clients, {parsed.epochs} local epochs, seed"
        f" {parsed.seed}, a uniform buffer of {BUFFER} without staleness; then {CLIENTS} clients"
        f" train from the same model, and {parsed.projections} projections of each length sketch"
        " their sensitivities on Gaussian noise. *Noise* is the root mean square of sketched minus"
        " exact cosines; its *share* is that of κ's variance between clients."
    )
    data: dict[str, list[dict[str, Any]]] = {}
    for name in parsed.models:
        dataset, kind, width = MODELS[name]
        task = DatasetTask(
            dataset,
            parsed.clients,
            alpha=parsed.alpha,
            seed=parsed.seed,
            data_dir=parsed.data_dir,
            model=kind,
            model_width=width,
        )
        stages = measure(task, parsed.stages, parsed.projections, parsed.epochs, parsed.seed)
        data[name] = _report_model(report, name, stages)
    report.data("models", data)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
