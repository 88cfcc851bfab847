"""The peers' rules against sequences worked out by hand, their known traps included."""

import math

import numpy as np
import pytest

from fedpsa_strategy.methods import fedfa
from fedpsa_strategy.methods.base import Given, Update
from fedpsa_strategy.methods.ca2fl import CA2FLMethod
from fedpsa_strategy.methods.fedasync import FedAsyncMethod
from fedpsa_strategy.methods.fedavg import FedAvgMethod
from fedpsa_strategy.methods.fedfa import FedFaMethod
from fedpsa_strategy.methods.fedpac import (
    FedPACMethod,
    head_weights,
    minimise_on_simplex,
    project_on_simplex,
)
from fedpsa_strategy.methods.mapped_memory import MappedMemory
from support.updates import ZERO, make_update


def ca2fl(num_clients, buffer_size, memory=None):
    rule = CA2FLMethod(buffer_size=buffer_size).make_rule(Given(num_clients))
    rule.memory = {} if memory is None else memory
    return rule


def fedpac_rule():
    rule = FedPACMethod().make_rule()
    rule.head = slice(1, 2)
    return rule


def started(rule, model=ZERO):
    rule.start(np.asarray(model, np.float32))
    return rule


# --- FedAvg ------------------------------------------------------------------------------------


def sized(delta, num_examples, client=0):
    update = make_update(delta, client=client)
    return Update(**{**vars(update), "num_examples": num_examples})


def test_fedavg_by_hand_over_three_rounds():
    rule = started(FedAvgMethod().make_rule())
    assert rule.add(sized([4, 0], 1)) is None
    assert rule.add(sized([0, 4], 3)) is None
    assert rule.finish_round().tolist() == [1.0, 3.0]  # 1/4 · 4, 3/4 · 4
    rule.add(sized([1, 1], 10))
    assert rule.finish_round().tolist() == [2.0, 4.0]
    rule.add(sized([8, 0], 2))
    rule.add(sized([0, 8], 2))
    rule.add(sized([0, 0], 4))
    assert rule.finish_round().tolist() == [4.0, 6.0]
    assert rule.version_report["weights"] == [0.25, 0.25, 0.5]
    assert rule.finish_round() is None  # nobody delivered


# --- FedAsync ----------------------------------------------------------------------------------


def test_fedasync_by_hand_and_alpha_does_not_compound():
    """α = 0.5, s = (1+τ)^-½; y = start + Δ. A compounding α would give 0.25, then 0.0625, ..."""
    rule = started(FedAsyncMethod(mixing=0.5).make_rule())
    # τ = 0: α_t = ½, y = (4, 0): x = (2, 0).
    assert rule.add(make_update([4, 0], staleness=0)).tolist() == [2.0, 0.0]
    # τ = 3: α_t = ¼, y = (0, 0) + (6, 8): x = ¾ (2, 0) + ¼ (6, 8) = (3, 2).
    assert rule.add(make_update([6, 8], staleness=3)).tolist() == [3.0, 2.0]
    # τ = 0 again: α_t is ½ again; y = (1, 1) + (0, 1): x = (2, 2).
    assert rule.add(make_update([0, 1], staleness=0, start=(1, 1))).tolist() == [2.0, 2.0]
    # τ = 15: α_t = 1/8, y = (10, 2): x = 7/8 · 2 + 10/8, 2.
    assert rule.add(make_update([10, 2], staleness=15)).tolist() == [3.0, 2.0]
    assert rule.settings.mixing == 0.5


def test_fedasync_staleness_laws():
    def factor(tau, **kwargs):
        rule = started(FedAsyncMethod(**kwargs).make_rule())
        rule.add(make_update([1, 1], staleness=tau))
        return rule.report["staleness_factor"]

    assert factor(99, staleness="constant") == 1.0
    assert factor(3) == 0.5
    assert factor(4, staleness="hinge") == 1.0
    assert factor(5, staleness="hinge") == pytest.approx(1 / 11)
    assert factor(6, staleness="hinge", hinge_slope=2.0, hinge_threshold=5.0) == pytest.approx(
        1 / 3
    )


# --- CA2FL -------------------------------------------------------------------------------------


