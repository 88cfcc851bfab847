import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpsa_strategy.probe.calibration import Calibration, fingerprint
from fedpsa_strategy.probe.sketch import Sketch
from support.programs import printed_by


def test_gaussian_inputs_and_uniform_labels():
    batch = Calibration.gaussian((3, 16, 16), size=512, num_classes=10)
    assert batch.inputs.shape == (512, 3, 16, 16)
    assert batch.inputs.dtype == np.float32
    count = batch.inputs.size
    # Five standard deviations of a mean and of a variance of normal numbers.
    assert abs(batch.inputs.mean(dtype=np.float64)) < 5 / np.sqrt(count)
    assert abs(batch.inputs.var(dtype=np.float64) - 1) < 5 * np.sqrt(2 / count)
    assert batch.targets.shape == (512,)
    assert batch.targets.dtype == np.int64
    # Each class count is binomial: 51.2 expected, standard deviation 6.8.
    assert np.abs(np.bincount(batch.targets, minlength=10) - 51.2).max() < 5 * 6.8
    assert len(np.bincount(batch.targets)) == 10


def test_tokens_are_uniform_over_the_vocabulary():
    batch = Calibration.gaussian((20,), size=500, num_classes=2, vocabulary=50)
    assert batch.inputs.shape == (500, 20)
    assert batch.inputs.dtype == np.int64
    counts = np.bincount(batch.inputs.ravel(), minlength=50)
    assert len(counts) == 50
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)


def test_regression_targets():
    batch = Calibration.gaussian((4,), size=300, target_shape=(2, 5))
    assert batch.targets.shape == (300, 2, 5)
    assert batch.targets.dtype == np.float32
    assert abs(batch.targets.var() - 1) < 5 * np.sqrt(2 / 3000)
    assert Calibration.gaussian((4,)).targets.shape == (64,)


def test_one_label_per_position():
    batch = Calibration.gaussian((7,), vocabulary=9, num_classes=9, target_shape=(7,))
    assert batch.targets.shape == (64, 7)
    assert set(np.unique(batch.targets)) == set(range(9))


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=20, deadline=None)
def test_the_seed_fixes_the_batch(seed):
    batch = Calibration.gaussian((5,), seed=seed, num_classes=1000)
    again = Calibration.gaussian((5,), seed=seed, num_classes=1000)
    other = Calibration.gaussian((5,), seed=(seed + 1) % 2**64, num_classes=1000)
    assert np.array_equal(batch.inputs, again.inputs)
    assert np.array_equal(batch.targets, again.targets)
    assert not np.array_equal(batch.inputs, other.inputs)
    assert not np.array_equal(batch.targets, other.targets)


def test_golden_values():
    # Recorded once: nodes with another generator must not go unnoticed.
    batch = Calibration.gaussian((3,), num_classes=10)
    assert batch.inputs[0].round(4).tolist() == pytest.approx([-0.1183, 0.7422, 0.2547])
    assert batch.targets[:8].tolist() == [3, 5, 7, 5, 3, 8, 0, 9]
    assert batch.fingerprint == "2c162223d3608a9b0a20c4b65c52c732"


def test_targets_do_not_depend_on_inputs():
    image = Calibration.gaussian((3, 8, 8), num_classes=10)
    text = Calibration.gaussian((12,), vocabulary=30, num_classes=10)
    assert np.array_equal(image.targets, text.targets)


def test_equal_seeds_leave_the_batch_independent_of_the_projection():
    batch = Calibration.gaussian((1024,), size=64, seed=3)
    numbers = batch.inputs.ravel()
    for kind in ("rademacher", "gaussian"):
        columns = Sketch(numbers.size, 4, 3, kind).columns(0, numbers.size)
        correlation = columns @ numbers * 2 / numbers.size
        assert np.abs(correlation).max() < 5 / np.sqrt(numbers.size)


def test_real_copies_and_converts():
    inputs, targets = np.arange(12.0).reshape(4, 3), np.array([0, 1, 2, 1], dtype=np.uint8)
    batch = Calibration.real(inputs, targets)
    inputs[:] = -1
    assert batch.inputs.tolist() == np.arange(12.0).reshape(4, 3).tolist()
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.float32, np.int64)
    drawn = Calibration.gaussian((3,), num_classes=5)
    assert Calibration.real(drawn.inputs, drawn.targets) == drawn


