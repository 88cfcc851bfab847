"""What one upload and one version cost the server, for every rule and size of model."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the reference must not use more cores than we

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from benchmarks.measure import Spread, cpu_seconds_of, paired_ratio, peak_memory
from benchmarks.report import Report, parser, with_unit
from fedpsa_strategy import AsyncStrategy, FedPAC, FedPSA
from fedpsa_strategy.methods.base import Sketched
from fedpsa_strategy.methods.fedpac import CENTROIDS, COUNTS, FEATURES, VARIANCE, FedPACMethod
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.callbacks.head_statistics import RECORD_KEY
from fedpsa_strategy.server.strategies import strategy_of
from simulation.engines.local.internals import SERVER_NODE_ID, act_as, give_id

BUFFER = 5
SKETCH = [float(value) for value in range(1, 17)]
_CLASSES, _FEATURES = 10, 64
_ARRAYS = 8  # into which a model of any size is divided


def make_strategy(name: str) -> AsyncStrategy:
    """Return the strategy of one of this library's methods, with a small buffer or queue."""
    kind = METHODS[name]
    small: dict[str, Any] = {"buffer_size": BUFFER, "queue_size": BUFFER}
    method = kind.taken_from(small)
    common: dict[str, Any] = {"method": method, "max_in_flight": BUFFER, "num_clients": BUFFER}
    if isinstance(method, Sketched):
        return FedPSA(sketch_fn=lambda _arrays: SKETCH, **common)
    if isinstance(method, FedPACMethod):
        return FedPAC(head_keys=["head"], num_classes=_CLASSES, num_features=_FEATURES, **common)
    return strategy_of(kind)(**common)


