"""A FedBuff run of FLGo: a program for FLGo's own environment, where nothing of ours is installed.

It prints how many uploads it made in how many seconds, and its peak memory.
"""

import argparse
import gzip
import json
import resource
import shutil
import sys
import time
import types
from pathlib import Path

import torch

_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_NAMES = {"fmnist": "FashionMNIST", "mnist": "MNIST"}
_SETTINGS = {
    "num_rounds": 10**9,
    "proportion": 0.2,
    "sample": "uniform",
    "batch_size": 64,
    "learning_rate": 0.01,
    "learning_rate_decay": 0.999,
    "lr_scheduler": "0",
    "train_holdout": 0.0,
    "responsiveness": "UNI-10-500",
    "load_mode": "mem",
    "eval_interval": 50,
    "torch_num_threads": 1,
    "no_log_console": True,
    "no_tqdm": True,
}


def declare_schemas() -> object:
    """Declare what a build of torchvision without its compiled operators misses."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def unpack(source: Path, target: Path) -> None:
    """Put the dataset's files where torchvision looks for them."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        packed = source / f"{name}-ubyte.gz"
        with gzip.open(packed, "rb") as old, (target / f"{name}-ubyte").open("wb") as new:
            shutil.copyfileobj(old, new)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", choices=sorted(_NAMES), required=True)
    parser.add_argument("--files", type=Path, required=True, help="folder of the .gz files")
    parser.add_argument("--work", type=Path, required=True, help="folder for FLGo's task")
    parser.add_argument("--uploads", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Be the program."""
    options = read_options()
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        kept = declare_schemas()  # noqa: F841

    import flgo
    import flgo.benchmark.partition
    from flgo.algorithm import fedbuff
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe

    # Newer DataLoaders ask a Subset for whole batches, past FLGo's own indexing.
    dataset_class = FromDatasetPipe.TaskDataset
    dataset_class.__getitems__ = lambda self, indices: [self[index] for index in indices]

    folder = {"fmnist": "FASHION", "mnist": "MNIST"}[options.dataset]
    raw = Path(flgo.benchmark.path) / "RAW_DATA" / folder / _NAMES[options.dataset] / "raw"
    unpack(options.files, raw)
    if options.dataset == "fmnist":
        from flgo.benchmark import fashion_classification as benchmark
    else:
        from flgo.benchmark import mnist_classification as benchmark

    task = str(options.work / "task")
    partitioner = flgo.benchmark.partition.DirichletPartitioner(options.clients, alpha=0.1)
    flgo.gen_task_by_(benchmark, partitioner, task)
    times: list[float] = []

    class Server(fedbuff.Server):
        def package_handler(self, received_packages: dict) -> bool:
            times.extend([time.perf_counter()] * len(received_packages["__cid"]))
            return super().package_handler(received_packages)

    algorithm = types.SimpleNamespace(__name__="fedbuff", Server=Server, Client=fedbuff.Client)
    models = {"fmnist": "lr", "mnist": "cnn"}
    model = __import__(f"{benchmark.__name__}.model.{models[options.dataset]}", fromlist=["Model"])
    runner = flgo.init(task, algorithm, _SETTINGS | {"num_epochs": options.epochs}, model=model)
    runner.register_exit_condition(lambda _server: len(times) >= options.uploads + options.warm_up)
    runner.run()
    counted = times[options.warm_up :]
    sizes = [len(client.train_data) for client in runner.clients]
    print(
        json.dumps(
            {
                "uploads": len(counted) - 1,
                "seconds": counted[-1] - counted[0],
                "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "samples_per_client": sum(sizes) / len(sizes),
                "steps_per_task": options.epochs
                * sum(-(-size // 64) for size in sizes)
                / len(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()
