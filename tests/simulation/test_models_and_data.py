"""Runs with other models, with CIFAR-100's files, and with held-out data, from end to end."""

import numpy as np
import pytest

from simulation.engines.local.run import run_locally
from simulation.experiments.caption import scale_text
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.options import Options
from simulation.experiments.rows import make_row
from simulation.experiments.store import CellStore
from support.engines import events

SMALL = {
    "num-clients": 4,
    "max-in-flight": 2,
    "num-server-rounds": 3,
    "buffer-size": 2,
    "local-epochs": 1,
}


def go(tmp_path, name="run", **config):
    folders = {"run-dir": str(tmp_path / name), "cache-dir": str(tmp_path / "cache")}
    settings = SMALL | folders | {key.replace("_", "-"): value for key, value in config.items()}
    return run_locally(settings, workers=0, stream=False)


def write_cifar100(folder, samples=80):
    """Files in the binary format: a coarse and a fine label, then 3072 bytes."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name in ("train.bin", "test.bin"):
        fine = rng.integers(0, 100, (samples, 1), np.uint8)
        pixels = rng.integers(0, 256, (samples, 3072), np.uint8)
        records = np.concatenate([fine // 5, fine, pixels], axis=1)
        (folder / name).write_bytes(records.tobytes())


@pytest.mark.parametrize("strategy", ["fedpsa", "midpoint"])
def test_cifar100_from_files_with_a_thin_cnn(tmp_path, strategy):
    write_cifar100(tmp_path / "cifar-100-binary")
    summary = go(
        tmp_path, dataset="cifar100", data_dir=str(tmp_path), model_width=0.05, strategy=strategy
    )
    assert summary["versions"] == 3
    assert summary["rejected"] == 0
    assert 0 <= summary["accuracy"] <= 1


@pytest.mark.parametrize("strategy", ["fedpac", "area"])
def test_a_perceptron_in_the_place_of_the_datasets_model(tmp_path, strategy):
    own = go(tmp_path, "own", dataset="digits", model="mlp", strategy=strategy)
    usual = go(tmp_path, "usual", dataset="digits", strategy=strategy)
    assert own["versions"] == usual["versions"] == 3
    assert own["model_sha256"] != usual["model_sha256"]


def test_a_real_calibration_batch_is_drawn_from_held_out_data(tmp_path):
    real = {"calibration": "real", "calibration_transport": "arrays", "held_out": 64}
    summary = go(tmp_path, dataset="digits", **real)
    assert summary["versions"] == 3
    assert summary["rejected"] == 0
    uploads = events(tmp_path / "run", "upload")
    # 1617 training samples; 404 for each of four clients, of whom 64 are taken.
    assert sum({u["client"]: u["num_examples"] for u in uploads}.values()) < 1616
    assert all(-1 <= upload["report"]["kappa"] <= 1 for upload in uploads)


def test_captions_say_which_model_it_was(tmp_path):
    thin = Options(datasets=("cifar10",), seeds=(0,), alphas=(0.1,), extra={"model-width": 0.25})
    store = CellStore(tmp_path)
    cells = EXPERIMENTS["figure-kappa"].cells(thin)
    assert "the dataset's own at 0.25 of its width" in scale_text([make_row(cells[0], store)])
    both = EXPERIMENTS["table-midpoint"].cells(Options(seeds=(6,), alphas=(0.1,)))
    text = scale_text([make_row(cell, store) for cell in both])
    assert "model: perceptron with a hidden layer of 64 and the dataset's own" in text
    usual = EXPERIMENTS["figure-kappa"].cells(Options(seeds=(0,)))
    assert "model:" not in scale_text([make_row(usual[0], store)])
