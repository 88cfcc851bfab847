"""Runs on the loop against a second, plain simulator: other code, the same formulas.

The plain one is told who was sent a task and whose reply counted, in which order and when. What
clients compute, what they start from and what the server makes of it, it works out by itself, with
whole arrays in double precision and every mean summed anew.
"""

from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedpsa_strategy import FedPSA, UniformLatency, WallClock
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.callbacks import NormGuard, StalenessLimit
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.options import Training
from fedpsa_strategy.server.strategies import strategy_of
from fedpsa_strategy.wire.contract import MARK, STATES, mark
from support.grids import Ending, ScriptedGrid, Stopped
from support.runs import Recorder, run, virtual

SIZE, STEPS, LR, DECAY = 5, 3, 0.2, 0.999
RNG = np.random.default_rng(7)
START = RNG.normal(size=SIZE)
OPTIMA = 2 * RNG.normal(size=(9, SIZE))  # of each client's quadratic
CURVATURE = RNG.uniform(0.2, 1.5, size=(9, SIZE))
PROJECTION = RNG.normal(size=(3, SIZE))
LIMIT, LONGEST = 3, 0.9


def trained(client, start, lr):
    end = start.copy()
    for _ in range(STEPS):
        end = end - lr * CURVATURE[client] * (end - OPTIMA[client])
    return end


def examples(client):
    return 10 + 3 * client


def state_after(client, state):
    return 0.75 * state + 0.25 * np.array([client, 1.0])


# --- The plain simulator -----------------------------------------------------------------------


class Plain:
    """One method's server; a subclass says when there is a version, and of what."""

    buffer_size = 3
    rounds = False

    def __init__(self, num_clients):
        self.x, self.state = START.copy(), np.zeros(2)
        self.n, self.version, self.versions = num_clients, 0, []
        self.kept, self.states = [], []
        self.last = {}  # every client's last update
        self.begin()

    def begin(self): ...

    def start_for(self, client):
        return self.x.copy()

    def upload(self, item):
        self.kept.append(item)
        self.states.append(item["state"])
        if not self.rounds and len(self.kept) >= self.buffer_size:
            self.aggregate()

    def aggregate(self):
        items, self.kept = self.kept, []
        states, self.states = self.states, []
        weights = self.make(items)
        new = (1 - sum(weights)) * self.state
        for weight, state in zip(weights, states, strict=True):
            new = new + weight * state
        self.make_version(new)

    def make_version(self, state):
        self.state = state
        self.version += 1
        self.versions.append((self.x.copy(), state.copy()))


class PlainFedBuff(Plain):
    def make(self, items):
        weights = [1 / np.sqrt(1 + item["tau"]) / len(items) for item in items]
        self.x = self.x + sum(w * item["delta"] for w, item in zip(weights, items, strict=True))
        return [w / sum(weights) for w in weights]


class PlainFedPSA(Plain):
    def begin(self):
        self.norms, self.reference = [], None

    def upload(self, item):
        a, b = PROJECTION @ (item["start"] + item["sent"]), PROJECTION @ self.x
        item["kappa"] = a @ b / np.sqrt((a @ a) * (b @ b))
        self.norms = [*self.norms, item["delta"] @ item["delta"]][-6:]
        if self.reference is None and len(self.norms) == 6:
            self.reference = np.mean(self.norms)
        super().upload(item)

    def make(self, items):
        weights = np.full(len(items), 1 / len(items))
        if self.reference is not None:
            temperature = np.mean(self.norms) / self.reference * 5 + 0.5
            weights = np.exp(np.array([item["kappa"] for item in items]) / temperature)
            weights = weights / weights.sum()
        self.x = self.x + sum(w * item["delta"] for w, item in zip(weights, items, strict=True))
        return list(weights)


class PlainCA2FL(Plain):
    def begin(self):
        self.h = np.zeros(SIZE)

    def make(self, items):
        self.x = self.x + self.direction(items)
        self.h = sum(self.last.values()) / self.n
        return [1 / len(items)] * len(items)

    def direction(self, items):
        residual = np.zeros(SIZE)
        for item in items:
            residual = residual + item["residual"]
        return self.h + residual / len(items)

    def upload(self, item):
        item["residual"] = item["delta"] - self.last.get(item["client"], 0)
        self.last[item["client"]] = item["delta"]
        super().upload(item)


