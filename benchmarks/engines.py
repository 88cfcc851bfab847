"""Our local engine against a bare training loop, and against Flower's Ray engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.jobs import Job, Measured, bare, on_local_engine, on_ray
from benchmarks.measure import Spread, paired_ratio
from benchmarks.report import Report, parser, with_unit

JOBS = {
    # After so many uploads even the second worker has loaded nearly all clients' data, as the bare
    # loop has when it starts.
    "fmnist": Job("fmnist", versions=100, warm_up=300),
    # With the wall clock an upload counts when it is there. The virtual clock brings them into an
    # order and takes several at once, which is nothing in hundreds and much in ten.
    "mnist": Job("mnist", versions=2, warm_up=5, clock="wall"),
    "cifar10": Job("cifar10", versions=2, warm_up=5, clock="wall"),
    "digits": Job("digits", versions=10, warm_up=10),
}
NAMES = {
    "fmnist": "Fashion-MNIST, linear model",
    "mnist": "MNIST, CNN",
    "cifar10": "CIFAR-10, CNN",
    "digits": "digits, small perceptron",
}
# Wall time over that of the bare loop, by dataset and number of processes: for orientation.
LIMITS = {("fmnist", "1"): 1.35, ("mnist", "1"): 1.05, ("cifar10", "1"): 1.05}
_OVER_RAY = 3.0

LOCAL = "local engine"
HERE = "local engine that trains in the server too"


def measure(
    job: Job, repeats: int, *, ray: bool, processes: Sequence[int] = (1, 2)
) -> dict[str, list[Measured]]:
    """Run a job on all engines in turn."""
    fedbuff = replace(job, method="fedbuff")
    cases: dict[str, Callable[[], Measured]] = {}
    for number in processes:
        cases[f"bare loop, {number}"] = partial(bare, job, number)
        cases[f"{LOCAL}, {number}"] = partial(on_local_engine, job, number)
        cases[f"{LOCAL}, FedBuff, {number}"] = partial(on_local_engine, fedbuff, number)
        if number > 1:
            here = partial(on_local_engine, train_here=True)
            cases[f"{HERE}, {number}"] = partial(here, job, number)
            cases[f"{HERE}, FedBuff, {number}"] = partial(here, fedbuff, number)
    if ray:
        cases[f"Ray engine, {max(processes)}"] = partial(on_ray, job, max(processes))
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            found[name].append(run())
            print(f"  {name}: {found[name][-1].uploads_per_second:.2f} uploads/s", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.engines", __doc__ or "")
    options.add_argument("--datasets", nargs="+", default=["fmnist"], choices=list(JOBS))
    options.add_argument("--ray", action="store_true", help="also run Flower's Ray engine")
    options.add_argument("--data-dir", default="", help="where the datasets' files are")
    options.add_argument("--versions", type=int, help="versions of a run")
    options.add_argument("--steps", nargs="+", default=["compiled"], choices=("compiled", "eager"))
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--label", default="", help="write to engines-LABEL, beside other pages")
    parsed = options.parse_args(arguments)
    command = "python -m benchmarks.engines --datasets " + " ".join(parsed.datasets)
    command += " --ray" if parsed.ray else ""
    command += f" --versions {parsed.versions}" if parsed.versions else ""
    command += " --steps " + " ".join(parsed.steps)
    command += f" --repeats {parsed.repeats}"
    command += " --processes " + " ".join(map(str, parsed.processes))
    report = Report("engines", "Engines against the bare training loop", command, parsed.label)
    report.text(
        "Uploads per second after a warm-up (start, data, compilation), runs in turn. FedPSA where "
        "nothing else is said; with FedBuff, clients train and do nothing else. The bare loop does "
        "the same local training with the same step, and "
        "nothing else: no sensitivity, no sketch, no messages, no server. Wall time over the bare "
        "loop's on the same number of processes, by pairs of neighbouring runs. The server is a "
        "process beside those that train, or, with `--train-here`, one of them. Where a run has "
        "few uploads it has the wall clock, with which each counts when it arrives. Median and "
        "range over the repeats."
    )
    data: dict[str, Any] = {}
    for dataset, step in product(parsed.datasets, parsed.steps):
        job = replace(JOBS[dataset], data_dir=parsed.data_dir, step=step)
        if parsed.versions:
            job = replace(job, versions=parsed.versions)
        found = measure(job, parsed.repeats, ray=parsed.ray, processes=parsed.processes)
        add_to(report, job, found)
        if parsed.ray:
            last = max(parsed.processes)
            rates = [
                [run.uploads_per_second for run in found[f"{name}, {last}"]]
                for name in (LOCAL, "Ray engine")
            ]
            what = f"{dataset}, {step}: uploads/s over Flower's Ray engine"
            report.target(what, paired_ratio(*rates).median, _OVER_RAY, at_least=True)
        data[f"{dataset}, {step}"] = {
            "job": job.described(),
            "runs": {
                name: [
                    {
                        "uploads_per_second": run.uploads_per_second,
                        "peak_memory": run.peak_memory,
                        **_parts(run),
                    }
                    for run in runs
                ]
                for name, runs in found.items()
            },
        }
    report.data("datasets", data)
    print(report.write(parsed.out).read_text())


def add_to(report: Report, job: Job, found: dict[str, list[Measured]]) -> None:
    """Add the table of a job, and how it stands against the limits."""
    rates = {name: [run.uploads_per_second for run in runs] for name, runs in found.items()}
    rows = []
    for name, runs in found.items():
        processes = name.rpartition(" ")[2]
        over = paired_ratio(rates[f"bare loop, {processes}"], rates[name])
        memory = max(run.peak_memory for run in runs)
        rows.append([name, Spread.of(rates[name]).show(), over.show(), with_unit(memory)])
        limit = LIMITS.get((job.dataset, processes))
        if name.startswith(LOCAL) and limit is not None:
            report.target(
                f"{job.dataset}, {job.step}: wall time / bare loop, {name}", over.median, limit
            )
    report.table(
        f"{NAMES[job.dataset]}, {job.step} step: {job.epochs} epochs a task, {job.uploads} uploads",
        ["engine, processes that train", "uploads/s", "wall time / bare loop", "memory"],
        rows,
    )


def _parts(run: Measured) -> dict[str, Any]:
    keys = ("mean_train_seconds", "mean_sensitivity_seconds", "server_seconds", "uploads")
    return {key: run.summary[key] for key in keys} if run.summary else {}


if __name__ == "__main__":
    main()
