"""Shards: what a client gets, from the cache or from its own file."""

import json
import os

import numpy as np
import pytest
import torch

from support.programs import printed_by
from task import shards
from task.cache import cached_arrays
from task.datasets import DATASETS, DatasetInfo, load_raw
from task.memory import RecentlyUsed
from task.shards import (
    Shard,
    ShardFileError,
    dataset_source,
    file_shard,
)
from task.tensors import normalised

DIGITS = DATASETS["digits"]


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch):
    monkeypatch.setattr(shards, "_recent", RecentlyUsed(2**28))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def rows(shard):
    return {row.tobytes() for row in shard.x.numpy()}


def test_clients_and_test_set_cover_the_dataset_once(cache_dir):
    images, labels = load_raw("digits")
    clients = [dataset_source("digits", cache_dir=cache_dir).client(i, 7) for i in range(7)]
    test = dataset_source("digits", cache_dir=cache_dir).test()
    assert len(test) == 180
    assert {len(client) for client in clients} == {(1797 - 180) // 7}
    for shard in (*clients, test):
        assert shard.x.dtype == torch.float32
        assert shard.x.is_contiguous()
        assert shard.x.shape == (len(shard), 1, 8, 8)
        assert shard.y.dtype == torch.int64
        assert shard.y.shape == (len(shard),)
    # Undo the normalisation: every image with its label is one of the dataset's, none used twice.
    pixels = torch.cat([shard.x for shard in (*clients, test)]) * DIGITS.std[0] + DIGITS.mean[0]
    seen = (pixels * 16).round().to(torch.uint8).numpy()
    seen_labels = torch.cat([shard.y for shard in (*clients, test)]).numpy()
    known = {(image.tobytes(), label) for image, label in zip(images, labels, strict=True)}
    used = [(image.tobytes(), label) for image, label in zip(seen, seen_labels, strict=True)]
    assert set(used) <= known
    assert len(known) == 1797
    assert len(set(used)) == len(used) == 7 * 231 + 180


def test_the_test_set_is_the_same_for_every_partition(cache_dir):
    test = rows(dataset_source("digits", seed=3, cache_dir=cache_dir).test())
    for kind, clients in (("iid", 3), ("class-dirichlet", 5)):
        for i in range(clients):
            shard = dataset_source("digits", seed=3, cache_dir=cache_dir).client(i, clients, kind)
            assert not rows(shard) & test


def test_every_argument_matters(cache_dir):
    base = {"partition_id": 0, "num_partitions": 4}
    changes = [
        ({}, {}),
        ({}, {"partition_id": 1}),
        ({}, {"num_partitions": 5}),
        ({}, {"partition": "iid"}),
        ({}, {"alpha": 5.0}),
        ({"test_fraction": 0.2}, {}),
        ({"seed": 1}, {}),
    ]
    drawn = [
        frozenset(rows(dataset_source("digits", cache_dir=cache_dir, **of).client(**base | part)))
        for of, part in changes
    ]
    assert len(set(drawn)) == len(drawn)


def test_held_out_samples_are_nobodys(cache_dir):
    source = dataset_source("digits", seed=3, cache_dir=cache_dir)
    held = rows(source.held_out(64))
    assert len(held) == 64
    assert not held & rows(source.test())
    clients = [[rows(source.client(i, 7, held_out=n)) for i in range(7)] for n in (0, 64)]
    for before, after in zip(*clients, strict=True):
        assert after == before - held
    # What is held out was somebody's, but for the few that the partition leaves over.
    assert len(set.union(*clients[0])) - len(set.union(*clients[1])) > 55
    with pytest.raises(ValueError, match="cannot hold 2000 of"):
        source.held_out(2000)


def test_normalisation_is_per_channel():
    info = DatasetInfo("toy", (2, 1, 1), 2, (0.5, 0.25), (0.5, 0.125))
    pixels = np.array([[255, 255], [0, 51]], dtype=np.uint8).reshape(2, 2, 1, 1)
    x = normalised(pixels, info)
    assert torch.allclose(x.view(2, 2), torch.tensor([[1.0, 6.0], [-1.0, -0.4]]))


def test_a_shard_is_loaded_once_per_process(cache_dir, monkeypatch):
    first = dataset_source("digits", cache_dir=cache_dir).client(2, 9)
    assert dataset_source("digits", cache_dir=cache_dir).client(2, 9) is first
    test = dataset_source("digits", cache_dir=cache_dir).test()
    assert dataset_source("digits", cache_dir=cache_dir).test() is test
    # The defaults of the folders are looked up anew: another folder is another shard.
    monkeypatch.setenv("FEDPSA_CACHE", str(cache_dir))
    monkeypatch.setenv("FEDPSA_DATA", "/elsewhere")
    assert dataset_source("digits").client(2, 9) is not first


def test_a_warm_cache_answers_without_the_dataset(tmp_path, monkeypatch):
    dataset_source("digits", cache_dir=tmp_path).warm_cache(3, "client-dirichlet", 0.5)

    def refuse(*_, **__):
        raise AssertionError("the cache was not warm")

    for name in ("load_raw", "split_over_clients", "split_test"):
        monkeypatch.setattr(shards, name, refuse)
    dataset_source("digits", cache_dir=tmp_path).client(0, 3)
    dataset_source("digits", cache_dir=tmp_path).test()
    with pytest.raises(AssertionError, match="not warm"):
        dataset_source("digits", cache_dir=tmp_path).client(0, 4)


def test_images_stay_bytes_in_the_cache(tmp_path):
    dataset_source("digits", cache_dir=tmp_path).warm_cache(3, "client-dirichlet", 0.5)
    (folder,) = tmp_path.glob("digits_*_images_*")
    assert np.load(folder / "images.npy", mmap_mode="r").dtype == np.uint8


def test_a_client_touches_only_its_own_rows(tmp_path, monkeypatch):
    touched = []

    class Spy:
        def __init__(self, array):
            self.array = array

        def __getitem__(self, index):
            touched.append(np.asarray(index))
            return self.array[index]

    def spying(cache_dir, key, make):
        arrays = cached_arrays(cache_dir, key, make)
        return {
            name: Spy(array) if name in ("images", "labels") else array
            for name, array in arrays.items()
        }

    dataset_source("digits", cache_dir=tmp_path).warm_cache(10, "client-dirichlet", 0.5)
    monkeypatch.setattr(shards, "cached_arrays", spying)
    shard = dataset_source("digits", cache_dir=tmp_path).client(4, 10)
    assert [len(index) for index in touched] == [len(shard), len(shard)]


def test_partition_ids_are_checked(cache_dir):
    for bad in (-1, 3):
        with pytest.raises(ValueError, match=f"partition id {bad} is not one of 0 to 2"):
            dataset_source("digits", cache_dir=cache_dir).client(bad, 3)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def good(n=4, dtype=np.uint8):
    return np.full((n, 1, 8, 8), 8, dtype=dtype), np.arange(n)


@pytest.mark.parametrize("label_type", [np.uint8, np.int32, np.int64])
def test_own_pixels_are_scaled_and_normalised(tmp_path, label_type):
    x, y = good()
    shard = file_shard(save(tmp_path / "own.npz", x=x, y=y.astype(label_type)), DIGITS)
    assert shard.x.dtype == torch.float32
    assert torch.allclose(shard.x, torch.tensor((0.5 - DIGITS.mean[0]) / DIGITS.std[0]))
    assert shard.y.dtype == torch.int64
    assert shard.y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_own_floats_are_taken_as_they_are(tmp_path, dtype):
    x, y = good(dtype=dtype)
    shard = file_shard(save(tmp_path / "own.npz", x=np.asfortranarray(x), y=y), DIGITS)
    assert shard.x.dtype == torch.float32
    assert shard.x.is_contiguous()
    assert torch.equal(shard.x, torch.full((4, 1, 8, 8), 8.0))


def test_a_file_is_read_again_only_when_it_changed(tmp_path):
    x, y = good()
    path = save(tmp_path / "own.npz", x=x, y=y)
    first = file_shard(path, DIGITS)
    assert file_shard(str(path), DIGITS) is first
    save(path, x=x, y=y[::-1])
    os.utime(path, ns=(1, 1))
    assert file_shard(path, DIGITS).y.tolist() == [3, 2, 1, 0]


def with_value(value, dtype=np.float32):
    x, _ = good(dtype=dtype)
    x[2, 0, 3, 3] = value
    return x


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"y": good()[1]}, "no array named x"),
        ({"x": good()[0]}, "no array named y"),
        ({"z": good()[0]}, "no array named x or y"),
        ({"x": good()[0][:, 0], "y": good()[1]}, "x has shape"),
        ({"x": good()[0][..., :7], "y": good()[1]}, "x has shape"),
        ({"x": np.uint8(3), "y": good()[1]}, "x has shape"),
        ({"x": good(0)[0], "y": good(0)[1]}, "no samples"),
        ({"x": good()[0], "y": good()[1][:3]}, "y has shape"),
        ({"x": good()[0], "y": good()[1][:, np.newaxis]}, "y has shape"),
        ({"x": good()[0], "y": good()[1].astype(float)}, "labels must be integers"),
        ({"x": good()[0], "y": good()[1] > 1}, "labels must be integers"),
        ({"x": good()[0], "y": good()[1] - 1}, "labels -1 to 2 are outside 0 to 9"),
        ({"x": good()[0], "y": good()[1] + 7}, "labels 7 to 10 are outside 0 to 9"),
        ({"x": good()[0].astype(np.int64), "y": good()[1]}, "x is int64"),
        ({"x": good()[0].astype(complex), "y": good()[1]}, "x is complex128"),
        ({"x": with_value(np.nan), "y": good()[1]}, "not finite"),
        ({"x": with_value(-np.inf), "y": good()[1]}, "not finite"),
        ({"x": with_value(1e300, np.float64), "y": good()[1]}, "not finite"),
        ({"x": good()[0].astype(object), "y": good()[1]}, "plain arrays"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_unusable_files_are_refused(tmp_path, arrays, text):
    path = save(tmp_path / "own.npz", **arrays)
    with pytest.raises(ShardFileError, match=text) as caught:
        file_shard(path, DIGITS)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04broken"])
def test_files_that_are_no_archive_are_refused(tmp_path, content):
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    with pytest.raises(ShardFileError, match=r"own\.npz: not an \.npz file"):
        file_shard(path, DIGITS)


def test_a_cut_or_single_array_file_is_refused(tmp_path):
    x, y = good()
    path = save(tmp_path / "own.npz", x=x, y=y)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShardFileError, match=r"not an \.npz file"):
        file_shard(path, DIGITS)
    np.save(tmp_path / "single.npy", x)
    with pytest.raises(ShardFileError, match=r"single\.npy: not an \.npz file"):
        file_shard(tmp_path / "single.npy", DIGITS)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ShardFileError, match=r"none\.npz: cannot be read"):
        file_shard(tmp_path / "none.npz", DIGITS)