class PlainMidpoint(PlainCA2FL):
    def begin(self):
        super().begin()
        self.taus, self.pairs, self.beta = [], [], 0.0
        self.m = np.zeros(SIZE)

    def start_for(self, client):
        return self.x - 0.5 * self.beta * self.last.get(client, 0)

    def upload(self, item):
        self.taus = [*self.taus, item["tau"]][-50:]
        h = self.last.get(item["client"], np.zeros(SIZE))
        if item["client"] in self.last:
            self.pairs = [*self.pairs, (item["delta"], h)][-50:]
        item["expected"] = self.beta * h
        super().upload(item)

    def make(self, items):
        step = 0.5 * min(1, 2 / (1 + np.mean(self.taus)))
        errors = [item["delta"] - item["expected"] for item in items]
        d = self.beta * self.h + sum(errors) / len(items)
        self.m = self.m + (d - self.m) / 8
        self.x = self.x + step * d + 0.4 * self.m
        self.h = sum(self.last.values()) / len(self.last)
        if self.pairs:
            fit = sum(delta @ h for delta, h in self.pairs) / sum(h @ h for _, h in self.pairs)
            self.beta = min(1.0, max(0.0, fit))
        return [1 / len(items)] * len(items)


class PlainFedAsync(Plain):
    buffer_size = 1

    def make(self, items):
        (item,) = items
        alpha = 0.6 / np.sqrt(1 + item["tau"])
        self.x = (1 - alpha) * self.x + alpha * (item["start"] + item["delta"])
        return [alpha]


class PlainFedFa(Plain):
    def upload(self, item):
        self.kept = [*self.kept, item][-self.buffer_size :]
        if len(self.kept) == self.buffer_size:
            self.x = np.mean([item["start"] + item["delta"] for item in self.kept], axis=0)
            self.make_version(np.mean([item["state"] for item in self.kept], axis=0))


class PlainFedAvg(Plain):
    rounds = True

    def make(self, items):
        total = sum(examples(item["client"]) for item in items)
        weights = [examples(item["client"]) / total for item in items]
        ends = [item["start"] + item["delta"] for item in items]
        self.x = sum(w * end for w, end in zip(weights, ends, strict=True))
        return weights


class PlainFADAS(Plain):
    def begin(self):
        self.first = self.second = self.largest = np.zeros(SIZE)

    def make(self, items):
        mean = np.mean([item["delta"] for item in items], axis=0)
        self.first = 0.9 * self.first + 0.1 * mean
        self.second = 0.99 * self.second + 0.01 * mean**2
        self.largest = np.maximum(self.largest, self.second)
        slowest = max(item["tau"] for item in items)
        rate = 0.4 if slowest <= 1 else min(0.4, 1 / slowest)
        self.x = self.x + rate * self.first / (np.sqrt(self.largest) + 1e-8)
        return [1 / len(items)] * len(items)


class PlainACE(Plain):
    buffer_size = 1

    def make(self, items):
        (item,) = items
        self.last[item["client"]] = item["delta"]
        self.x = self.x + 0.7 * sum(self.last.values()) / self.n
        return [1 / self.n]


class PlainACED(Plain):
    buffer_size = 1

    def make(self, items):
        (item,) = items
        self.last[item["client"]] = (self.version - item["tau"], item["delta"])
        young = {i: d for i, (then, d) in self.last.items() if self.version - then <= 2}
        if not young:
            return [0.0]
        self.x = self.x + 0.7 * sum(young.values()) / len(young)
        return [1 / len(young) if item["client"] in young else 0.0]


class PlainAREA(Plain):
    def upload(self, item):
        self.last[item["client"]] = item["start"] + item["delta"]
        super().upload(item)

    def make(self, items):
        everybody = [self.last.get(i, START) for i in range(self.n)]
        self.x = np.mean(everybody, axis=0)
        return [1 / max(self.n, len(items))] * len(items)


class PlainFedAC(Plain):
    def make(self, items):
        weights = []
        for item in items:
            moved, delta = self.x - item["start"], item["delta"]
            length = np.linalg.norm(moved) * np.linalg.norm(delta)
            weights.append(max(moved @ delta / length if length else 0.0, 0.1))
        weights = [w / sum(weights) for w in weights]
        self.x = self.x + sum(w * item["delta"] for w, item in zip(weights, items, strict=True))
        return weights


class PlainRescaled(Plain):
    def begin(self):
        self.times = []

    def upload(self, item):
        self.times.append(item["time"])
        super().upload(item)

    def make(self, items):
        weights = [item["time"] / np.mean(self.times) / len(items) for item in items]
        self.x = self.x + sum(w * item["delta"] for w, item in zip(weights, items, strict=True))
        return [w / sum(weights) for w in weights]


