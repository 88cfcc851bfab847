"""What sensitivity and sketch cost, against local training and against the obvious ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import Spread, interleave_calls, paired_ratio, peak_memory
from benchmarks.report import Report, parser, with_unit
from fedpsa_strategy import Calibration, Sketch
from fedpsa_strategy.probe.sensitivity import num_trainable, sensitivity
from task.models import make_model
from task.steps import make_training
from task.tensors import Shard
from task.training import shuffled, train

EPOCHS, BATCH_SIZE, CALIBRATION, DIM = 5, 64, 64, 16  # the paper's
_STEPS = ("", "compiled ")  # of training, the share of which is taken


@dataclass(frozen=True)
class Case:
    """A model with the local training that its sensitivity is measured against.

    Parameters
    ----------
    make : Callable[[], nn.Module]
        Makes the model.
    shape : tuple[int, ...]
        Shape of one input.
    samples : int
        Samples of a client.
    steps_measured : int
        Steps of training that are measured; the rest takes as long per step.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    steps_measured: int

    @property
    def steps(self) -> int:
        """Steps of the whole local training."""
        return EPOCHS * -(-self.samples // BATCH_SIZE)


def resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 for small images."""
    from task.torchvision_import import import_torchvision_datasets

    import_torchvision_datasets()  # works beside any build of torch
    from torchvision.models import resnet18 as make

    model: nn.Module = make(num_classes=10)
    return model


def wide(width: int) -> nn.Module:
    """Return a perceptron with a large square layer; width 9600 has 10⁸ parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


CASES = {
    "digits": Case(partial(make_model, "digits", 0), (1, 8, 8), 32, 5),
    "fmnist": Case(partial(make_model, "fmnist", 0), (1, 28, 28), 1260, 100),
    "mnist": Case(partial(make_model, "mnist", 0), (1, 28, 28), 1260, 10),
    "cifar10": Case(partial(make_model, "cifar10", 0), (3, 32, 32), 1080, 5),
    "resnet18": Case(resnet18, (3, 32, 32), 1080, 2),
    "100m": Case(partial(wide, 9600), (1, 28, 28), 1260, 1),
}


def plain_sensitivity(per_sample: Tensor, theta: Tensor) -> Tensor:
    """Return s from a matrix of per-sample gradients."""
    return (per_sample.mean(0) * theta - 0.5 * per_sample.square().mean(0) * theta.square()).abs()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy per sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return s by `torch.func.vmap(grad)`, all per-sample gradients at once."""
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(values: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, (values, buffers), (sample[None],))
        return loss_fn(outputs, target[None])[0]

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    per_sample = torch.cat([value.flatten(1) for value in gradients.values()], 1)
    return plain_sensitivity(per_sample, torch.cat([v.flatten() for v in parameters.values()]))


def by_loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return s by one backward pass per sample."""
    parameters = list(model.parameters())
    mean, square = (torch.zeros(num_trainable(model)) for _ in range(2))
    for sample, target in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
        gradients = torch.autograd.grad(loss_fn(model(sample), target)[0], parameters)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mean += flat / len(x)
        square += flat.square() / len(x)
    theta = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return (mean * theta - 0.5 * square * theta.square()).abs()


def measure_case(case: Case, repeats: int, *, alternatives: bool) -> dict[str, Any]:
    """Return the times and memory of one model."""
    torch.manual_seed(0)
    model = case.make().eval()
    size = num_trainable(model)
    calibration = Calibration.gaussian(case.shape, size=CALIBRATION, num_classes=10)
    x, y = calibration.tensors("cpu")
    sketch = Sketch(size, DIM)
    measured = min(case.samples, BATCH_SIZE * case.steps_measured)
    shard = Shard(torch.randn(measured, *case.shape), torch.randint(0, 10, (measured,)))
    epochs = -(-case.steps_measured * BATCH_SIZE // max(measured, BATCH_SIZE))
    steps = epochs * -(-measured // BATCH_SIZE)
    local = partial(
        train, model, shard, lr=1e-6, epochs=epochs, batch_size=BATCH_SIZE, seed=0, step="eager"
    )
    vector = sensitivity(model, x, y)
    ours: dict[str, Callable[[], Any]] = {
        "sensitivity": lambda: sensitivity(model, x, y),
        "sketch": lambda: sketch(vector),
    }
    # The share first, as in a task: the other ways leave their memory behind.
    in_task = interleave_calls({"training": local, **ours}, repeats)
    scale = case.steps / steps
    in_task["training"] = [seconds * scale for seconds in in_task["training"]]
    others: dict[str, Callable[[], Any]] = {}
    if alternatives:
        others["vmap"] = lambda: by_vmap(model, x, y)
        others["loop"] = lambda: by_loop(model, x, y)
        vector = sensitivity(model, x, y)
        for other in (by_vmap(model, x, y), by_loop(model, x, y)):
            assert torch.allclose(other, vector, rtol=1e-2, atol=1e-6), "another sensitivity"
    in_memory: dict[str, Callable[[], Any]] = {"training": local, **ours, **others}
    if DIM * size * 8 < 2**30:
        dense = torch.randn(DIM, size, generator=torch.Generator().manual_seed(0)).double()
        others["dense R, stored"] = lambda: dense @ vector.double()
    compared = interleave_calls({**ours, **others}, repeats)
    return {
        "parameters": size,
        "steps": case.steps,
        "seconds": {key: Spread.of(values) for key, values in in_task.items()},
        "compared": {key: Spread.of(values) for key, values in compared.items()},
        "share": paired_ratio(
            [a + b for a, b in zip(in_task["sensitivity"], in_task["sketch"], strict=True)],
            in_task["training"],
        ),
        "memory": {key: peak_memory(call) for key, call in in_memory.items()},
    }


def measure_compiled(case: Case, repeats: int) -> tuple[Spread, float]:
    """Return the time of training with step = "compiled", and the sketch's share of it."""
    model = case.make()
    x = torch.randn(case.samples, *case.shape)
    y = torch.randint(0, 10, (case.samples,))
    tensors = Calibration.gaussian(case.shape, size=CALIBRATION, num_classes=10).tensors("cpu")
    sketch = Sketch(num_trainable(model), DIM)
    training = make_training("compiled", model, BATCH_SIZE, 1e-6, 0.0)
    orders = shuffled(len(x), EPOCHS, seed=0)
    calls: dict[str, Callable[[], Any]] = {
        "training": lambda: training(x, y, orders),
        "both": lambda: sketch(sensitivity(model, *tensors)),
    }
    found = interleave_calls(calls, repeats)
    share = paired_ratio(found["both"], found["training"]).median
    return Spread.of(found["training"]), share


def measure_sketch(size: int, repeats: int) -> dict[str, Any]:
    """Return the time of a long sketch, beside that of the least anyone would have to do."""
    vector = np.random.default_rng(0).standard_normal(size, np.float32)
    sketch = Sketch(size, DIM)
    philox = np.random.Philox(0)

    def bits(per_entry: int) -> None:
        words = -(-size * per_entry // 64)
        for start in range(0, words, 2**17):
            philox.random_raw(min(2**17, words - start), output=True)

    cases: dict[str, Callable[[], Any]] = {
        "sketch": lambda: sketch(vector),
        "read": lambda: float(vector.sum()),
        "one bit per entry of the vector": lambda: bits(1),
        "one bit per entry of R": lambda: bits(DIM),
    }
    found = interleave_calls(cases, repeats, warm_up=0)
    least = [a + b for a, b in zip(found["read"], found["one bit per entry of R"], strict=True)]
    return {
        "size": size,
        "seconds": {key: Spread.of(values) for key, values in found.items()},
        "ratio": paired_ratio(found["sketch"], least),
        "memory": peak_memory(cases["sketch"]),
    }


def _report_uploads(report: Report, data: Mapping[str, dict[str, Any]]) -> None:
    rows = []
    for name, found in data.items():
        shares = {"": found["share"].median}
        if "share of compiled" in found:
            shares["compiled "] = found["share of compiled"]
        seconds, memory = found["seconds"], found["memory"]
        rows.append(
            [
                name,
                f"{found['parameters']:,}",
                *(
                    seconds[key].show(1e3) if key in seconds else ""
                    for key in ("training", "compiled training", "sensitivity", "sketch")
                ),
                *(f"{100 * shares[key]:.2g} %" if key in shares else "" for key in _STEPS),
                *(with_unit(memory[key]) for key in ("sensitivity", "sketch", "training")),
            ]
        )
        for step, share in shares.items():
            what = f"{name}: sensitivity + sketch, in % of {step}local training"
            report.target(what, 100 * share, 5.0)
    report.table(
        "Per upload, milliseconds and memory",
        ["model", "d", "training", "compiled training", "sensitivity", "sketch", "share",
         "share of compiled", "memory: sensitivity", "sketch", "training"],
        rows,
    )  # fmt: skip


def _report_other_ways(report: Report, data: Mapping[str, dict[str, Any]]) -> None:
    report.table(
        "Other ways, milliseconds (and memory)",
        ["model", "ours: sensitivity", "vmap(grad)", "a loop over samples", "ours: sketch",
         "dense Gaussian R, stored", "its memory"],
        [
            [
                name,
                found["compared"]["sensitivity"].show(1e3),
                *(
                    f"{found['compared'][key].show(1e3)}, {with_unit(found['memory'][key])}"
                    if key in found["compared"] else ""
                    for key in ("vmap", "loop")
                ),
                found["compared"]["sketch"].show(1e3),
                found["compared"]["dense R, stored"].show(1e3)
                if "dense R, stored" in found["compared"] else "too large",
                with_unit(4 * DIM * found["parameters"]),
            ]
            for name, found in data.items()
        ],
    )  # fmt: skip


def _report_long_sketch(report: Report, long: dict[str, Any]) -> None:
    report.table(
        f"A sketch of {long['size']:.0e} numbers, k = {DIM}",
        ["", "seconds"],
        [[key, spread.show()] for key, spread in long["seconds"].items()],
    )
    report.text(f"Extra memory: {with_unit(long['memory'])}.")
    report.target(
        f"sketch of {long['size']:.0e}: time / (reading + one bit per entry of R)",
        long["ratio"].median,
        3.0,
    )
    report.target(f"sketch of {long['size']:.0e}: extra MB", long["memory"] / 1e6, 64.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.sketch", __doc__ or "")
    options.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    options.add_argument("--size", type=float, default=1e8, help="entries of the long sketch")
    options.add_argument("--compiled", action="store_true", help="also the compiled training step")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(1)
    command = f"python -m benchmarks.sketch --models {' '.join(parsed.models)}"
    command += f" --size {parsed.size:g}{' --compiled' if parsed.compiled else ''}"
    command += f" --repeats {parsed.repeats}"
    report = Report("sketch", "Sensitivity and sketch against local training", command)
    report.text(
        f"Processor time of one thread; {EPOCHS} epochs of batches of {BATCH_SIZE}, a calibration "
        f"batch of {CALIBRATION} and k = {DIM} as in the paper. Medians, ranges in brackets; "
        "what takes milliseconds is measured ten times as often, the largest models twice. "
        "Training is the eager step; where it takes long, some of its steps are measured. Memory "
        "is what the process grows by."
    )
    data = {}
    for name in parsed.models:
        big, quick = name in ("resnet18", "100m"), name in ("digits", "fmnist")
        repeats = min(parsed.repeats, 2) if big else (10 if quick else 1) * parsed.repeats
        found = measure_case(CASES[name], repeats, alternatives=not big)
        if parsed.compiled and not big:
            time, found["share of compiled"] = measure_compiled(CASES[name], repeats)
            found["seconds"]["compiled training"] = time
        data[name] = found
    _report_uploads(report, data)
    _report_other_ways(report, data)
    long = measure_sketch(int(parsed.size), min(parsed.repeats, 3))
    _report_long_sketch(report, long)
    report.data("models", data)
    report.data("long_sketch", long)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
