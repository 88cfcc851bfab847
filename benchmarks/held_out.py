"""What the choice of test images does to the accuracy of Fashion-MNIST's linear model.

The paper sets a random tenth of all images aside; its framework has the official test set. The
same model is trained in one place, without clients, and tested on either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from task.datasets import dataset_info, load_raw
from task.models import make_model
from task.partition import split_test
from task.tensors import Shard, normalised
from task.training import evaluate, set_threads, train

OFFICIAL_TEST = 10_000  # the last images
RATES = (0.01, 0.003, 0.001)  # each for a third of the epochs

Indices = NDArray[np.int64]


def splits(num_images: int, seeds: Sequence[int]) -> dict[str, list[tuple[Indices, Indices]]]:
    """Return pairs of training and test images, one per seed, by the name of the choice."""
    everything = np.arange(num_images)
    official = everything[:-OFFICIAL_TEST], everything[-OFFICIAL_TEST:]
    return {
        "official test set": [official] * len(seeds),
        "random tenth of all images": [split_test(num_images, 0.1, seed) for seed in seeds],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.held_out", __doc__ or "")
    options.add_argument("--data-dir", default="", help="where the dataset's files are")
    options.add_argument("--epochs", type=int, default=10, help="with each learning rate")
    chosen = options.parse_args(arguments)
    seeds = range(chosen.repeats)
    command = f"python -m benchmarks.held_out --repeats {chosen.repeats} --epochs {chosen.epochs}"
    report = Report("held_out", "Which images are tested on", command)
    set_threads(1)
    info = dataset_info("fmnist")
    images, labels = load_raw("fmnist", chosen.data_dir)

    def shard(indices: Indices) -> Shard:
        return Shard(normalised(images[indices], info), torch.from_numpy(labels[indices]))

    rows = []
    for name, pairs in splits(len(labels), seeds).items():
        found: dict[str, list[float]] = {"test": [], "training": []}
        for seed, (training, testing) in zip(seeds, pairs, strict=True):
            model, own = make_model("fmnist", seed), shard(training)
            for part, lr in enumerate(RATES):
                train(
                    model,
                    own,
                    lr=lr,
                    epochs=chosen.epochs,
                    batch_size=64,
                    seed=1000 * part + seed,
                )
            found["test"].append(100 * (evaluate(model, shard(testing))[1] or 0.0))
            found["training"].append(100 * (evaluate(model, own)[1] or 0.0))
            print(f"  {name}, seed {seed}: {found['test'][-1]:.2f} %", flush=True)
        report.data(name, found)
        rows.append([name, *(Spread.of(values).show(digits=4) for values in found.values())])
    report.text(
        f"Fashion-MNIST's linear model, trained in one place: {chosen.epochs} epochs with each of "
        f"the learning rates {', '.join(map(str, RATES))}, batch 64. Median and range over seeds "
        f"0 to {chosen.repeats - 1}."
    )
    report.table("", ["tested on", "test accuracy (%)", "training accuracy (%)"], rows)
    report.write(chosen.out)


if __name__ == "__main__":
    main()