PLAIN = {
    "fedpsa": (PlainFedPSA, {"queue_size": 6}),
    "fedbuff": (PlainFedBuff, {}),
    "ca2fl": (PlainCA2FL, {}),
    "midpoint": (PlainMidpoint, {"server_lr": 0.5, "momentum": 0.4, "momentum_window": 8}),
    "fedasync": (PlainFedAsync, {}),
    "fedfa": (PlainFedFa, {}),
    "fedavg": (PlainFedAvg, {}),
    "fadas": (PlainFADAS, {"adaptive_lr": 0.4}),
    "ace": (PlainACE, {"server_lr": 0.7}),
    "aced": (PlainACED, {"server_lr": 0.7, "age_limit": 2}),
    "area": (PlainAREA, {}),
    "fedac": (PlainFedAC, {}),
    "rescaled": (PlainRescaled, {}),
}


def replayed(plain, recorder, *, limit=None, longest=None):
    """Go through what happened; return the plain simulator's versions."""
    tasks, in_flight, total = {}, 0, {"clients": set(), "most": 0}
    for event in recorder:
        if event.kind == "dispatch":
            lr = LR * DECAY**plain.version
            start = plain.start_for(event.client)
            tasks[event.sequence] = (start, plain.state, plain.version, lr, event.time)
            in_flight += 1
            total["clients"].add(event.client)
            total["most"] = max(total["most"], in_flight)
        elif event.kind in ("upload", "reject"):
            start, state, version, lr, made = tasks.pop(event.sequence)
            tau = plain.version - version
            assert (limit is not None and tau >= limit) == (event.kind == "reject")
            in_flight -= 1
            if event.kind == "upload":
                sent = trained(event.client, start, lr) - start
                length = np.linalg.norm(sent)
                scale = min(1.0, longest / length) if longest else 1.0
                total["clipped"] = total.get("clipped", 0) + (scale < 1)
                item = {
                    "client": event.client,
                    "start": start,
                    "sent": sent,
                    "delta": scale * sent,
                    "state": state_after(event.client, state),
                    "tau": tau,
                    "time": event.time - made,
                }
                plain.upload(item)
            else:
                total["rejected"] = total.get("rejected", 0) + 1
            if plain.rounds and not in_flight and plain.kept:
                plain.aggregate()
    return plain.versions, total


# --- The loop ----------------------------------------------------------------------------------