def test_tensors_are_copies_with_the_same_values_made_once():
    batch = Calibration.gaussian((3,), size=5, num_classes=4)
    inputs, targets = batch.tensors()
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert np.array_equal(inputs.numpy(), batch.inputs)
    assert np.array_equal(targets.numpy(), batch.targets)
    assert not np.shares_memory(inputs.numpy(), batch.inputs)
    assert not np.shares_memory(targets.numpy(), batch.targets)
    assert batch.tensors()[0] is inputs


def test_fingerprint_ignores_last_bits_and_the_sign_of_zero():
    inputs = np.array([[1.2, -0.0], [0.0004, 3.0]], dtype=np.float32)
    near = np.array([[1.2001, 0.0], [-0.0004, 3.0]], dtype=np.float32)
    far = np.array([[1.201, 0.0], [0.0004, 3.0]], dtype=np.float32)
    labels = np.array([0, 1])
    assert (
        Calibration.real(inputs, labels).fingerprint == Calibration.real(near, labels).fingerprint
    )
    assert Calibration.real(inputs, labels).fingerprint != Calibration.real(far, labels).fingerprint


def test_fingerprint_tells_apart_shapes_dtypes_values_and_roles():
    ones = np.ones((4, 2))
    batches = [
        Calibration.real(ones, np.ones(4)),
        Calibration.real(ones.reshape(4, 1, 2), np.ones(4)),
        Calibration.real(ones.astype(int), np.ones(4)),
        Calibration.real(ones, np.ones(4, dtype=int)),
        Calibration.real(ones, np.zeros(4)),
        Calibration.real(np.ones(4), ones),
    ]
    assert len({batch.fingerprint for batch in batches}) == len(batches)
    assert all(len(batch.fingerprint) == 32 for batch in batches)


def test_pickled_batches_are_equal():
    batch = Calibration.gaussian((3,), num_classes=4)
    copy = pickle.loads(pickle.dumps(batch))
    assert np.array_equal(copy.inputs, batch.inputs)
    assert copy == batch
    assert hash(copy) == hash(batch)
    assert batch != Calibration.gaussian((3,), num_classes=4, seed=1)
    assert batch != "a batch"


def test_the_common_fingerprint_depends_on_both():
    batches = [Calibration.gaussian((3,), seed=seed) for seed in (0, 1)]
    sketches = [Sketch(100, seed=seed) for seed in (0, 1)]
    combined = {fingerprint(sketch, batch) for sketch in sketches for batch in batches}
    assert len(combined) == 4
    assert fingerprint(Sketch(100), Calibration.gaussian((3,))) in combined


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be from 1 to 4096, not 0"),
        ({"size": 4097}, "size must be from 1 to 4096, not 4097"),
        ({"size": 1.5}, r"size must be an integer, not 1\.5"),
        ({"seed": -1}, "seed must be from 0 .* not -1"),
        ({"num_classes": 0}, "num_classes must be from 1 .* not 0"),
        ({"vocabulary": -3}, "vocabulary must be from 1 .* not -3"),
        ({"shape": (3, 0)}, "each length in shape must be from 1 .* not 0"),
        ({"target_shape": (-1,)}, "each length in target_shape must be from 1 .* not -1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Calibration.gaussian(**{"shape": (2,)} | arguments)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.ones((3, 2)), np.ones(4), "same number of samples, not 3 and 4"),
        (np.ones((0, 2)), np.ones(0), r"inputs must hold 1 to 4096 .* \(0, 2\)"),
        (np.ones((5000, 1)), np.ones(5000), r"inputs must hold 1 to 4096 .* \(5000, 1\)"),
        (np.ones((2, 2)), np.array(1.0), r"targets must hold 1 to 4096 .* \(\)"),
        (np.array([[np.nan]]), np.ones(1), "inputs must be finite"),
        (np.ones(1), np.array([np.inf]), "targets must be finite"),
        (np.array([1e300]), np.ones(1), "inputs must be finite"),
        (np.array(["a"]), np.ones(1), "inputs must be numbers, but the dtype is <U1"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_wrong_arrays_are_explained(inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        Calibration.real(inputs, targets)


def test_batch_and_projection_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fedpsa_strategy.probe.calibration import Calibration\n"
        "from fedpsa_strategy.probe.sketch import Sketch\n"
        "print(Sketch(128)(Calibration.gaussian((2,)).inputs.ravel()).shape)"
    )
    assert printed_by(code).strip() == "(16,)"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_on_a_gpu():
    batch = Calibration.gaussian((3,), num_classes=4)
    inputs, targets = batch.tensors("cuda")
    assert (inputs.device.type, targets.device.type) == ("cuda", "cuda")
    assert np.array_equal(inputs.cpu().numpy(), batch.inputs)
