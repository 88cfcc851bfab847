"""Updates in 8 and 4 bits: unbiased, repeatable, and not what a hostile client wants."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedpsa_strategy import make_reply
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.wire.contract import DELTA, MARK, REPLY_ARRAYS
from fedpsa_strategy.wire.layout import Layout
from fedpsa_strategy.wire.quantise import BITS, BLOCK, pack, packed_size, unpack
from fedpsa_strategy.wire.replies import read_train_reply
from support.messages import train_message

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


def a_reply(update_dtype, width=100):
    torch.manual_seed(0)
    before, after = torch.nn.Linear(width, 50), torch.nn.Linear(width, 50)
    arrays = ArrayRecord(before.state_dict())
    layout = Layout(arrays)
    exact = layout.read(ArrayRecord(after.state_dict()))[0] - layout.read(arrays)[0]
    config = {REPLY_ARRAYS: DELTA, "seed": 3, "update-dtype": update_dtype}
    message = train_message(arrays, config)
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