def went(method, own, nodes, *, callbacks=(), num_versions=25, grid_type=ScriptedGrid, **kw):
    """Run the method on the loop; return its versions and the events."""

    def behaviour(message):
        client = grid.partition(message)
        arrays = message.content["arrays"]
        start, state = arrays["w"].numpy(), arrays["running_mean"].numpy()
        end = trained(client, start, message.content["config"]["lr"])
        metrics = {"num-examples": examples(client), "sketch": (PROJECTION @ end).tolist()}
        states = ArrayRecord({"running_mean": Array(state_after(client, state))})
        return RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(end - start)}),
                STATES: states,
                "metrics": MetricRecord(metrics),
                MARK: ConfigRecord(mark()),
            }
        )

    grid = grid_type(nodes, behaviour)
    recorder, versions = Recorder(), {}
    kw = {"max_in_flight": max(1, 2 * nodes // 3), "seed": 3} | kw
    kw["training"] = Training(DECAY)
    common = {"listeners": [recorder], "callbacks": list(callbacks), **kw}
    if method == "fedpsa":
        strategy = FedPSA(
            sketch_fn=lambda arrays: (PROJECTION @ arrays["w"].numpy()).tolist(), **own, **common
        )
    else:
        strategy = strategy_of(METHODS[method])(**own, **common)

    def evaluate(version, arrays):
        versions[version] = (arrays["w"].numpy().copy(), arrays["running_mean"].numpy().copy())
        return MetricRecord({})

    arrays = ArrayRecord({"w": Array(START.copy()), "running_mean": Array(np.zeros(2))})
    run(
        strategy,
        grid,
        num_versions=num_versions,
        arrays=arrays,
        evaluate_fn=evaluate,
        config={"lr": LR},
    )
    return [versions[number] for number in sorted(versions) if number], recorder


def check(method, nodes, *, buffer_size=3, limit=None, longest=None, **kw):
    kind, own = PLAIN[method]
    own = dict(own)
    if "buffer-size" in METHODS[method].setting_keys():
        own["buffer_size"] = buffer_size
        kind = type(kind.__name__, (kind,), {"buffer_size": buffer_size})
    if "clock" not in kw:
        kw = virtual(nodes, UniformLatency(low=5, high=60, seed=4)) | kw
    callbacks = [] if limit is None else [StalenessLimit(limit)]
    callbacks += [] if longest is None else [NormGuard(longest, action="clip")]
    made, recorder = went(method, own, nodes, callbacks=callbacks, **kw)
    expected, total = replayed(kind(nodes), recorder, limit=limit, longest=longest)
    assert len(made) == len(expected) >= 5
    for (model, state), (other, other_state) in zip(made, expected, strict=True):
        np.testing.assert_allclose(model, other, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(state, other_state, rtol=1e-9, atol=1e-10)
    return total


def test_all_methods_but_fedpac_are_here():
    assert {*PLAIN, "fedpac"} == set(METHODS)


@pytest.mark.parametrize("method", PLAIN)
def test_every_version_is_the_plain_simulators(method):
    check(method, 9)


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("num_clients", [1, 2])
def test_with_hardly_any_clients_who_upload_again_and_again_within_a_buffer(method, num_clients):
    check(method, num_clients, buffer_size=4)


@pytest.mark.parametrize("method", PLAIN)
def test_with_a_buffer_of_one(method):
    check(method, 6, buffer_size=1)


@pytest.mark.parametrize("method", PLAIN)
def test_with_a_limit_on_staleness(method):
    total = check(method, 9, buffer_size=2, limit=LIMIT)
    assert total.get("rejected", 0) > 0 or METHODS[method].rounds


@pytest.mark.parametrize("method", PLAIN)
def test_with_clipped_updates(method):
    assert check(method, 9, longest=LONGEST)["clipped"] > 5


# --- Real time ---------------------------------------------------------------------------------


class Uneven(ScriptedGrid):
    """Nodes answer sooner or later; one more joins on the way."""

    def __init__(self, num_nodes, behaviour):
        super().__init__(num_nodes - 1, behaviour, delay=self.soon_or_late)
        self.late = max(self.nodes) + 1

    def soon_or_late(self, message):
        seed = message.content["config"].get("seed", 0) if "config" in message.content else 0
        return 0.5 + seed % 7

    def get_node_ids(self):
        if self.time.now > 4 and self.late not in self.nodes:
            self.nodes.append(self.late)
        return super().get_node_ids()


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("queued", [0, 2])
def test_in_real_time_with_tasks_that_wait_and_a_client_that_joins_late(method, queued):
    more = {"max_in_flight": 9, "queued_per_node": queued, "min_available_nodes": 4}
    made = check(method, 6, clock=WallClock(), num_clients=6, grid_type=Uneven, **more)
    assert 5 in made["clients"]
    assert (made["most"] > 6) == (queued > 0 and not METHODS[method].rounds)


# --- Interruptions -----------------------------------------------------------------------------


PLACES = [(name, "ram") for name in PLAIN] + [
    (name, memory)
    for name in PLAIN
    for memory in ("half", "file")
    if METHODS[name].remembers_clients
]


@pytest.mark.parametrize(("method", "memory"), PLACES)
def test_resumed_from_any_moment_it_ends_in_the_same_bits(tmp_path, method, memory):
    _, own = PLAIN[method]
    if METHODS[method].remembers_clients:
        own = own | {"memory": memory}
    if method == "midpoint":
        own = own | {"shift_grows": True}

    def go(pulls=None, **checkpointer):
        path = tmp_path / f"memory-{pulls}" if memory == "file" else None
        place = {} if path is None else {"memory_path": path}
        return went(
            method,
            own,
            6,
            callbacks=[StalenessLimit(LIMIT), NormGuard(ratio=1.1, action="clip")],
            grid_type=partial(Ending, pulls=pulls),
            checkpointer=Checkpointer(**checkpointer),
            num_versions=12,
            **virtual(6, UniformLatency(low=5, high=60, seed=4)),
            **place,
        )[0]

    whole = go()
    for pulls in (2, 9, 20):
        store = CheckpointStore(tmp_path / str(pulls))
        with pytest.raises(Stopped):
            go(pulls, store=store)
        rest = go(resume_from=store.load_newest())
        assert rest
        for (model, state), (other, other_state) in zip(rest[::-1], whole[::-1], strict=False):
            assert (model.tobytes(), state.tobytes()) == (other.tobytes(), other_state.tobytes())
