"""Dataset files: parsing, finding, and what is said when they are missing or damaged."""

import pickle
import struct
import types
from pathlib import Path

import numpy as np
import pytest

from support.datasets import idx, write_idx_dataset
from task import datasets
from task.datasets import DATASETS, DatasetFileError, DatasetNotFoundError, load_raw


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """Hide what this machine may have, and refuse downloads."""
    monkeypatch.setattr(datasets, "DEBIAN_FASHION_MNIST", tmp_path / "debian")

    def refuse(name, folder):
        raise OSError("no network in tests")

    monkeypatch.setattr(datasets, "download_files", refuse)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "place"),
    [("mnist", "MNIST/raw"), ("fmnist", "FashionMNIST/raw"), ("mnist", "."), ("fmnist", ".")],
)
def test_idx_files_are_read_train_part_first(tmp_path, name, place, zipped):
    images, labels = write_idx_dataset(tmp_path / place, zipped=zipped)
    read_images, read_labels = load_raw(name, tmp_path)
    assert read_images.dtype == np.uint8
    assert read_labels.dtype == np.int64
    assert np.array_equal(read_images, images)
    assert np.array_equal(read_labels, labels)


def test_the_usual_folder_wins_over_loose_files(tmp_path):
    write_idx_dataset(tmp_path, seed=1)
    images, _ = write_idx_dataset(tmp_path / "MNIST/raw", seed=2)
    assert np.array_equal(load_raw("mnist", tmp_path)[0], images)


def test_debian_s_folder_serves_fashion_mnist_only(tmp_path):
    images, _ = write_idx_dataset(tmp_path / "debian", zipped=True)
    assert np.array_equal(load_raw("fmnist", tmp_path / "data")[0], images)
    with pytest.raises(DatasetNotFoundError):
        load_raw("mnist", tmp_path / "data")


def damage(data, how):
    return {
        "magic": b"\x00\x00\x08\x04" + data[4:],
        "type": b"\x00\x00\x0d" + data[3:],
        "short": data[:-1],
        "long": data + b"\x00",
        "header": data[:6],
        "empty": b"",
    }[how]


