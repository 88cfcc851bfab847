"""Updates in 8 and 4 bits: unbiased, repeatable, and not what a hostile client wants."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedpsa_strategy import FedBuff, FedPSA, Probe, make_reply
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.probe.state_dicts import arrays_of, load_arrays
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.options import Training
from fedpsa_strategy.wire.contract import DELTA, MARK, REPLY_ARRAYS
from fedpsa_strategy.wire.layout import Layout
from fedpsa_strategy.wire.quantise import BITS, BLOCK, pack, packed_size, unpack
from fedpsa_strategy.wire.replies import read_train_reply
from support.clients import model, trained_reply
from support.grids import ScriptedGrid
from support.runs import Killed, Recorder, run, virtual

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
EXPECTED_8 = "81838487898b8c8f91939496989a9c9ea0a2a4a6a8aaacaeb0b2b4b6b8babcbd"
EXPECTED_4 = "99a99a9aa9aababaabbbbbccbccccccdcccddddddddeeeeeeeffffffffff0000"

bits = pytest.mark.parametrize("bits", BITS.values())
formats = pytest.mark.parametrize("update_dtype", BITS)


def there_and_back(values, bits, seed=0):
    out = np.empty(values.size, np.float32)
    unpack(pack(values, bits, seed), bits, out, "w")
    return out


def scale_of_each(values, bits):
    """The largest of each number's block, over the number of levels; in double precision."""
    values = np.abs(values.astype(np.float64))
    blocks = [values[i : i + BLOCK] for i in range(0, len(values), BLOCK)]
    largest = [np.full(len(block), block.max()) for block in blocks]
    return np.concatenate([np.empty(0), *largest]) / (2 ** (bits - 1) - 1)


