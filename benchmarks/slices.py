"""Our local engine against a bare training loop, taking turns of a second.

On a shared machine the speed of a process swings by a third from minute to minute. So all
contestants are started, and then all but one are stopped at any time: neighbouring turns meet the
same machine. What a process is given for its life, such as places in the caches, makes some percent
too: hence several rounds, each with new processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.jobs import ROOT, Job, bare_command, descendants, local_command
from benchmarks.measure import Spread
from benchmarks.report import Report, parser

JOBS = {
    # After so many uploads nearly all clients' data are loaded, as they are in the bare loop.
    "fmnist": Job("fmnist", versions=10**6, warm_up=300),
    "digits": Job("digits", versions=10**6, warm_up=20, step="eager"),
}
# Wall time over that of the bare loop, by dataset and number of processes.
LIMITS = {("fmnist", 1): 1.15, ("fmnist", 2): 1.3}
_SETTLE = 0.1  # seconds of a turn that do not count
_PATIENCE = 600.0  # seconds to get ready


class Contestant(ABC):
    """Some processes that do the same task again and again."""

    roots: list[subprocess.Popen[bytes]]

    @abstractmethod
    def count(self) -> int:
        """Return how many tasks are done so far."""

    def go(self) -> None:
        """Let all processes go on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop all processes where they are."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End all processes."""
        self._signal(signal.SIGKILL)
        for root in self.roots:
            root.wait()

    def _signal(self, number: int) -> None:
        for root in self.roots:
            if root.poll() is None:
                for pid in (root.pid, *descendants(root.pid)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)


class BareLoops(Contestant):
    """Training loops, one in each process, that write a byte for every task."""

    def __init__(self, job: Job, processes: int, *, plain: bool = False) -> None:
        command = [*bare_command(job, tasks=0), "--endless", *["--plain"] * plain]
        self.roots = [
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
            )
            for _ in range(processes)
        ]
        self._count = 0
        for root in self.roots:
            assert root.stdout is not None
            os.set_blocking(root.stdout.fileno(), False)

    def count(self) -> int:
        """Return how many tasks are done so far."""
        for root in self.roots:
            assert root.stdout is not None
            self._count += len(root.stdout.read() or b"")
        return self._count


class Engine(Contestant):
    """A run of the app on the local engine."""

    def __init__(self, job: Job, processes: int, folder: Path, *, train_here: bool) -> None:
        run_dir = folder / f"{job.method}-{processes}-{train_here}"
        command = local_command(job, processes, run_dir, train_here=train_here)
        self.roots = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        ]
        self._events = run_dir / "events.jsonl"
        self._read = self._count = 0

    def count(self) -> int:
        """Return how many uploads have taken effect so far."""
        if self._events.exists():
            with self._events.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            self._read += len(text)
            self._count += text.count(b'{"event": "upload"')
        return self._count


@contextmanager
def ready(job: Job, processes: Sequence[int]) -> Iterator[dict[str, tuple[int, Contestant]]]:
    """Start all contestants, wait until each has warmed up, and stop it there."""
    found: dict[str, tuple[int, Contestant]] = {}
    fedbuff = replace(job, method="fedbuff")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def add(name: str, number: int, contestant: Contestant) -> None:
            stack.callback(contestant.end)
            give_up = time.monotonic() + _PATIENCE
            while contestant.count() < job.warm_up:
                if time.monotonic() > give_up or any(
                    r.poll() is not None for r in contestant.roots
                ):
                    raise RuntimeError(f"{name} did not get ready")
                time.sleep(0.2)
            contestant.stop()
            found[name] = (number, contestant)
            print(f"  {name} is ready", flush=True)

        for number in processes:
            add(f"bare loop, {number}", number, BareLoops(job, number))
            if job.step == "compiled":
                add(f"plain loop, {number}", number, BareLoops(job, number, plain=True))
            for train_here in (False, True) if number > 1 else (False,):
                where = "local engine that trains in the server too" * train_here or "local engine"
                for each, method in ((job, "FedPSA"), (fedbuff, "FedBuff")):
                    engine = Engine(each, number, folder, train_here=train_here)
                    add(f"{where}, {method}, {number}", number, engine)
        yield found


