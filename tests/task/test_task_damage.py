"""Damaged files: every reader gives the right data or the project's own error, nothing else."""

import gzip
import pickle
import struct
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from task.cache import cached_arrays
from task.dataset_files import read_cifar_binary, read_cifar_pickle, read_idx
from task.datasets import dataset_info
from task.errors import DatasetFileError, ShardFileError
from task.shards import file_shard

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 6), dtype=np.uint8)
LABELS = RNG.integers(0, 10, 5)
QUICK = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damage(draw):
    """Return a function that flips, cuts, inserts or overwrites some bytes."""
    changes = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "cut", "insert", "overwrite"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(0, 7),
                st.binary(min_size=1, max_size=8),
            ),
            min_size=1,
            max_size=3,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, where, bit, more in changes:
            place = int(where * len(data))
            if kind == "flip" and data:
                flipped = bytes([data[place] ^ (1 << bit)])
                data = data[:place] + flipped + data[place + 1 :]
            elif kind == "cut":
                data = data[:place] if bit % 2 else data[:place] + data[place + len(more) :]
            elif kind == "insert":
                data = data[:place] + more + data[place:]
            elif kind == "overwrite":
                data = data[:place] + more + data[place + len(more) :]
        return data

    return apply


# --- The cache -----------------------------------------------------------------------------------


def make():
    return {"images": IMAGES, "labels": LABELS}


@QUICK
@given(change=damage(), name=st.sampled_from(["images.npy", "labels.npy", "manifest.json"]))
def test_the_cache_never_returns_anything_else(tmp_path, change, name):
    cached_arrays(tmp_path, "key", make)
    path = tmp_path / "key" / name
    path.write_bytes(change(path.read_bytes()))
    found = cached_arrays(tmp_path, "key", make)
    assert found.keys() == make().keys()
    for key, expected in make().items():
        assert found[key].dtype == expected.dtype
        assert np.array_equal(found[key], expected)


def test_flipped_bits_of_the_cache_are_noticed(tmp_path):
    cached_arrays(tmp_path, "key", make)
    path = tmp_path / "key" / "images.npy"
    whole = path.read_bytes()
    made = []
    for place in range(0, 8 * len(whole), 11):
        data = bytearray(path.read_bytes())
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        cached_arrays(tmp_path, "key", lambda: made.append(1) or make())
        assert path.read_bytes() == whole
    assert len(made) == len(range(0, 8 * len(whole), 11))


# --- A node's own file ---------------------------------------------------------------------------


@QUICK
@given(change=damage(), save=st.sampled_from([np.savez, np.savez_compressed]))
def test_a_damaged_npz_is_refused_or_right(tmp_path, change, save):
    path = tmp_path / "mine.npz"
    x = RNG.normal(size=(5, 1, 8, 8)).astype(np.float32)
    save(path, x=x, y=LABELS)
    path.write_bytes(change(path.read_bytes()))
    with suppress(ShardFileError):
        shard = file_shard(path, dataset_info("digits"))
        assert np.array_equal(shard.x.numpy(), x)
        assert np.array_equal(shard.y.numpy(), LABELS)


def npz_with(path: Path, header: bytes) -> Path:
    """Write an .npz whose checksums are right, with a header of its own in x."""
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", start + bytes(64))
        archive.writestr("y.npy", start + bytes(64))
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': (",
        b"{1: 2, 'a': 3}",
        b"-" * 3900 + b"1",
        b"{'descr': '<f4,,<', 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    ],
)
def test_headers_that_no_numpy_wrote_are_refused(tmp_path, header):
    path = npz_with(tmp_path / "mine.npz", header)
    with pytest.raises(ShardFileError, match=r"mine.npz: .*arrays x .* and y"):
        file_shard(path, dataset_info("digits"))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ShardFileError, match="not a file"):
        file_shard(tmp_path, dataset_info("digits"))


def test_an_encrypted_npz_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((2, 1, 8, 8), np.float32), y=np.zeros(2, np.int64))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            data[place + offset] |= 1
            place = data.find(signature, place + 1)
    path.write_bytes(data)
    with pytest.raises(ShardFileError, match=r"mine.npz: .*arrays x .*encrypted"):
        file_shard(path, dataset_info("digits"))


# --- Public datasets -----------------------------------------------------------------------------


def idx_bytes():
    return struct.pack(">IIII", 0x0803, 5, 2, 3) + IMAGES.tobytes()


def binary_bytes():
    return np.concatenate([LABELS[:, None].astype(np.uint8), IMAGES], axis=1).tobytes()


def pickle_bytes():
    return pickle.dumps({b"data": IMAGES, b"labels": LABELS.tolist()}, protocol=2)


READERS = {
    "idx": (idx_bytes(), partial(read_idx, dimensions=3)),
    "binary": (binary_bytes(), partial(read_cifar_binary, shape=(1, 2, 3), label_bytes=1)),
    "pickle": (pickle_bytes(), partial(read_cifar_pickle, shape=(1, 2, 3), label_key=b"labels")),
}


@pytest.mark.parametrize("reader", READERS)
@QUICK
@given(change=damage())
def test_damaged_dataset_files_are_refused_or_read(tmp_path, reader, change):
    data, read = READERS[reader]
    path = tmp_path / "file"
    path.write_bytes(change(data))
    with suppress(DatasetFileError):
        read(path)


@pytest.mark.parametrize("reader", ["idx", "binary"])
@QUICK
@given(change=damage())
def test_damaged_gzip_files_are_refused_or_right(tmp_path, reader, change):
    data, read = READERS[reader]
    path = tmp_path / "file.gz"
    path.write_bytes(change(gzip.compress(data, mtime=0)))
    with suppress(DatasetFileError):
        found, plain = read(path), tmp_path / "plain"
        plain.write_bytes(data)
        expected = read(plain)
        pairs = zip(found, expected, strict=True) if reader == "binary" else [(found, expected)]
        assert all(np.array_equal(one, other) for one, other in pairs)


def test_sizes_that_overflow_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(struct.pack(">IIII", 0x0803, 2**31, 2**31, 4))
    with pytest.raises(DatasetFileError, match="header promises"):
        read_idx(path, 3)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DatasetFileError, match=r"cannot be read \(Is a directory\)"):
        read_idx(tmp_path, 3)
