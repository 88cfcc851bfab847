"""Generated replies of every wrong kind, through the public interface: no run ends, nothing counts.

Honest updates are all ones, so that the model after V versions is V in every entry for rules whose
weights sum to one: whatever else had counted would show.
"""

import json
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MessageType, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedpsa_strategy import (
    CA2FL,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFa,
    FedPSA,
    Midpoint,
    UniformLatency,
    VirtualClock,
)
from fedpsa_strategy.seeds import derive
from fedpsa_strategy.server.callbacks import NormGuard
from fedpsa_strategy.server.checkpoint import pack
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.snapshot import take_snapshot
from fedpsa_strategy.wire.contract import MARK, STATES, mark
from support.grids import DecodingGrid, Unreadable

HONEST, HOSTILE, VERSIONS = 3, 7, 12
SHAPES = {"layer.weight": (2, 3), "layer.bias": (3,), "scale": ()}
COUNT = "steps"  # an integer buffer


def honest(message, *, whole):
    """Return an honest reply: an update of ones, or the whole model with ones added."""
    metrics = MetricRecord({"num-examples": 10, "train-loss": 0.5, "sketch": [1.0, 0.5]})
    count = {COUNT: Array(np.asarray(7))}
    if whole:
        sent = message.content["arrays"]
        trained = {key: Array(np.asarray(sent[key].numpy() + 1, np.float32)) for key in SHAPES}
        return RecordDict({"arrays": ArrayRecord(trained | count), "metrics": metrics})
    deltas = {key: Array(np.ones(shape, np.float32)) for key, shape in SHAPES.items()}
    return RecordDict(
        {
            "arrays": ArrayRecord(deltas),
            STATES: ArrayRecord(count),
            "metrics": metrics,
            MARK: ConfigRecord(mark()),
        }
    )


def home(reply, key):
    """Return the record that an array is in."""
    return reply["arrays"] if key in reply["arrays"] else reply[STATES]


# --- What hostile clients do: each takes an honest reply and returns what is sent instead ---------

texts = st.text(max_size=8) | st.sampled_from(["\x1b[2J", "a\nb", "\u202e", "x" * 5000, "\x00"])
keys = st.sampled_from([*SHAPES, COUNT])
odd_numbers = st.sampled_from([math.nan, math.inf, -math.inf, 1e12, -1e17, 1e30, 3.4e38])
odd_bytes = st.binary(max_size=200) | st.sampled_from(
    [
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        for text in (b"{'descr': (", b"{1: 2, 'a': 3}", b"-" * 3900 + b"1", b"[" * 3000, b"\xff")
    ]
)
DTYPES = ["float64", "float16", "int32", "uint8", "bool", "complex64", "object", "<f4,,<", ""]


def changed(reply, key, **values):
    """Replace parts of an array as it travels."""
    old = home(reply, key)[key]
    parts = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data}
    home(reply, key)[key] = Array(**(parts | values))
    return reply


def with_metric(reply, name, value):
    reply["metrics"][name] = value
    return reply


def without(reply, record, key):
    if key is None:
        del reply[record]
    else:
        del reply[record][key]
    return reply


def extra(reply, name, record):
    reply[name] = record
    return reply


def flipped(data, position, bit):
    position %= min(len(data), 128)  # the header: in the data it would be another update
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def with_value(reply, key, value):
    values = reply["arrays"][key].numpy().copy()
    values[...] = value
    reply["arrays"][key] = Array(values)
    return reply


def transposed(reply, key):
    """Send an array whose numbers lie in the other order, as a transposed view's do."""
    reply["arrays"][key] = Array(np.asfortranarray(reply["arrays"][key].numpy()))
    return reply