def measure(
    contestants: dict[str, tuple[int, Contestant]], repeats: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return everybody's tasks per second, turn by turn, and the others' ratios to the bare loop.

    Every turn of theirs is compared with the mean of the bare loop's turns before and after it.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    ratios: dict[str, list[float]] = {name: [] for name in contestants if not _is_bare(name)}

    def turn(name: str) -> float:
        contestant = contestants[name][1]
        contestant.go()
        time.sleep(_SETTLE)
        before, started = contestant.count(), time.perf_counter()
        time.sleep(seconds)
        done, duration = contestant.count() - before, time.perf_counter() - started
        contestant.stop()
        rates[name].append(max(done, 1) / duration)
        return rates[name][-1]

    for _ in range(repeats):
        for bare in filter(_is_bare, contestants):
            before = turn(bare)
            for name in ratios:
                if contestants[name][0] == contestants[bare][0]:
                    rate, after = turn(name), turn(bare)
                    ratios[name].append((before + after) / 2 / rate)
                    before = after
    return rates, ratios


def _is_bare(name: str) -> bool:
    return name.startswith("bare")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.slices", __doc__ or "")
    options.set_defaults(repeats=8)
    options.add_argument("--rounds", type=int, default=3, help="times all processes are started")
    options.add_argument("--dataset", default="fmnist", choices=list(JOBS))
    options.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--data-dir", default="", help="where the datasets' files are")
    parsed = options.parse_args(arguments)
    if parsed.rounds < 1:
        options.error(f"--rounds must be at least 1, not {parsed.rounds}")
    command = f"python -m benchmarks.slices --dataset {parsed.dataset}"
    command += f" --seconds {parsed.seconds:g} --rounds {parsed.rounds} --repeats {parsed.repeats}"
    command += " --processes " + " ".join(map(str, parsed.processes))
    report = Report("slices", "The local engine against the bare training loop", command)
    job = replace(JOBS[parsed.dataset], data_dir=parsed.data_dir)
    rates: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for _ in range(parsed.rounds):
        with ready(job, parsed.processes) as contestants:
            for total, found in zip(
                (rates, ratios),
                measure(contestants, parsed.repeats, parsed.seconds),
                strict=True,
            ):
                for name, values in found.items():
                    total[name] += values
    report.text(
        f"{parsed.dataset}, {job.step} step, {job.epochs} epochs a task. Turns of "
        f"{parsed.seconds:g} s, {parsed.repeats} of each engine in each of {parsed.rounds} rounds "
        "with new processes, between turns of the bare loop on "
        "as many processes; whoever has no turn is stopped. The bare "
        "loop does the local training and nothing else; FedBuff's clients do the same, FedPSA's "
        "also sensitivity and sketch. Processes are those that train: the server is another one, "
        "or, with `--train-here`, one of them. Wall time over the mean of the bare loop's before "
        "and after; medians, with the least and the most in brackets."
    )
    if job.step == "compiled":
        report.text(
            "The bare loop is the quickest that we know of: it has this project's own training, a "
            "single call of compiled code for all steps of a task. The plain loop is the one that "
            "one would write, with a step that is compiled by `torch.compile` and called for every "
            "batch."
        )
    rows = []
    for name, (number, contestant) in contestants.items():
        rate = Spread.of(rates[name]).show()
        if _is_bare(name):
            rows.append([name, rate, ""])
            continue
        over = Spread.of(ratios[name])
        rows.append([name, rate, over.show()])
        limit = LIMITS.get((parsed.dataset, number))
        if limit is not None and isinstance(contestant, Engine):
            report.target(f"{parsed.dataset}: wall time / bare loop, {name}", over.median, limit)
    report.table("", ["processes that train", "tasks/s", "wall time / bare loop"], rows)
    report.data("rates", rates)
    report.data("ratios", ratios)
    report.data("job", job.described())
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
