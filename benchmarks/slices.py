"""Our local engine against a bare training loop, taking turns of a second.

On a shared machine the speed of a process swings by a third from minute to minute. So all
contestants are started, and then all but one are stopped at any time: neighbouring turns meet the
same machine. What a process is given for its life, such as places in the caches, makes some percent
too: hence several rounds, each with new processes. And the host of a virtual machine may give its
processors' time to others, which slows those most who use several of them: how much it took is
noted with every turn.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.jobs import ROOT, Job, bare_command, descendants, local_command
from benchmarks.machine import ProcessorTime
from benchmarks.measure import Spread
from benchmarks.report import Report, parser
from simulation.environment import training_environment

JOBS = {
    # After so many uploads nearly all clients' data are loaded, as they are in the bare loop.
    "fmnist": Job("fmnist", versions=10**6, warm_up=300),
    "digits": Job("digits", versions=10**6, warm_up=20, step="eager"),
}
# Wall time over that of the bare loop, by dataset and number of processes.
LIMITS = {("fmnist", 1): 1.15, ("fmnist", 2): 1.3}
# Turns are told apart by the share of all processors' time that the host took: up to each of these.
STOLEN = (0.02, 0.1, 1.0)
_ENOUGH = 6  # turns with the machine to themselves, to hold them against a limit
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
                command,
                cwd=ROOT,
                env=training_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,
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


class Turn(NamedTuple):
    """What came of a turn.

    Attributes
    ----------
    rate : float
        Tasks per second.
    stolen : float
        Share of all processors' time that the host gave to others meanwhile.
    """

    rate: float
    stolen: float


class Comparison(NamedTuple):
    """A turn between two of the bare loop.

    Attributes
    ----------
    ratio : float
        The mean rate of the bare loop's two turns over that of the turn between them, which is wall
        time over the bare loop's.
    stolen : float
        The largest share that the host took in one of the three.
    """

    ratio: float
    stolen: float


def measure(
    contestants: dict[str, tuple[int, Contestant]], repeats: int, seconds: float
) -> tuple[dict[str, list[Turn]], dict[str, list[Comparison]]]:
    """Return everybody's turns, and how the others' compare with the bare loop's around them."""
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    comparisons: dict[str, list[Comparison]] = {
        name: [] for name in contestants if not _is_bare(name)
    }

    def turn(name: str) -> Turn:
        contestant = contestants[name][1]
        contestant.go()
        time.sleep(_SETTLE)
        before, started, processors = contestant.count(), time.perf_counter(), ProcessorTime.now()
        time.sleep(seconds)
        done, duration = contestant.count() - before, time.perf_counter() - started
        stolen = ProcessorTime.now().stolen_since(processors)
        contestant.stop()
        turns[name].append(Turn(max(done, 1) / duration, stolen))
        return turns[name][-1]

    for _ in range(repeats):
        for bare in filter(_is_bare, contestants):
            before = turn(bare)
            for name in comparisons:
                if contestants[name][0] == contestants[bare][0]:
                    between, after = turn(name), turn(bare)
                    ratio = (before.rate + after.rate) / 2 / between.rate
                    stolen = max(each.stolen for each in (before, between, after))
                    comparisons[name].append(Comparison(ratio, stolen))
                    before = after
    return turns, comparisons


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
    turns: dict[str, list[Turn]] = defaultdict(list)
    comparisons: dict[str, list[Comparison]] = defaultdict(list)
    for _ in range(parsed.rounds):
        with ready(job, parsed.processes) as contestants:
            new_turns, new_comparisons = measure(contestants, parsed.repeats, parsed.seconds)
        for name, found in new_turns.items():
            turns[name] += found
        for name, compared in new_comparisons.items():
            comparisons[name] += compared
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
    report.text(
        "The host of a virtual machine may give processors to others that we were ready to use. "
        "One bare loop asks for one processor, an engine for one more than it has workers, so that "
        "it is hit harder. Hence all turns, and then these by the largest share of all processors' "
        "time that the host took in the turn itself or in the bare loop's before and after."
    )
    if job.step == "compiled":
        report.text(
            "The bare loop is the quickest that we know of: it has this project's own training, a "
            "single call of compiled code for all steps of a task. The plain loop is the one that "
            "one would write, with a step that is compiled by `torch.compile` and called for every "
            "batch. Both have the engine's setting of the memory allocator."
        )
    rows = []
    for name, (number, contestant) in contestants.items():
        row = [name, Spread.of(each.rate for each in turns[name]).show()]
        compared = comparisons.get(name, [])
        groups = [[each.ratio for each in compared]]
        groups += [
            [each.ratio for each in compared if low < each.stolen <= high]
            for low, high in pairwise((-1.0, *STOLEN))
        ]
        rows.append(row + [_show(ratios) for ratios in groups])
        limit = LIMITS.get((parsed.dataset, number))
        if limit is not None and isinstance(contestant, Engine):
            what = f"{parsed.dataset}: wall time / bare loop, {name}"
            report.target(f"{what}, all turns", statistics.median(groups[0]), limit)
            if len(groups[1]) >= _ENOUGH:
                quiet = f"{what}, host took at most {STOLEN[0]:.0%}"
                report.target(quiet, statistics.median(groups[1]), limit)
    spans = [f"at most {STOLEN[0]:.0%}"]
    spans += [f"{low:.0%} to {high:.0%}" for low, high in pairwise(STOLEN)]
    header = ["processes that train", "tasks/s", "wall time / bare loop, all turns"]
    report.table("", [*header, *(f"host took {span}" for span in spans)], rows)
    report.data("rates", {name: [each.rate for each in found] for name, found in turns.items()})
    report.data("ratios", {name: [each.ratio for each in c] for name, c in comparisons.items()})
    report.data("stolen", {name: [each.stolen for each in c] for name, c in comparisons.items()})
    report.data("job", job.described())
    print(report.write(parsed.out).read_text())


def _show(ratios: list[float]) -> str:
    return f"{Spread.of(ratios).show()}, {len(ratios)} turns" if ratios else ""


if __name__ == "__main__":
    main()