floats = st.sampled_from(list(SHAPES))
bad_numbers = st.sampled_from([0, -1, -0.5, math.nan, math.inf, 1e300, 10**30, 10**400, [10]])
MALFORMED = st.one_of(
    # Records.
    st.sampled_from(["arrays", "metrics"]).map(lambda name: lambda r: without(r, name, None)),
    st.just(lambda r: RecordDict()),
    st.just(lambda r: extra(r, "arrays", ConfigRecord({"arrays": "none"}))),
    texts.filter(lambda name: name not in ("arrays", "metrics")).map(
        lambda name: lambda r: extra(r, name, MetricRecord({"num-examples": 1}))
    ),
    # Keys.
    keys.map(lambda key: lambda r: (home(r, key).pop(key), r)[1]),
    texts.map(lambda name: lambda r: (r["arrays"].update({name: Array(np.ones(2))}), r)[1]),
    st.just(lambda r: extra(r, "arrays", ArrayRecord())),
    (texts | st.integers()).map(
        lambda said: lambda r: extra(r, MARK, ConfigRecord({"arrays": said}))
    ),
    st.just(lambda r: extra(r, MARK, ConfigRecord())),
    st.just(lambda r: extra(r, MARK, ArrayRecord())),
    # Shapes, dtypes, bytes.
    st.tuples(keys, st.lists(st.integers(-5, 2**40), min_size=4, max_size=40)).map(
        lambda a: lambda r: changed(r, a[0], shape=tuple(a[1]))
    ),
    st.tuples(keys, st.sampled_from(DTYPES) | texts).map(
        lambda a: lambda r: changed(r, a[0], dtype=a[1])
    ),
    st.tuples(floats, st.sampled_from(["float64", "float16", "int32", "complex64"])).map(
        lambda a: (
            lambda r: (
                r["arrays"].update({a[0]: Array(np.ones(SHAPES[a[0]], a[1]))}),
                r,
            )[1]
        )
    ),
    st.tuples(keys, odd_bytes).map(lambda a: lambda r: changed(r, a[0], data=a[1])),
    st.tuples(keys, st.binary(min_size=1, max_size=9)).map(
        lambda a: lambda r: changed(r, a[0], data=home(r, a[0])[a[0]].data + a[1])
    ),
    st.tuples(keys, st.integers(1, 200)).map(
        lambda a: lambda r: changed(r, a[0], data=home(r, a[0])[a[0]].data[: -a[1]])
    ),
    st.tuples(keys, st.integers(0, 10**4), st.integers(0, 7)).map(
        lambda a: lambda r: changed(r, a[0], data=flipped(home(r, a[0])[a[0]].data, a[1], a[2]))
    ),
    # Values.
    st.tuples(floats, odd_numbers).map(lambda a: lambda r: with_value(r, a[0], a[1])),
    # Metrics.
    bad_numbers.map(lambda value: lambda r: with_metric(r, "num-examples", value)),
    st.just(lambda r: without(r, "metrics", "num-examples")),
    st.tuples(texts, st.sampled_from([math.nan, math.inf, [1.0, math.nan], 10**400])).map(
        lambda a: lambda r: with_metric(r, f"m{a[0]}", a[1])
    ),
    st.sampled_from(["\x1b", "a\nb", "x" * 129]).map(
        lambda name: lambda r: with_metric(r, name, 1.0)
    ),
    st.just(lambda r: with_metric(r, "long", [1.0] * 70_000)),
    st.integers(257, 600).map(
        lambda n: lambda r: (r["metrics"].update({f"m{i}": 1.0 for i in range(n)}), r)[1]
    ),
    # Errors, and what Flower cannot read.
    st.tuples(st.integers(-(2**31), 2**31 - 1), st.none() | st.text(max_size=2000)).map(
        lambda a: lambda r: Error(code=a[0], reason=a[1])
    ),
    st.just(lambda r: Unreadable()),
)
SKETCHES = st.sampled_from([[], [1.0], [1.0] * 3, 1.0, [10**30, 1], [1e155, 0.0], [1e308, 1e308]])
BAD_SKETCH = SKETCHES.map(lambda value: lambda r: with_metric(r, "sketch", value))

# What an honest client might do differently.
HARMLESS = st.one_of(
    st.just(lambda r: r),
    st.just(lambda r: with_metric(r, "more", [1, 2, 3])),
    st.just(lambda r: with_metric(r, "n" * 128, -1e300)),
    st.just(lambda r: extra(r, "config", ConfigRecord({"x": "\x1b", "y": [True], "z": b"\0"}))),
    st.just(lambda r: transposed(r, "layer.weight")),
    st.just(lambda r: extra(r, "arrays", ArrayRecord(dict(reversed(list(r["arrays"].items())))))),
)
# What happens to whole messages, or to replies on their way.
ON_THE_WAY = st.sampled_from(["", "", "", "twice", "foreign", "unknown", "another", "void"])


class HostileGrid(DecodingGrid):
    """The first nodes are honest; the others send what was generated, and then honest replies."""

    def __init__(self, script):
        super().__init__(HONEST + HOSTILE, self.answer, delay=0.0)
        self.script = script
        self.used = 0
        self.kinds: dict[int, str] = {}  # what was sent last, by the task's seed
        self.old = []

    def answer(self, message):
        if self.partition(message) < HONEST or self.used >= len(self.script):
            self.note(message, "honest")  # perhaps instead of a reply that was lost
            return honest(message, whole=self.partition(message) % 2 == 1)
        kind, change, _ = self.script[self.used]
        self.used += 1
        self.note(message, kind)
        return change(honest(message, whole=self.partition(message) % 2 == 1))

    def note(self, message, kind):
        if message.metadata.message_type == MessageType.TRAIN:
            self.kinds[message.content["config"]["seed"]] = kind

    def pull_messages(self, message_ids):
        before = self.used
        replies = list(super().pull_messages(message_ids))
        ways = [way for _, _, way in self.script[before : self.used]]
        sent = list(replies)
        for reply, way in zip(replies, ways, strict=False):
            metadata = reply.metadata.__dict__
            key = reply.metadata.reply_to_message_id
            if self.partition_of(reply.metadata.src_node_id) < HONEST:
                continue
            if way == "twice":
                sent.append(reply)
            elif way == "foreign" and reply.has_content():
                metadata["_src_node_id"] = self.nodes[0]
                self.note(self.known[key], "malformed")
            elif way == "unknown":
                metadata["_reply_to_message_id"] = "\x1b" * 1000
            elif way == "another" and self.pending:
                metadata["_reply_to_message_id"] = next(iter(self.pending))
            elif way == "void":
                reply.__dict__["_content"] = reply.__dict__["_error"] = None
                self.note(self.known[key], "malformed")
        sent += self.old[:3]  # replays of what was answered long ago
        self.old = [reply for reply in replies if reply.has_content()][-3:]
        return sent