class _Nodes(Grid):
    """As much of a grid as `configure_train` asks for."""

    def __init__(self, num_nodes: int) -> None:
        self._ids = range(1000, 1000 + num_nodes)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._ids)

    def _unused(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = send_and_receive = _unused
    run = property(_unused)


class Server:
    """A strategy that is given uploads without any client behind them.

    Parameters
    ----------
    method : str
        The name of a method of this library.
    size : int
        d: parameters of the model.
    """

    def __init__(self, method: str, size: int) -> None:
        act_as(SERVER_NODE_ID)
        self.strategy = make_strategy(method)
        self._grid = _Nodes(BUFFER)
        self._ids = map(str, itertools.count())
        self.strategy.begin(model_record(size), self._grid.get_node_ids())
        self._content = upload(size)
        self._waiting: list[Message] = []
        self._next_reply()

    def upload(self) -> bool:
        """Take one upload; tell whether it made a version."""
        version = self.strategy.state.version
        self.strategy.aggregate_train(version + 1, [self._reply])
        return self.strategy.state.version != version

    def timed_upload(self) -> tuple[float, bool]:
        """Take one upload; return the seconds, and whether it made a version."""
        made = []
        seconds = cpu_seconds_of(lambda: made.append(self.upload()))
        self._next_reply()
        return seconds, made[0]

    def _next_reply(self) -> None:
        if not self._waiting:
            strategy, state = self.strategy, self.strategy.state
            config = ConfigRecord({"lr": 0.1})
            self._waiting = list(
                strategy.configure_train(state.version + 1, state.arrays, config, self._grid)
            )
            for message in self._waiting:
                give_id(message, next(self._ids))
        # A fresh record around the same bytes: what a transport hands over is not kept by us.
        self._reply = Message(self._content, reply_to=self._waiting.pop(0))


def model_record(size: int) -> ArrayRecord:
    """Return a model of d parameters in a few arrays, the last one a small head."""
    head = min(_CLASSES * _FEATURES + _CLASSES, size // 2)
    parts = np.array_split(np.zeros(size - head, np.float32), _ARRAYS - 1)
    arrays = {f"layer{index}": Array(part) for index, part in enumerate(parts)}
    return ArrayRecord(arrays | {"head": Array(np.zeros(head, np.float32))})


def upload(size: int) -> RecordDict:
    """Return what a client sends: an update, metrics with a sketch, FedPAC's statistics."""
    generator = np.random.default_rng(0)
    update = ArrayRecord(
        {
            key: Array(1e-3 * generator.standard_normal(array.shape[0], np.float32))
            for key, array in model_record(size).items()
        }
    )
    table = np.ones((_CLASSES, _FEATURES), np.float32)
    statistics: dict[str, Any] = {
        CENTROIDS: table,
        FEATURES: table,
        COUNTS: np.ones(_CLASSES, np.int64),
        VARIANCE: np.asarray(1.0, np.float32),
    }
    metrics: dict[str, Any] = {"num-examples": 100, "train-loss": 0.5, "sketch": SKETCH}
    return RecordDict(
        {
            "arrays": update,
            "metrics": MetricRecord(metrics),
            RECORD_KEY: ArrayRecord({k: Array(v) for k, v in statistics.items()}),
        }
    )


def dot_and_copy(size: int) -> Callable[[], float]:
    """Return what an upload is measured against: one dot product and one copy of the update.

    The copies are kept until there are a buffer's worth of them, as those of uploads have to be.
    """
    vector = np.random.default_rng(0).standard_normal(size, np.float32)
    kept: list[Any] = []

    def measure() -> float:
        if len(kept) == BUFFER:
            kept.clear()
        return cpu_seconds_of(lambda: kept.append((vector @ vector, vector.copy())))

    return measure


def measure_size(size: int, methods: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return the times of all methods for one size, and those of the reference."""
    calls = max(1, min(50, 2_000_000 // size))
    reference = dot_and_copy(size)
    found: dict[str, Any] = {}
    for method in methods:
        server = Server(method, size)
        while not server.timed_upload()[1]:  # first touches of memory
            pass
        per_upload, per_version, references = [], [], []
        for _ in range(repeats):
            plain: list[float] = []
            versions: list[float] = []
            pure: list[float] = []
            while len(plain) < calls * BUFFER and len(versions) < calls:
                pure.append(reference())
                seconds, made = server.timed_upload()
                (versions if made else plain).append(seconds)
            if plain:
                per_upload.append(float(np.median(plain)))
            per_version.append(float(np.median(versions)) if versions else float("nan"))
            references.append(float(np.median(pure)))
        found[method] = {
            "upload": Spread.of(per_upload) if per_upload else None,
            "version": Spread.of(per_version),
            "reference": Spread.of(references),
            "ratio": paired_ratio(per_upload, references) if per_upload else None,
        }
        del server
    return found


def memory_factor(size: int) -> float:
    """Return FedPSA's peak memory over a buffer's worth of uploads, in multiples of 4 d bytes.

    The version in flight (its vector and the record that was sent) and the upload that the
    transport holds are there before, and not counted.
    """
    server = Server("fedpsa", size)
    while not server.timed_upload()[1]:
        pass

    def fill_buffer() -> None:
        while not server.timed_upload()[1]:
            pass

    return peak_memory(fill_buffer) / (4 * size)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parser("benchmarks.server", __doc__ or "")
    options.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parsed = options.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    sizes = [int(size) for size in parsed.sizes]
    report = Report(
        "server",
        "The server's cost per upload and per version",
        "python -m benchmarks.server --sizes "
        + " ".join(f"{size:g}" for size in sizes)
        + ("" if parsed.methods == list(METHODS) else f" --methods {' '.join(parsed.methods)}"),
    )
    report.text(
        f"Time of `aggregate_train` with one reply: bytes to numbers, all checks, κ, norm, buffer; "
        f"with the last of {BUFFER} uploads also the new version and the record that is sent. The "
        "sketch of the global model, measured in `sketch.md`, is left out. Processor time of "
        "one thread. The limit is a NumPy dot product and a copy of the same vector, kept as the "
        "update has to be, in turn with the uploads, for d from 10⁶ on: below, what every message "
        "takes whatever its size is many times that. Median of the repeats, range in brackets."
    )
    rows, data = [], {}
    for size in sizes:
        data[size] = found = measure_size(size, parsed.methods, parsed.repeats)
        for method, times in found.items():
            upload, ratio = times["upload"], times["ratio"]
            rows.append(
                [
                    f"{size:.0e}",
                    method,
                    upload.show(1e3) if upload else "every upload makes a version",
                    times["reference"].show(1e3),
                    ratio.show() if ratio else "",
                    times["version"].show(1e3),
                ]
            )
    report.table(
        "Milliseconds",
        ["d", "rule", "upload", "dot + copy", "ratio", "upload that makes a version"],
        rows,
    )
    report.data("times", data)
    report.data("buffer", BUFFER)
    for size in sizes:
        if size >= 10**6 and "fedpsa" in data[size]:
            report.target(
                f"FedPSA, d = {size:.0e}: upload / (dot + copy)",
                data[size]["fedpsa"]["ratio"].median,
                2.0,
            )
    largest = max(size for size in sizes)
    factor = memory_factor(largest)
    report.data("memory_factor", {"size": largest, "vectors": factor})
    report.target(
        f"FedPSA's memory for a full buffer, d = {largest:.0e}, in vectors of "
        f"{with_unit(4 * largest)}",
        factor,
        BUFFER + 2,
    )
    print(report.write(parsed.out).read_text())


if __name__ == "__main__":
    main()