@pytest.mark.parametrize("how", ["magic", "type", "short", "long", "header", "empty"])
@pytest.mark.parametrize("file", ["t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_damaged_idx_files_are_named(tmp_path, file, how):
    write_idx_dataset(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(DatasetFileError) as caught:
        load_raw("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_a_damaged_gzip_file_is_named(tmp_path):
    write_idx_dataset(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetFileError, match=r"train-images-idx3-ubyte\.gz: damaged gzip"):
        load_raw("mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "array", "text"),
    [
        ("t10k-labels-idx1-ubyte", np.array([1, 10]), "labels 1 to 10 are outside 0 to 9"),
        ("t10k-labels-idx1-ubyte", np.array([1, 2, 3]), "labels for 2 images"),
        ("t10k-images-idx3-ubyte", np.zeros((2, 28, 27)), "images have shape"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, file, array, text):
    write_idx_dataset(tmp_path)
    (tmp_path / file).write_bytes(idx(array))
    with pytest.raises(DatasetFileError, match=text):
        load_raw("mnist", tmp_path)


CIFAR10 = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
CIFAR100 = ["train", "test"]


def cifar_batches(names, classes):
    rng = np.random.default_rng(0)
    for name in names:
        yield name, rng.integers(0, 256, (2, 3072), np.uint8), rng.integers(0, classes, 2, np.uint8)


@pytest.mark.parametrize("place", ["usual", "."])
@pytest.mark.parametrize(
    ("dataset", "usual", "names"),
    [
        ("cifar10", "cifar-10-batches-bin", CIFAR10),
        ("cifar100", "cifar-100-binary", CIFAR100),
    ],
)
def test_cifar_binary_files(tmp_path, dataset, usual, names, place):
    folder = tmp_path / (usual if place == "usual" else ".")
    folder.mkdir(exist_ok=True)
    classes = DATASETS[dataset].num_classes
    expected_pixels, expected_labels = [], []
    for name, pixels, labels in cifar_batches(names, classes):
        coarse = np.full((2, 1 if dataset == "cifar100" else 0), 255, np.uint8)
        records = np.concatenate([coarse, labels[:, np.newaxis], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
        expected_pixels.append(pixels)
        expected_labels.append(labels)
    images, labels = load_raw(dataset, tmp_path)
    assert images.shape == (2 * len(names), 3, 32, 32)
    assert np.array_equal(images.reshape(-1, 3072), np.concatenate(expected_pixels))
    assert np.array_equal(labels, np.concatenate(expected_labels))
    assert labels.dtype == np.int64

    last = folder / f"{names[-1]}.bin"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DatasetFileError, match="not a whole number") as caught:
        load_raw(dataset, tmp_path)
    assert str(last) in str(caught.value)
    last.write_bytes(b"\x64" * (3073 if dataset == "cifar10" else 3074))
    with pytest.raises(DatasetFileError, match="labels 100 to 100 are outside"):
        load_raw(dataset, tmp_path)


def python2_pickle(pixels, label_key, labels):
    """Return a batch as Python 2 and its NumPy pickled it: byte strings, and numpy.core."""

    def text(value):
        return b"T" + struct.pack("<i", len(value)) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01"
        + b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(pixels.tobytes())
        + b"tb"
    )
    items = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(label_key) + items + b"u."


@pytest.mark.parametrize(
    ("dataset", "folder", "key", "names"),
    [
        ("cifar10", "cifar-10-batches-py", b"labels", CIFAR10),
        ("cifar100", "cifar-100-python", b"fine_labels", CIFAR100),
    ],
)
def test_cifar_python_files(tmp_path, dataset, folder, key, names):
    (tmp_path / folder).mkdir()
    batches = list(cifar_batches(names, DATASETS[dataset].num_classes))
    for name, pixels, labels in batches:
        (tmp_path / folder / name).write_bytes(python2_pickle(pixels, key, labels))
    images, labels = load_raw(dataset, tmp_path)
    assert np.array_equal(images.reshape(-1, 3072), np.concatenate([b[1] for b in batches]))
    assert np.array_equal(labels, np.concatenate([b[2] for b in batches]))


class Evil:
    def __reduce__(self):
        return print, ("a pickle ran code",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps(Evil()),
        pickle.dumps({b"data": [[1]]}),
        pickle.dumps({b"data": [[1]], b"labels": [1]}),
        pickle.dumps({b"data": "x", b"labels": "y"}),
    ],
)
def test_bad_pickles_are_refused_and_run_nothing(tmp_path, capsys, content):
    for name, pixels, labels in cifar_batches(CIFAR10, 10):
        (tmp_path / name).write_bytes(python2_pickle(pixels, b"labels", labels))
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(DatasetFileError, match="data_batch_3"):
        load_raw("cifar10", tmp_path)
    assert capsys.readouterr().out == ""


def test_missing_data_says_where_it_looked_and_what_to_do(tmp_path):
    (tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    (tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(DatasetNotFoundError) as caught:
        load_raw("fmnist", tmp_path)
    text = str(caught.value)
    assert f"{tmp_path / 'FashionMNIST' / 'raw'}: no train-labels-idx1-ubyte" in text
    assert f"{tmp_path}: no train-images-idx3-ubyte" in text
    assert f"{tmp_path / 'debian'}: no " in text
    assert "no network in tests" in text
    assert f"python -m task.download fmnist {tmp_path}" in text
    assert "apt-get install dataset-fashion-mnist" in text


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_every_dataset_names_its_command_and_folders(tmp_path, name):
    with pytest.raises(DatasetNotFoundError) as caught:
        load_raw(name, tmp_path, download=False)
    text = str(caught.value)
    assert f"python -m task.download {name} {tmp_path}" in text
    assert "not tried" in text
    assert "apt-get" not in text
    assert "no network" not in text


def test_a_download_is_read_from_the_data_folder(tmp_path, monkeypatch):
    asked = []

    def fake_download(name, folder):
        asked.append(name)
        write_idx_dataset(folder / "MNIST" / "raw")

    monkeypatch.setattr(datasets, "download_files", fake_download)
    assert len(load_raw("mnist", tmp_path)[0]) == 5
    assert len(load_raw("mnist", tmp_path)[0]) == 5
    assert asked == ["mnist"]


def test_downloads_appear_only_when_complete(tmp_path, monkeypatch):
    from task import download, torchvision_import

    seen = []

    class FakeMNIST:
        def __init__(self, root, download):
            write_idx_dataset(Path(root) / "MNIST" / "raw")
            seen.append((tmp_path / "MNIST").exists())

    module = types.SimpleNamespace(MNIST=FakeMNIST)
    monkeypatch.setattr(torchvision_import, "import_torchvision_datasets", lambda: module)
    download.download("mnist", tmp_path)
    assert seen == [False]
    assert len(load_raw("mnist", tmp_path, download=False)[0]) == 5

    # An incomplete folder in the way is completed, and no scratch folder stays behind.
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    download.download("mnist", tmp_path)
    assert len(load_raw("mnist", tmp_path, download=False)[0]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


def test_digits_and_their_normalisation():
    images, labels = load_raw("digits", "")
    info = DATASETS["digits"]
    assert images.shape == (1797, *info.shape)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.unique(labels).tolist() == list(range(10))
    scaled = images / info.scale
    assert scaled.mean() == pytest.approx(info.mean[0], abs=1e-4)
    assert scaled.std() == pytest.approx(info.std[0], abs=1e-4)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown dataset 'imagenet'; choose from digits, mnist"):
        load_raw("imagenet", "")