@bits
@given(
    values=npst.arrays(
        np.float32,
        st.integers(0, 400),
        elements=FLOATS,
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_number_is_off_by_more_than_a_level(bits, values, seed):
    packed = pack(values, bits, seed)
    assert packed.dtype == np.uint8
    assert packed.size == packed_size(values.size, bits)
    np.testing.assert_array_equal(packed, pack(values.astype(np.float64), bits, seed))
    error = np.abs(there_and_back(values, bits, seed) - values.astype(np.float64))
    # A level, and what float32 rounds; the smallest normal number for scales that underflow.
    assert (error <= scale_of_each(values, bits) * 1.0001 + 2.0**-126).all()


@bits
def test_the_rounding_is_unbiased(bits):
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    tries = 400
    mean = np.mean([there_and_back(values, bits, seed) for seed in range(tries)], axis=0)
    # A number between two levels has a standard deviation of half a level at most.
    deviations = (mean - values) / (scale_of_each(values, bits) / 2 / np.sqrt(tries))
    assert np.abs(deviations).max() < 5
    assert abs(deviations.mean()) < 5 / np.sqrt(len(values))


@bits
def test_the_same_seed_gives_the_same_bits_and_another_one_others(bits):
    values = np.random.default_rng(2).normal(size=100_000).astype(np.float32)
    np.testing.assert_array_equal(pack(values, bits, 5), pack(values, bits, 5))
    assert (pack(values, bits, 5) != pack(values, bits, 6)).any()
    np.testing.assert_array_equal(there_and_back(np.zeros(300, np.float32), bits), np.zeros(300))


def test_the_bits_are_those_of_every_machine():
    values = np.linspace(-1, 1, 131, dtype=np.float32)
    assert pack(values, 8, 7)[8:40].tobytes().hex() == EXPECTED_8
    assert pack(values, 4, 7)[8:40].tobytes().hex() == EXPECTED_4


@bits
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bits, bad):
    values = np.ones(300, np.float32)
    values[200] = bad
    out = there_and_back(values, bits)
    assert not np.isfinite(out[128:256]).any()
    np.testing.assert_array_equal(out[:128], values[:128])


# --- From a client to the server ---------------------------------------------------------------


def train_message(arrays, **config):
    config = ConfigRecord({REPLY_ARRAYS: DELTA, "seed": 3, **config})
    content = RecordDict({"arrays": arrays, "config": config})
    message = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "m1"
    return message


def a_reply(update_dtype, width=100):
    torch.manual_seed(0)
    before, after = torch.nn.Linear(width, 50), torch.nn.Linear(width, 50)
    arrays = ArrayRecord(before.state_dict())
    layout = Layout(arrays)
    exact = layout.read(ArrayRecord(after.state_dict()))[0] - layout.read(arrays)[0]
    message = train_message(arrays, **{"update-dtype": update_dtype})
    return layout, layout.read(arrays), exact, make_reply(message, after, num_examples=3)


@formats
def test_the_server_reads_the_levels_and_counts_their_bytes(update_dtype):
    layout, start, exact, reply = a_reply(update_dtype)
    read = read_train_reply(reply, layout, start, update_dtype=update_dtype)
    relative = np.linalg.norm(read.delta - exact) / np.linalg.norm(exact)
    assert 0 < relative < {"int8": 0.01, "int4": 0.15}[update_dtype]
    per_number = {"int8": 1.04, "int4": 0.54}[update_dtype]
    overhead = 2 * 128 + 200  # NumPy's headers, metrics and the mark
    assert read.num_bytes < per_number * layout.size + overhead


def hostile(change):
    def of(reply, key="weight"):
        packed = reply.content["arrays"][key].numpy().copy()
        reply.content["arrays"][key] = Array(change(packed))
        del reply.content[MARK]["checksum"]
        return reply

    return of


@pytest.mark.parametrize(
    ("update_dtype", "change", "reason"),
    [
        ("int8", lambda p: p[:-1], r"arrays\['weight'\] has shape"),
        ("int4", lambda p: np.append(p, p[:1]), "has shape"),
        ("int8", lambda p: p.view(np.int8), "has dtype int8, not uint8"),
        ("int8", lambda p: put(p, np.float32(np.nan)), "contain NaN, Inf"),
        ("int8", lambda p: put(p, np.float32(np.inf)), "contain NaN, Inf"),
        ("int4", lambda p: put(p, np.float32(3e38)), "contain NaN, Inf"),
        ("int4", lambda p: put(p, np.float32(-1.0)), "has a scale below 0"),
        ("int8", lambda p: last(p, 0x80), "holds the level -128: they go from -127 to 127"),
        ("int4", lambda p: last(p, 0x80), "holds the level -8: they go from -7 to 7"),
    ],
)
def test_a_hostile_reply_is_refused(update_dtype, change, reason):
    layout, start, _, reply = a_reply(update_dtype)
    with pytest.raises(InvalidReplyError, match=reason):
        read_train_reply(hostile(change)(reply), layout, start, update_dtype=update_dtype)


def test_a_half_byte_too_many_must_be_0():
    _, _, _, reply = a_reply("int4", width=1)  # a bias and weights of 50
    for key in ("weight", "bias"):
        assert len(reply.content["arrays"][key].numpy()) == 4 + 25
    odd = np.empty(3, np.float32)
    packed = pack(np.ones(3), 4, 0)
    packed[-1] |= 0x10
    with pytest.raises(InvalidReplyError, match="half byte"):
        unpack(packed, 4, odd, "arrays['w']")


def put(packed, scale):
    packed[:4] = np.frombuffer(scale.tobytes(), np.uint8)
    return packed


def last(packed, byte):
    packed[-1] = byte
    return packed


@given(data=st.binary(min_size=packed_size(300, 4), max_size=packed_size(300, 4)))
def test_whatever_the_bytes_they_are_numbers_or_refused(data):
    out = np.empty(300, np.float32)
    try:
        unpack(np.frombuffer(data, np.uint8), 4, out, "w")
    except InvalidReplyError:
        return
    assert out.shape == (300,)


# --- In a run ----------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_formats_pass_audits_too(dtype, update_dtype):
    def made():
        return model().to(dtype)

    def behaviour(message):
        local = made()
        load_arrays(local, message.content["arrays"])
        torch.manual_seed(message.content["config"]["seed"] % 2**32)
        with torch.no_grad():
            for parameter in local.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        return make_reply(message, local, num_examples=8).content

    probe = Probe.gaussian(made(), (5,), num_classes=3, size=16)
    recorder = Recorder()
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(made()),
        buffer_size=2,
        max_in_flight=2,
        audit_fraction=1.0,
        audit_tolerance=1e-6,
        training=Training(update_dtype=update_dtype),
        listeners=[recorder],
        **virtual(4),
    )
    grid = ScriptedGrid(4, behaviour)
    run(strategy, grid, num_versions=3, arrays=arrays_of(made()), config=probe.config())
    assert len(recorder.of("upload")) == 6
    assert not recorder.of("reject")


@formats
def test_a_resumed_run_ends_in_the_same_bits(update_dtype, tmp_path):
    def go(store=None, resume=None, die_after=10**9):
        answered = []

        def behaviour(message):
            answered.append(message)
            if len(answered) > die_after:
                raise Killed
            return trained_reply(message).content

        strategy = FedBuff(
            buffer_size=2,
            max_in_flight=3,
            training=Training(update_dtype=update_dtype),
            checkpointer=Checkpointer(store, every_versions=1, resume_from=resume),
            **virtual(5),
        )
        arrays = ArrayRecord(model().state_dict())
        result = run(strategy, ScriptedGrid(5, behaviour), num_versions=6, arrays=arrays)
        return {key: array.data for key, array in result.arrays.items()}

    store = CheckpointStore(tmp_path)
    with pytest.raises(Killed):
        go(store, die_after=8)
    assert go(resume=store.load_newest()) == go()