def shard_of(n):
    return Shard(torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64))


def test_memory_is_bounded_and_forgets_the_least_recently_used():
    size = shard_of(10).nbytes
    assert size == 10 * 4 + 10 * 8
    recent = RecentlyUsed(2 * size)
    loads = []

    def get(key, n=10):
        def load():
            loads.append(key)
            return shard_of(n)

        return recent.get(key, load)

    get("a"), get("b"), get("a"), get("c"), get("a"), get("b")
    assert loads == ["a", "b", "c", "b"]
    get("huge", n=100), get("huge", n=100)  # handed out, but not kept and nothing lost for it
    get("a"), get("b")
    assert loads == ["a", "b", "c", "b", "huge", "huge"]
    recent.clear()
    get("a")
    assert loads[-1] == "a"


CLIENT = """
import json, sys
from task.models import make_model
from task.shards import dataset_source
from task.training import evaluate, resolve_device, set_threads, train
set_threads(1)
shard = dataset_source("digits", cache_dir=sys.argv[1]).client(0, 3)
model = make_model("digits", 0)
train(model, shard, lr=0.1, epochs=1, batch_size=64, seed=0, device=resolve_device("cpu"))
evaluate(model, dataset_source("digits", cache_dir=sys.argv[1]).test())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_client_process_imports_no_heavy_library(tmp_path):
    dataset_source("digits", cache_dir=tmp_path).warm_cache(3, "client-dirichlet", 0.5)
    imported = set(json.loads(printed_by(CLIENT, str(tmp_path))))
    assert {"task", "torch", "numpy"} <= imported
    assert not imported & {"torchvision", "sklearn", "matplotlib", "scipy", "pandas", "flwr", "ray"}
