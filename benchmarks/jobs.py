"""One job on different engines: the same clients, the same steps, and how many uploads a second."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
# Seconds. Looking at a process takes 10 ms of its time: not too often.
_FIRST_SAMPLE, _SAMPLE_INTERVAL = 0.5, 2.0


@dataclass(frozen=True)
class Job:
    """The paper's setting on one dataset.

    Parameters
    ----------
    dataset : str
        What is learned.
    versions : int
        How many versions are made after the warm-up; five uploads each.
    warm_up : int
        Uploads at the start that do not count: workers load data and compile.
    epochs : int (default: 5)
        Epochs of a task.
    clients : int (default: 50)
        Number of clients; a fifth of them is kept busy.
    step : str (default: "compiled")
        The training step.
    method : str (default: "fedpsa")
        The aggregation method.
    data_dir : str (default: "")
        Where the dataset's files are.
    test_fraction : float (default: 0.1)
        Share of the samples that nobody trains on.
    clock : str (default: "virtual")
        The run's clock.
    """

    dataset: str
    versions: int
    warm_up: int
    epochs: int = 5
    clients: int = 50
    step: str = "compiled"
    method: str = "fedpsa"
    data_dir: str = ""
    test_fraction: float = 0.1
    clock: str = "virtual"

    @property
    def uploads(self) -> int:
        """Uploads that count."""
        return 5 * self.versions

    def described(self) -> dict[str, Any]:
        """Return all of it but the folder of the datasets, which is nobody else's."""
        return {key: value for key, value in vars(self).items() if key != "data_dir"}

    def run_config(self, run_dir: Path) -> dict[str, Any]:
        """Return the run config of the job."""
        return {
            "strategy": self.method,
            "dataset": self.dataset,
            "num-clients": self.clients,
            "dirichlet-alpha": 0.1,
            "test-fraction": self.test_fraction,
            "local-epochs": self.epochs,
            "step": self.step,
            "num-server-rounds": self.versions + -(-self.warm_up // 5),
            "virtual-days": 0.0,
            "clock": self.clock,
            "evaluate-every": 50,
            "device": "cpu",
            "data-dir": self.data_dir,
            "run-dir": str(run_dir),
        }


@dataclass(frozen=True)
class Measured:
    """What a job took.

    Parameters
    ----------
    uploads_per_second : float
        After the warm-up.
    peak_memory : int
        The most memory of all its processes together, in bytes.
    summary : dict[str, Any] | None (default: None)
        The run's own summary.
    """

    uploads_per_second: float
    peak_memory: int
    summary: dict[str, Any] | None = None


def on_local_engine(job: Job, processes: int, *, train_here: bool = False) -> Measured:
    """Run the job on our local engine; of the processes one may be the server's own."""
    return _run_app(job, partial(local_command, job, processes, train_here=train_here))


def on_ray(job: Job, cpus: int) -> Measured:
    """Run the job on Flower's simulation engine."""
    return _run_app(job, partial(_command, job, ["--engine", "ray", "--cpus", str(cpus)]))


def local_command(
    job: Job, processes: int, run_dir: Path, *, train_here: bool = False
) -> list[str]:
    """Return the command that runs the job on our local engine."""
    engine = ["--engine", "local", "--workers", str(processes - train_here)]
    return _command(job, engine + ["--train-here"] * train_here, run_dir)


def _command(job: Job, engine: Sequence[str], run_dir: Path) -> list[str]:
    command = [sys.executable, "-m", "simulation", "run", "--quiet", *engine]
    for key, value in job.run_config(run_dir).items():
        command += ["--set", f"{key}={json.dumps(value) if value != '' else ''}"]
    return command


def _run_app(job: Job, command_for: Callable[[Path], list[str]]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = command_for(run_dir)
        with _memory_of_children() as peak:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        times = [event["wall"] for event in map(json.loads, lines) if event["event"] == "upload"]
        summary = json.loads((run_dir / "summary.json").read_text())
    counted = times[job.warm_up :]
    rate = (len(counted) - 1) / (counted[-1] - counted[0])
    return Measured(rate, peak(), summary)


def bare(job: Job, processes: int) -> Measured:
    """Do the same local training in bare loops, one in each process."""
    tasks = -(-job.uploads // processes)
    command = bare_command(job, tasks)
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the bare loop ended with {process.wait()}")
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [json.loads(process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    seconds = max(result["seconds"] for result in results)
    memory = sum(result["peak_memory"] for result in results)
    return Measured(tasks * processes / seconds, memory)


def bare_command(job: Job, tasks: int) -> list[str]:
    """Return the command of one bare loop."""
    return [
        *(sys.executable, "-m", "benchmarks.bare_loop", "--dataset", job.dataset),
        *("--tasks", str(tasks), "--clients", str(job.clients), "--epochs", str(job.epochs)),
        *("--step", job.step, "--data-dir", job.data_dir),
        *("--test-fraction", str(job.test_fraction)),
    ]


@contextmanager
def _memory_of_children() -> Iterator[Callable[[], int]]:
    """Watch the memory of all processes that descend from this one."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        wait = _FIRST_SAMPLE
        while not done.wait(wait):
            children = psutil.Process().children(recursive=True)
            peak[0] = max(peak[0], sum(map(_memory, children)))
            wait = _SAMPLE_INTERVAL

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        thread.join()


def _memory(process: psutil.Process) -> int:
    """Return the memory of a process; what it shares with others counts in parts."""
    try:
        used = process.memory_full_info()
    except psutil.Error:  # it has ended
        return 0
    return int(getattr(used, "pss", used.rss))  # only Linux knows the parts