METHODS = {
    "fedpsa": lambda **kw: FedPSA(
        sketch_fn=lambda arrays: [1.0, 0.5], buffer_size=3, queue_size=6, **kw
    ),
    "fedbuff": lambda **kw: FedBuff(
        buffer_size=2, staleness_exponent=0.0, callbacks=[NormGuard(ratio=5.0)], **kw
    ),
    "fedavg": lambda **kw: FedAvg(**kw),
    "fedasync": lambda **kw: FedAsync(**kw),
    "fedfa": lambda **kw: FedFa(**kw),
    "ca2fl": lambda **kw: CA2FL(**({"num_clients": HONEST + HOSTILE} | kw), buffer_size=3),
    "midpoint": lambda **kw: Midpoint(**({"num_clients": HONEST + HOSTILE} | kw), buffer_size=3),
}
WHOLE = ("fedpsa", "fedbuff", "fedavg")  # weights sum to one: the model is the version's number


def check(method, script, virtual):
    """Run a method among hostile clients; the run completes, and honest clients made its model."""
    grid = HostileGrid(script)
    events = []
    clock = {"clock": VirtualClock(UniformLatency(seed=1)), "num_clients": HONEST + HOSTILE}
    strategy = METHODS[method](
        max_in_flight=HONEST + HOSTILE,
        failures=Failures(max_failures=10**6),
        fraction_evaluate=0.3,
        min_available_nodes=HONEST + HOSTILE,
        listeners=[events.append],
        **(clock if virtual else {}),
    )
    start = {key: Array(np.zeros(shape, np.float32)) for key, shape in SHAPES.items()}
    start[COUNT] = Array(np.asarray(0))
    result = strategy.start(grid, ArrayRecord(start), num_rounds=VERSIONS, timeout=5.0)
    assert strategy.state.version == VERSIONS
    uploads = [event for event in events if event.kind == "upload"]
    assert len(uploads) == strategy.state.uploads
    sent = [grid.kinds.get(derive(0, "task", event.sequence), "honest") for event in uploads]
    assert "honest" in sent
    assert "malformed" not in sent
    for key in SHAPES:
        values = result.arrays[key].numpy()
        assert np.isfinite(values).all()
        if method in WHOLE:
            np.testing.assert_allclose(values, VERSIONS, rtol=1e-5)
        else:
            assert (values > 0).all()
            assert (values <= 2 * VERSIONS).all()
    assert result.arrays[COUNT].numpy() == 7
    for event in events:
        line = json.dumps(event.to_dict())
        assert len(line) < 20_000
        if event.kind == "reject":
            assert event.reason.isprintable()
    assert len(pack(take_snapshot(strategy.state, strategy.callbacks))) < 200_000
    assert grid.used >= 40, "too few of the generated replies were sent"


malformed_replies = st.tuples(st.just("malformed"), MALFORMED, ON_THE_WAY)
harmless_replies = st.tuples(st.just("harmless"), HARMLESS, ON_THE_WAY)
scripts = st.lists(
    malformed_replies | malformed_replies | harmless_replies, min_size=60, max_size=90
)
sketch_scripts = st.lists(
    st.tuples(st.just("malformed"), BAD_SKETCH, ON_THE_WAY), min_size=60, max_size=90
)
quickly = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a script takes minutes
)
thoroughly = settings(quickly, max_examples=60)  # times twelve, of some 65 replies each


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("method", METHODS)
@quickly
@given(scripts)
def test_generated_replies_never_end_a_run(method, virtual, script):
    check(method, script, virtual)


@quickly
@given(sketch_scripts)
def test_generated_sketches_never_end_a_run(script):
    check("fedpsa", script, virtual=True)


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("method", METHODS)
@thoroughly
@given(scripts)
def test_many_more_generated_replies_never_end_a_run(method, virtual, script):
    check(method, script, virtual)
