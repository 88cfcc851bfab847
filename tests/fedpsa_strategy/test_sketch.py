import math
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpsa_strategy.probe.sketch import Sketch
from support.programs import printed_by

SEEDS = st.integers(0, 2**64 - 1)


def normals(size, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def philox_words(seed, group, count):
    """Philox 4x64-10 in plain Python (Salmon et al. 2011); NumPy counts before each step."""
    mask = 2**64 - 1
    words = []
    for counter in range(1, -(-count // 16) + 1):
        state, key = [counter, 0, 0, 0], [seed, group]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * state[0], 0xCA5A826395121157 * state[2]
            state = [
                (second >> 64) ^ state[1] ^ key[0],
                second & mask,
                (first >> 64) ^ state[3] ^ key[1],
                first & mask,
            ]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        words += [number >> shift & 0xFFFF for number in state for shift in (0, 16, 32, 48)]
    return np.array(words[:count])


@given(seed=SEEDS, size=st.integers(1, 100), dim=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_signs_are_the_bits_of_philox(seed, size, dim):
    columns = Sketch(size, dim, seed).columns(0, size)
    for row in range(dim):
        bits = philox_words(seed, row // 16, size) >> (row % 16) & 1
        assert np.array_equal(columns[row] < 0, bits == 1)


def test_golden_signs_and_values():
    # Recorded once: nodes with another generator, or a changed one, must not go unnoticed.
    columns = Sketch(1000, 16, 0).columns(0, 1000)
    words = ((columns < 0) * 2 ** np.arange(16)[:, None]).sum(0)
    assert words[:8].tolist() == [55451, 2276, 47716, 756, 50610, 40104, 11019, 15830]
    assert words[-4:].tolist() == [38333, 25158, 24737, 63465]
    sketch = Sketch(1000, 4, 7)(np.arange(1000.0))
    assert (sketch * 2).tolist() == [6316.0, 730.0, 30340.0, 4296.0]
    assert Sketch(1000, 16, 0).fingerprint == "7d58554e4121738eb9ecbb24e93b548b"


@given(seed=SEEDS, size=st.integers(1, 3000), dim=st.integers(1, 33), data=st.data())
@settings(max_examples=40, deadline=None)
def test_block_size_changes_no_bit(seed, size, dim, data):
    block = data.draw(st.integers(max(1, size // 50), size + 20))
    vector = normals(size, seed % 1000, np.float32) ** 3
    whole = Sketch(size, dim, seed)
    parts = Sketch(size, dim, seed, block=block)
    assert whole(vector).tobytes() == parts(vector).tobytes()
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    expected = whole.columns(0, size)[:, start:stop]
    assert np.array_equal(parts.columns(start, stop), expected)


def test_block_boundary_at_full_size():
    vector = normals(300_001, 3)
    results = {Sketch(len(vector), block=block)(vector).tobytes() for block in (4099, 2**17, 2**20)}
    assert len(results) == 1


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@given(seed=SEEDS, size=st.integers(1, 5000), dim=st.integers(1, 70))
@settings(max_examples=25, deadline=None)
def test_sketch_is_the_matrix_product(kind, seed, size, dim):
    sketch = Sketch(size, dim, seed, kind)
    vector = normals(size, seed % 1000)
    columns = sketch.columns(0, size)
    product = columns @ vector
    scale = np.linalg.norm(vector) * math.sqrt(size / dim)
    assert sketch(vector).shape == (dim,)
    assert np.abs(sketch(vector) - product).max() <= 1e-9 * scale
    assert np.array_equal(
        np.abs(columns) == 1 / math.sqrt(dim), np.full((dim, size), kind == "rademacher")
    )


def test_gaussian_columns_do_not_depend_on_the_range_or_the_size():
    whole = Sketch(6000, 5, 1, "gaussian").columns(0, 6000)
    assert np.array_equal(Sketch(6000, 5, 1, "gaussian").columns(1999, 4500), whole[:, 1999:4500])
    assert np.array_equal(Sketch(3000, 5, 1, "gaussian").columns(0, 3000), whole[:, :3000])


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_entries_have_mean_zero_variance_one_over_k_and_are_uncorrelated(kind):
    size, dim = 40_000, 24
    entries = Sketch(size, dim, 5, kind).columns(0, size) * math.sqrt(dim)
    other_seed = Sketch(size, dim, 6, kind).columns(0, size) * math.sqrt(dim)
    # Averages of n independent terms of variance 1 (2 for a squared normal number) have a standard
    # deviation of 1/√n; with five of them, one of ~600 averages fails once in 3000 seeds.
    bound = 5 / math.sqrt(size)
    assert np.abs(entries.mean(1)).max() < bound
    assert np.abs((entries**2).mean(1) - 1).max() < bound * math.sqrt(2)
    gram = entries @ entries.T / size
    assert np.abs(gram - np.diag(np.diag(gram))).max() < bound
    for lag in (1, 2, 4, 16):
        shifted = entries[:, :-lag] @ entries[:, lag:].T / (size - lag)
        assert np.abs(shifted).max() < bound * 1.01
    assert np.abs(entries @ other_seed.T / size).max() < bound


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("cosine", [-0.9, 0.0, 0.5, 0.95])
def test_cosine_is_kept_within_the_johnson_lindenstrauss_error(kind, cosine):
    # Row j of R gives one pair (x_j, y_j) of mean 0 and correlation ρ, nearly normal as a sum of
    # 2000 terms. The cosine of the sketches is the correlation of k such pairs, whose standard
    # deviation is (1 - ρ²)/√k, and whose bias is below 1/k. Five deviations: one seed in 10^6.
    first, noise = normals((2, 2000), 1)
    first /= np.linalg.norm(first)
    noise -= first * (first @ noise)
    second = cosine * first + math.sqrt(1 - cosine**2) * noise / np.linalg.norm(noise)
    for dim in (64, 1024):
        sketch = Sketch(2000, dim, 2, kind)
        x, y = sketch(first), sketch(second)
        estimate = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        assert abs(estimate - cosine) < 5 * (1 - cosine**2) / math.sqrt(dim) + 1 / dim
        assert abs(np.linalg.norm(x) - 1) < 5 / math.sqrt(2 * dim) + 1 / dim


SCRIPT = """
import numpy as np, torch
from fedpsa_strategy.probe.sketch import Sketch
vector = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
for kind, dim in (("rademacher", 40), ("gaussian", 3)):
    print(Sketch(len(vector), dim, 1, kind)(vector).tobytes().hex())
    print(Sketch(len(vector), dim, 1, kind)(torch.from_numpy(vector)).tobytes().hex())
print(torch.get_num_threads())
"""


def test_number_of_threads_changes_no_bit(one_thread, capsys):
    there = printed_by(SCRIPT, OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    exec(SCRIPT, {})
    one, two = (text.split() for text in (capsys.readouterr().out, there))
    assert (one.pop(), two.pop()) == ("1", "2")
    assert one == two
    assert one[0] == one[1] != one[2] == one[3]


@pytest.mark.parametrize(("size", "dim"), [(10_000_000, 16), (100_000, 1024)])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_memory_is_bounded(size, dim, kind):
    if kind == "gaussian":
        size //= 20  # the memory is that of one block, and normal numbers are slow
    vector = np.ones(size, dtype=np.float32)
    tracemalloc.start()
    try:
        Sketch(size, dim, kind=kind, block=2**20)(vector)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_tensors_of_any_precision(dtype, kind):
    tensor = torch.from_numpy(normals(5000)).to(dtype).requires_grad_()
    sketch = Sketch(5000, kind=kind, block=1000)
    assert np.array_equal(sketch(tensor), sketch(tensor.detach().double().numpy()))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_arrays_of_any_layout(kind):
    vector = normals(3000)
    sketch = Sketch(3000, kind=kind)
    expected = sketch(vector)
    assert np.array_equal(sketch(np.repeat(vector, 2)[::2]), expected)
    assert np.array_equal(sketch(vector.astype(">f8")), expected)
    longer = vector.astype(np.longdouble) / 3
    assert np.array_equal(sketch(longer), sketch(longer.astype(np.float64)))
    assert np.array_equal(sketch(vector.tolist()), expected)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_shows(kind, bad):
    vector = normals(100)
    vector[50] = bad
    vector[51] = -bad
    assert not np.isfinite(Sketch(100, kind=kind)(vector)).any()


def test_fingerprint_tells_apart_everything_but_the_block():
    sketches = [
        Sketch(1000),
        Sketch(1001),
        Sketch(1000, 17),
        Sketch(1000, 16, 1),
        Sketch(1000, 16, 0, "gaussian"),
    ]
    fingerprints = {sketch.fingerprint for sketch in sketches}
    assert len(fingerprints) == len(sketches)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in fingerprints)
    assert Sketch(1000, block=3).fingerprint == sketches[0].fingerprint
    assert Sketch(1000, block=3) == sketches[0] != sketches[1]
    assert pickle.loads(pickle.dumps(sketches[0])) == sketches[0]


@pytest.mark.parametrize("column", [0, 10**8 - 1])
def test_fingerprint_notices_another_generator_at_either_end(monkeypatch, column):
    genuine = Sketch(10**8).fingerprint
    columns = Sketch.columns

    def altered(self, start, stop):
        entries = columns(self, start, stop)
        if start <= column < stop:
            entries[3, column - start] *= -1
        return entries

    monkeypatch.setattr(Sketch, "columns", altered)
    assert Sketch(10**8).fingerprint != genuine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be from 1 .* not 0"),
        ({"size": 2.0}, r"size must be an integer, not 2\.0"),
        ({"dim": 0}, "dim must be from 1 to 1024, not 0"),
        ({"dim": 1025}, "dim must be from 1 to 1024, not 1025"),
        ({"dim": True}, "dim must be an integer, not True"),
        ({"seed": -1}, "seed must be from 0 .* not -1"),
        ({"seed": 2**64}, "seed must be from 0 .* not 18446744073709551616"),
        ({"kind": "sparse"}, "kind must be 'rademacher' or 'gaussian', not 'sparse'"),
        ({"block": 0}, "block must be from 1 .* not 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sketch(**{"size": 10} | arguments)


def test_numpy_integers_are_integers():
    assert (
        Sketch(np.int64(1000), np.int32(16), np.uint64(0)).fingerprint == Sketch(1000).fingerprint
    )


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (np.zeros(9), r"size=10 numbers, but its shape is \(9,\)"),
        (np.zeros((10, 1)), r"one-dimensional .* \(10, 1\)"),
        (torch.zeros(11), r"size=10 numbers, but its shape is \(11,\)"),
        (np.zeros(10, dtype=np.int64), "floating-point, but its dtype is int64"),
        (torch.zeros(10, dtype=torch.int64), r"floating-point, but its dtype is torch\.int64"),
        (np.zeros(10, dtype=complex), "floating-point, but its dtype is complex128"),
    ],
)
def test_wrong_vectors_are_explained(vector, message):
    with pytest.raises(ValueError, match=message):
        Sketch(10)(vector)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5), (0, 11)])
def test_wrong_ranges_of_columns_are_refused(start, stop):
    with pytest.raises(ValueError, match=r"start|stop"):
        Sketch(10).columns(start, stop)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_tensors_on_a_gpu(kind):
    tensor = torch.from_numpy(normals(5000, dtype=np.float32))
    sketch = Sketch(5000, kind=kind, block=1000)
    assert np.array_equal(sketch(tensor.cuda()), sketch(tensor))
