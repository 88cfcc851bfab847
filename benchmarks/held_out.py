"""What the choice of test images does: the official test set, or a random tenth of all images.

One model is trained in one place, without clients, on the images that are not for testing.
"""

from __future__ import annotations

from statistics import fmean, stdev

import torch

from benchmarks.report import Report, parser
from task.datasets import dataset_info, load_raw
from task.tasks import DatasetTask
from task.tensors import Shard, normalised
from task.training import evaluate, train

RATES = (0.01, 0.003, 0.001)  # one after the other
OFFICIAL = {"mnist": 10_000, "fmnist": 10_000, "cifar10": 10_000}  # the last ones of all images


def accuracy(
    task: DatasetTask, images: Shard, tests: torch.Tensor, epochs: int, seed: int
) -> float:
    """Return the accuracy on `tests`, indices of the images, after training on all others."""
    rest = torch.ones(len(images), dtype=torch.bool)
    rest[tests] = False
    model = task.make_model(seed)
    training = Shard(images.x[rest], images.y[rest])
    for number, rate in enumerate(RATES):
        train(model, training, lr=rate, epochs=epochs, batch_size=64, seed=10 * seed + number)
    found = evaluate(model, Shard(images.x[tests], images.y[tests]))[1]
    return 100 * float(found or 0.0)


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    options = parser("benchmarks.held_out", __doc__ or "")
    options.add_argument("--dataset", default="fmnist", choices=list(OFFICIAL))
    options.add_argument("--seeds", type=int, default=3, metavar="N")
    options.add_argument("--epochs", type=int, default=10, metavar="N")
    options.add_argument("--data-dir", default="")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report(
        "held_out",
        "Test images",
        f"python -m benchmarks.held_out --dataset {parsed.dataset} --seeds {parsed.seeds}"
        f" --epochs {parsed.epochs}",
        "",
    )
    pixels, labels = load_raw(parsed.dataset, parsed.data_dir)
    images = Shard(normalised(pixels, dataset_info(parsed.dataset)), torch.from_numpy(labels))
    task = DatasetTask(parsed.dataset, 1, data_dir=parsed.data_dir)
    official = torch.arange(len(images) - OFFICIAL[parsed.dataset], len(images))
    found: dict[str, list[float]] = {"official test set": [], "random tenth of all images": []}
    for seed in range(parsed.seeds):
        generator = torch.Generator().manual_seed(seed)
        tenth = torch.randperm(len(images), generator=generator)[: len(images) // 10]
        for tests, values in zip((official, tenth), found.values(), strict=True):
            values.append(accuracy(task, images, tests, parsed.epochs, seed))
    report.text(
        f"{parsed.dataset}: the model of the app, trained in one place on all other images:"
        f" {parsed.epochs} epochs each with a learning rate of {', '.join(map(str, RATES))}."
    )
    report.table(
        "Accuracy by test images",
        ["test images", "accuracy (%)", "seeds"],
        [[name, f"{fmean(v):.2f} ± {stdev(v):.2f}", len(v)] for name, v in found.items()],
    )
    report.data("dataset", parsed.dataset)
    report.data("accuracy", found)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
