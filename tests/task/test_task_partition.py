"""Test splits and partitions."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import task.partition as partitions
from task.partition import (
    PARTITIONS,
    by_class_dirichlet,
    by_client_dirichlet,
    partition,
    split_test,
)

label_arrays = st.builds(
    lambda size, classes, seed: np.random.default_rng(seed).integers(0, classes, size),
    size=st.integers(1, 300),
    classes=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
cases = st.tuples(
    label_arrays, st.integers(1, 20), st.floats(1e-3, 100.0), st.integers(0, 2**31)
).filter(lambda case: len(case[0]) >= case[1])


@pytest.mark.parametrize("kind", PARTITIONS)
@given(case=cases)
@settings(max_examples=60, deadline=None)
def test_no_sample_twice_no_empty_client_and_determinism(kind, case):
    labels, num_clients, alpha, seed = case
    clients = partition(kind, labels, num_clients, alpha, seed)
    assert len(clients) == num_clients
    assert all(len(client) > 0 for client in clients)
    assert all(client.dtype == np.int64 for client in clients)
    assert all((np.diff(client) > 0).all() for client in clients)
    used = np.concatenate(clients)
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < len(labels)
    if kind == "class-dirichlet":
        assert len(used) == len(labels)
    else:
        assert {len(client) for client in clients} == {len(labels) // num_clients}
    again = partition(kind, labels.copy(), num_clients, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))


def skew(labels, clients):
    """Return the mean total variation between the clients' class mixtures and the global one."""
    overall = np.bincount(labels, minlength=10) / len(labels)
    mixtures = [np.bincount(labels[c], minlength=10) / len(c) for c in clients]
    return float(np.mean([np.abs(mixture - overall).sum() / 2 for mixture in mixtures]))


@pytest.mark.parametrize("split", [by_client_dirichlet, by_class_dirichlet])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_smaller_alpha_is_more_skewed(split, seed):
    labels = np.random.default_rng(seed).integers(0, 10, 4000)
    skews = [skew(labels, split(labels, 20, alpha, seed)) for alpha in (0.1, 5.0, 1000.0)]
    assert skews[0] > skews[1] > skews[2]


def test_client_dirichlet_follows_its_law():
    # Dir(α p) has mean p and variance p (1 - p) / (α + 1) in every class.
    labels = np.repeat(np.arange(4), 2500)
    alpha = 3.0
    # Of four clients the first one never meets a class that has run out: its mixture is the law's.
    mixtures = []
    for seed in range(200):
        clients = by_client_dirichlet(labels, 4, alpha, seed)
        mixtures.append(np.bincount(labels[clients[0]], minlength=4) / len(clients[0]))
    values = np.array(mixtures)
    assert np.allclose(values.mean(axis=0), 0.25, atol=0.05)
    assert values.var(axis=0).mean() == pytest.approx(0.25 * 0.75 / (alpha + 1.0), rel=0.2)


def test_a_class_that_runs_out_is_replaced_by_the_classes_left():
    # Nearly one class per client, but half of all clients want a class that feeds only one in five.
    labels = np.repeat(np.arange(5), 200)
    clients = by_client_dirichlet(labels, 10, 1e-3, seed=0)
    counts = np.array([np.bincount(labels[client], minlength=5) for client in clients])
    assert (counts.sum(axis=1) == 100).all()
    assert (counts.sum(axis=0) == 200).all()


def test_the_papers_client_sizes():
    labels = np.random.default_rng(0).integers(0, 10, 70_000)
    train, test = split_test(70_000, 0.1, seed=0)
    started = time.process_time()
    clients = partition("client-dirichlet", labels[train], 50, 0.1, 0)
    assert time.process_time() - started < 1.0
    assert len(test) == 7_000
    assert {len(client) for client in clients} == {1_260}


@given(size=st.integers(2, 400), fraction=st.floats(0.2, 0.8), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_split_test_is_a_partition_of_all_samples(size, fraction, seed):
    if not 0 < round(size * fraction) < size:
        return
    train, test = split_test(size, fraction, seed)
    assert len(test) == round(size * fraction)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(size))