def ca2fl_by_hand(rule):
    """N = 4, K = 2, η = 1."""
    # Version 1: h = 0. r = (4, 0) + (0, 8); v = 0 + r/2 = (2, 4). Then h = ((4, 0) + (0, 8)) / 4.
    assert rule.add(make_update([4, 0], client=0)) is None
    assert rule.add(make_update([0, 8], client=1)).tolist() == [2.0, 4.0]
    assert rule.mean_before.tolist() == [1.0, 2.0]
    # Version 2: client 0 again: r = (8, 0) - (4, 0) = (4, 0); client 2 is new: r += (2, 2).
    # v = h_before + r/2 = (1, 2) + (3, 1): h of version 1, not the one refreshed by these two.
    rule.add(make_update([8, 0], client=0))
    assert rule.add(make_update([2, 2], client=2)).tolist() == [6.0, 7.0]
    # h = ((8, 0) + (0, 8) + (2, 2)) / 4
    assert rule.mean_before.tolist() == [2.5, 2.5]
    # Version 3: client 1 twice in one buffer: r = ((0, 4) - (0, 8)) + ((2, 0) - (0, 4)).
    # v = (2.5, 2.5) + (2, -8)/2 = (3.5, -1.5).
    rule.add(make_update([0, 4], client=1))
    assert rule.add(make_update([2, 0], client=1)).tolist() == [9.5, 5.5]
    # h = ((8, 0) + (2, 0) + (2, 2)) / 4: N counts the client never seen.
    assert rule.mean_before.tolist() == [3.0, 0.5]


def test_ca2fl_by_hand():
    ca2fl_by_hand(started(ca2fl(4, 2)))


def test_ca2fl_with_its_memory_in_a_file(tmp_path):
    memory = MappedMemory(tmp_path / "memory.bin", size=2)
    ca2fl_by_hand(started(ca2fl(4, 2, memory)))
    assert (tmp_path / "memory.bin").stat().st_size >= 3 * 2 * 4
    np.testing.assert_array_equal(memory[2], [2.0, 2.0])
    assert list(memory) == [0, 1, 2]
    with pytest.raises(KeyError):
        memory[3]


def test_mapped_memory_grows_without_losing_anything(tmp_path):
    memory = MappedMemory(tmp_path / "memory.bin", size=3)
    for client in (0, 5, 40, 200):
        memory[client] = np.full(3, client, np.float32)
    assert [memory[client].tolist()[0] for client in memory] == [0.0, 5.0, 40.0, 200.0]


def test_ca2fl_counts_clients_that_turn_up_unannounced():
    rule = started(ca2fl(1, 1))
    rule.add(make_update([4, 4], client=3))
    assert rule.mean_before.tolist() == [1.0, 1.0]


# --- FedFa -------------------------------------------------------------------------------------


def test_fedfa_by_hand():
    rule = started(FedFaMethod(buffer_size=3).make_rule(), [9.0, 9.0])
    # The global model does not move before the queue holds three models.
    assert rule.add(make_update([3, 0])) is None
    assert rule.add(make_update([0, 3], start=(0, 3))) is None
    assert rule.model.tolist() == [9.0, 9.0]
    assert rule.add(make_update([3, 0])).tolist() == [2.0, 2.0]  # ((3,0) + (0,6) + (3,0)) / 3
    assert rule.add(make_update([6, 3])).tolist() == [3.0, 3.0]  # (0,6), (3,0), (6,3)
    assert rule.add(make_update([0, 0], staleness=50)).tolist() == [3.0, 1.0]  # (3,0), (6,3), (0,0)


@pytest.mark.parametrize("resum_every", [1, 10**9])
def test_fedfa_incremental_mean_equals_the_resummed_one(resum_every, monkeypatch):
    monkeypatch.setattr(fedfa, "_RESUM_EVERY", resum_every)
    rng = np.random.default_rng(1)
    rule = started(FedFaMethod(buffer_size=5).make_rule())
    for _ in range(500):
        rule.add(make_update(rng.normal(size=2), start=rng.normal(size=2)))
        if len(rule.queue) == 5:
            np.testing.assert_allclose(
                rule.model, rule.mean(), atol=0 if resum_every == 1 else 1e-5
            )


# --- FedPAC ------------------------------------------------------------------------------------


def pac_update(delta, *, client, size, centroids, counts, features, variance, start=(0.0, 0.0)):
    update = sized(delta, size, client)
    extra = {
        "centroids": np.asarray(centroids, np.float32),
        "class-counts": np.asarray(counts),
        "features": np.asarray(features, np.float32),
        "variance": np.float32(variance),
    }
    return Update(**{**vars(update), "extra": extra, "start": np.asarray(start, np.float32)})


def test_fedpac_head_combination_solved_by_hand():
    """Two clients with h = 0 and h = (1, 0): for client 0, D = diag(0, 1).

    Minimise v_0 a_0² + (v_1 + 1) a_1² with a_0 + a_1 = 1: a_0 = (v_1 + 1) / (v_0 + v_1 + 1).
    """
    features = np.array([[[0.0, 0.0]], [[1.0, 0.0]]])
    weights = head_weights(0, features, np.array([0.5, 0.5]))
    assert weights == pytest.approx([1.5 / 2, 0.5 / 2], abs=1e-6)
    weights = head_weights(1, features, np.array([1.0, 3.0]))  # diag(1 + 1, 3)
    assert weights == pytest.approx([3 / 5, 2 / 5], abs=1e-6)


