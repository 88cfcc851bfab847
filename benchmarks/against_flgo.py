"""Our engine against FLGo, the framework of the paper's experiments: the same job, side by side."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, Job, Measured, bare, on_local_engine, on_ray
from benchmarks.measure import Spread, paired_ratio
from benchmarks.report import Report, parser, with_unit

ENVIRONMENT = ROOT / ".venv-flgo"
PACKAGES = ("flgo==0.4.4", "torch==2.13.0", "torchvision==0.28.0")
_FOLDERS = {"fmnist": "FashionMNIST", "mnist": "MNIST"}
_OVER_FLGO = {"fmnist": 4.0, "mnist": 1.0}  # for orientation
# FLGo trains on 60,000 samples and tests on 10,000: so do we here, for equal steps per task.
_TEST_FRACTION = 1 / 7

JOBS = {
    "fmnist": Job("fmnist", versions=60, warm_up=30, test_fraction=_TEST_FRACTION),
    # Few uploads, each of which counts when it is there; convolutions gain nothing by compiling.
    "mnist": Job(
        "mnist",
        versions=3,
        warm_up=5,
        epochs=2,
        test_fraction=_TEST_FRACTION,
        clock="wall",
        step="eager",
    ),
}


def environment() -> Path:
    """Make FLGo's environment if it is not there; return its Python."""
    python = ENVIRONMENT / "bin" / "python"
    mark = ENVIRONMENT / ".installed"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([str(python), *install, *PACKAGES], check=True)
        mark.touch()
    return python


def on_flgo(python: Path, job: Job, files: Path) -> Measured:
    """Run the job with FLGo in one process, its data in memory."""
    with tempfile.TemporaryDirectory() as work:
        command = [
            *(str(python), "-P", str(Path(__file__).with_name("flgo_run.py"))),
            *("--dataset", job.dataset, "--files", str(files), "--work", work),
            *("--uploads", str(job.uploads), "--warm-up", str(job.warm_up)),
            *("--epochs", str(job.epochs), "--clients", str(job.clients)),
        ]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"FLGo failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(found["uploads"] / found["seconds"], found["peak_memory"], found)


def _report_dataset(
    report: Report, parsed: argparse.Namespace, dataset: str, python: Path
) -> dict[str, Any]:
    """Measure with one dataset; return the rates and the memory of all runs."""
    changes: dict[str, Any] = {"data_dir": str(parsed.data_dir), "method": "fedbuff"}
    if parsed.versions:
        changes["versions"] = parsed.versions
    job = Job(**{**vars(JOBS[dataset]), **changes})
    psa = Job(**{**vars(job), "method": "fedpsa"})
    files = parsed.data_dir / _FOLDERS[dataset] / "raw"
    cases: dict[str, Callable[[], Measured]] = {
        "FLGo, FedBuff": partial(on_flgo, python, job, files),
        "local engine, 1 worker, FedBuff": partial(on_local_engine, job, 1),
        "local engine, 2 workers, FedBuff": partial(on_local_engine, job, 2),
        "local engine, 2 workers, FedPSA": partial(on_local_engine, psa, 2),
        "local engine, 2 processes with the server, FedBuff": partial(
            on_local_engine, job, 2, train_here=True
        ),
        "bare loop, 1 process": partial(bare, job, 1),
    }
    if parsed.ray:
        cases["Flower's Ray engine, 2 actors, FedBuff"] = partial(on_ray, job, 2)
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    for _ in range(parsed.repeats):
        for name, run in cases.items():
            found[name].append(run())
            print(f"  {name}: {found[name][-1].uploads_per_second:.2f} uploads/s", flush=True)
    rates = {name: [run.uploads_per_second for run in runs] for name, runs in found.items()}
    ratios = {name: paired_ratio(rates[name], rates["FLGo, FedBuff"]) for name in cases}
    steps = (found["FLGo, FedBuff"][0].summary or {})["steps_per_task"]
    report.table(
        f"{dataset}: {job.epochs} epochs, {steps:g} steps a task, {job.uploads} uploads",
        ["", "uploads/s", "times FLGo", "memory"],
        [
            [
                name,
                Spread.of(rates[name]).show(),
                ratios[name].show(),
                with_unit(max(run.peak_memory for run in runs)),
            ]
            for name, runs in found.items()
        ],
    )
    two = "local engine, 2 workers, FedBuff"
    report.target(
        f"{dataset}: {two}, uploads/s over FLGo's",
        ratios[two].median,
        _OVER_FLGO[dataset],
        at_least=True,
    )
    share = paired_ratio(rates["local engine, 1 worker, FedBuff"], rates["bare loop, 1 process"])
    report.text(
        f"{dataset}, 1 worker: {100 * share.median:.0f} % of the step-time limit (the bare "
        "loop with the same step)."
    )
    return {
        name: [[run.uploads_per_second, run.peak_memory] for run in runs]
        for name, runs in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.against_flgo", __doc__ or "")
    options.add_argument("--datasets", nargs="+", default=["fmnist"], choices=list(JOBS))
    options.add_argument("--data-dir", type=Path, required=True, help="the datasets' files")
    options.add_argument("--ray", action="store_true", help="also run Flower's Ray engine")
    options.add_argument("--versions", type=int, help="versions of a run")
    options.add_argument("--label", default="", help="write to against_flgo-LABEL")
    parsed = options.parse_args(arguments)
    python = environment()
    report = Report(
        "against_flgo",
        "Against FLGo",
        "python -m benchmarks.against_flgo --data-dir DIR --datasets "
        f"{' '.join(parsed.datasets)}{' --ray' if parsed.ray else ''} --repeats {parsed.repeats}",
        parsed.label,
    )
    report.text(
        "50 clients with equal shares of 60,000 samples (Dirichlet 0.1), buffer of 5, 10 in "
        "flight, batch 64, response times uniform from 10 to 500. FLGo 0.4.4 runs FedBuff in one "
        "process with `load_mode='mem'` and no progress bar; we run FedBuff and FedPSA, the linear "
        "model with the compiled step. Uploads per second after a warm-up, runs in turn; median "
        "and range. Steps per task are equal."
    )
    data: dict[str, Any] = {}
    for dataset in parsed.datasets:
        data[dataset] = _report_dataset(report, parsed, dataset, python)
    report.data("runs", data)
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