def test_seeds_and_purposes_give_different_draws():
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    assert not np.array_equal(split_test(1000, 0.1, 0)[1], split_test(1000, 0.1, 1)[1])
    for kind in PARTITIONS:
        first, second = (partition(kind, labels, 4, 0.5, seed)[0] for seed in (0, 1))
        assert not np.array_equal(first, second)


def test_classes_that_do_not_occur_are_no_problem():
    labels = np.array([7] * 30 + [2] * 30)
    clients = by_client_dirichlet(labels, 6, 0.5, 0)
    assert [len(client) for client in clients] == [10] * 6


def test_empty_clients_are_filled_one_sample_each():
    # At this alpha each class goes to one client, so at least seven of the ten would stay empty.
    labels = np.repeat(np.arange(3), 20)
    sizes = sorted(len(client) for client in by_class_dirichlet(labels, 10, 1e-4, 0))
    assert sizes[:7] == [1] * 7
    assert sum(sizes) == 60


@pytest.mark.parametrize("kind", PARTITIONS)
def test_more_clients_than_samples_is_an_error(kind):
    with pytest.raises(ValueError, match="3 samples cannot be split over 4 clients"):
        partition(kind, np.zeros(3, dtype=np.int64), 4, 1.0, 0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(ValueError, match="alpha"):
        partition("client-dirichlet", np.zeros(3, dtype=np.int64), 2, alpha, 0)


def test_other_bad_arguments_are_named():
    labels = np.zeros(3, dtype=np.int64)
    with pytest.raises(
        ValueError, match="unknown partition 'shards'; choose from client-dirichlet"
    ):
        partition("shards", labels, 2, 1.0, 0)
    with pytest.raises(ValueError, match="at least one client"):
        partition("iid", labels, 0, 1.0, 0)
    with pytest.raises(ValueError, match="seed"):
        partition("iid", labels, 1, 1.0, -1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_test(10, 1.0, 0)
    with pytest.raises(ValueError, match="empty test or training set"):
        split_test(10, 0.01, 0)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_fitted_mixtures_leave_nobody_the_leftovers(alpha, monkeypatch):
    labels = np.repeat(np.arange(10), 6300)
    counts = partitions._counts

    def off(kind):
        """Return how much of the last ten clients' samples is not as their mixture has it."""
        found = []

        def noting(mixture, supply, size):
            taken = counts(mixture, supply, size)
            found.append(np.abs(taken / size - mixture).sum() / 2)
            return taken

        monkeypatch.setattr(partitions, "_counts", noting)
        partition(kind, labels, 50, alpha, 3)
        return np.mean(found[-10:])

    assert off("client-dirichlet") > 0.2
    assert off("fitted-dirichlet") < 0.05


def test_fitted_mixtures_have_the_mean_of_all_data():
    labels = np.repeat(np.arange(10), 6300)
    share = np.full(10, 0.1)
    for alpha in (0.1, 1.0):
        mixtures = np.random.default_rng(0).dirichlet(alpha * share, size=50)
        before = np.sum((mixtures.mean(axis=0) - share) ** 2)
        partitions._fit(mixtures, share, alpha, np.random.default_rng(1))
        after = np.sum((mixtures.mean(axis=0) - share) ** 2)
        assert after < 1e-4 < before
        np.testing.assert_allclose(mixtures.sum(axis=1), 1.0)
    assert skew(labels, partition("fitted-dirichlet", labels, 50, 0.1, 0)) > 0.7


def test_held_out_samples_are_a_function_of_the_seed():
    indices = np.arange(100, 200)
    held = partitions.hold_out(indices, 16, 5)
    assert len(set(held.tolist())) == 16
    assert set(held) <= set(indices)
    assert np.array_equal(held, partitions.hold_out(indices, 16, 5))
    assert not np.array_equal(held, partitions.hold_out(indices, 16, 6))
    with pytest.raises(ValueError, match="hold 100 of 100"):
        partitions.hold_out(indices, 100, 0)