def test_fedpac_drops_tiny_weights_and_keeps_the_own_head_when_it_must():
    features = np.array([[[0.0]], [[100.0]]])
    assert head_weights(0, features, np.array([0.5, 0.5])) == [1.0, 0.0]
    assert head_weights(1, np.array([[[math.nan]], [[0.0]]]), np.ones(2)) == [0.0, 1.0]


def test_fedpac_by_hand_over_three_rounds():
    """A model of one encoder value and one head value, one class, one feature."""
    rule = fedpac_rule()
    started(rule)
    common = {"counts": [4], "size": 4}
    rule.add(pac_update([2, 4], client=0, centroids=[[1]], features=[[0]], variance=0.5, **common))
    rule.add(pac_update([6, 8], client=1, centroids=[[3]], features=[[1]], variance=0.5, **common))
    model = rule.finish_round()
    np.testing.assert_allclose(model, [4.0, 6.0])  # mean encoder, mean head
    np.testing.assert_allclose(rule.centroids, [[2.0]])
    # a = (¾, ¼) for client 0 and (¼, ¾) for client 1, by symmetry.
    np.testing.assert_allclose(rule.start_for(0)[rule.head], [0.75 * 4 + 0.25 * 8], rtol=1e-5)
    np.testing.assert_allclose(rule.start_for(1)[rule.head], [0.25 * 4 + 0.75 * 8], rtol=1e-5)
    np.testing.assert_allclose(rule.start_for(7)[rule.head], [6.0])  # never seen: the mean head

    # Round 2: client 0 alone, from encoder 4 and its own head 5: y = (5, 7).
    rule.add(
        pac_update(
            [1, 2],
            client=0,
            size=4,
            counts=[4],
            centroids=[[9]],
            features=[[0]],
            variance=1.0,
            start=np.array([4.0, 5.0], np.float32),
        )
    )
    model = rule.finish_round()
    np.testing.assert_allclose(model, [5.0, 7.0], rtol=1e-5)
    np.testing.assert_allclose(rule.start_for(0)[rule.head], [7.0], rtol=1e-5)
    # Untouched: 0.25·4 + 0.75·8.
    np.testing.assert_allclose(rule.start_for(1)[rule.head], [7.0], rtol=1e-5)
    np.testing.assert_allclose(rule.centroids, [[9.0]])

    # Round 3: nobody has the class: its centroid stays.
    rule.add(
        pac_update(
            [0, 0],
            client=2,
            size=1,
            counts=[0],
            centroids=[[5]],
            features=[[0]],
            variance=0.0,
            start=model,
        )
    )
    np.testing.assert_allclose(rule.finish_round(), [5.0, 7.0], rtol=1e-5)
    np.testing.assert_allclose(rule.centroids, [[9.0]])


def test_projection_and_minimum_on_the_simplex():
    np.testing.assert_allclose(project_on_simplex(np.array([0.2, 0.8])), [0.2, 0.8])
    np.testing.assert_allclose(project_on_simplex(np.array([2.0, 0.0])), [1.0, 0.0])
    np.testing.assert_allclose(project_on_simplex(np.array([-5.0, -5.0])), [0.5, 0.5])
    # Lagrange: a_i proportional to 1/m_i for a diagonal matrix.
    np.testing.assert_allclose(
        minimise_on_simplex(np.diag([1.0, 2.0, 4.0])), [4 / 7, 2 / 7, 1 / 7], atol=1e-8
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        root = rng.normal(size=(6, 6))
        matrix = root @ root.T
        best = minimise_on_simplex(matrix)
        assert best.min() >= 0
        assert best.sum() == pytest.approx(1)
        value = best @ matrix @ best
        for _ in range(50):
            other = rng.dirichlet(np.ones(6))
            assert value <= other @ matrix @ other + 1e-9


# --- Rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FedAvgMethod().make_rule, fedpac_rule])
def test_a_run_that_is_saved_in_the_middle_of_a_round_goes_on_there(make):
    rng = np.random.default_rng(0)
    updates = [
        pac_update(
            rng.normal(size=2),
            client=i % 4,
            size=1 + i % 3,
            counts=[1 + i % 2, 2],
            centroids=rng.normal(size=(2, 1)),
            features=rng.normal(size=(2, 1)),
            variance=abs(rng.normal()),
            start=rng.normal(size=2),
        )
        for i in range(24)
    ]

    def starts(rule, first=0, last=24):
        """Return what clients start from after each update."""
        found = []
        for i in range(first, last):
            rule.add(updates[i])
            if i % 5 == 4:
                rule.finish_round()
            found.append([rule.start_for(client).tobytes() for client in range(4)])
        return found

    whole, saved, resumed = starts(started(make())), started(make()), make()
    starts(saved, last=13)
    resumed.load_state_dict(saved.state_dict())
    assert starts(resumed, 13) == whole[13:]
