"""The rules against numbers worked out by hand."""

import math
from collections import deque

import numpy as np
import pytest

from fedpsa_strategy.methods.base import Given, blocks, effective_number, weighted_step
from fedpsa_strategy.methods.ca2fl import CA2FLMethod
from fedpsa_strategy.methods.fedasync import FedAsyncMethod
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from fedpsa_strategy.methods.fedfa import FedFaMethod
from fedpsa_strategy.methods.fedpsa import FedPSAMethod, cosine, softmax
from fedpsa_strategy.methods.thermometer import Thermometer
from support.updates import ZERO, make_update


def psa(sketches=None, **kwargs):
    """A rule whose global sketch is always (1, 0), counting how often it is asked for."""
    calls = [] if sketches is None else sketches

    def sketch(model):
        calls.append(model.copy())
        return [1.0, 0.0]

    rule = FedPSAMethod(**kwargs).make_rule(Given(sketch=sketch))
    rule.start(ZERO)
    return rule


def test_fedpsa_is_uniform_while_the_queue_has_never_been_full():
    rule = psa(buffer_size=2, queue_size=3)
    assert rule.add(make_update([2, 0], sketch=[1, 0])) is None
    model = rule.add(make_update([0, 4], sketch=[-1, 0]))  # κ = -1, but no weights yet
    assert model.tolist() == [1.0, 2.0]
    assert rule.version_report["weights"] == [0.5, 0.5]
    assert rule.version_report["effective_number"] == 2
    assert rule.version_report["temperature"] is None


def test_fedpsa_by_hand_over_three_versions():
    """L_s = 2, L_q = 4, γ = 2, δ = 0.5; every number below is worked out from the formulas."""
    rule = psa(buffer_size=2, queue_size=4, gamma=2.0, delta=0.5)
    rule.add(make_update([2, 0], sketch=[1, 0]))  # m = 4
    assert rule.add(make_update([0, 4], sketch=[1, 0])).tolist() == [1.0, 2.0]  # m = 16

    # The upload that fills both queue and buffer is already softmax-weighted, Temp = γ + δ = 2.5.
    rule.add(make_update([2, 2], sketch=[3, 4]))  # κ = 3/5, m = 8
    assert rule.report == {"kappa": pytest.approx(0.6), "temperature": None}
    model = rule.add(make_update([-2, 0], sketch=[0, 1]))  # κ = 0, m = 4; M0 = 32/4 = 8
    assert rule.thermometer.reference == 8.0
    first = math.exp(0.6 / 2.5) / (math.exp(0.6 / 2.5) + 1)
    assert rule.version_report["temperature"] == 2.5
    assert rule.version_report["weights"] == pytest.approx([first, 1 - first])
    expected = [1 + 2 * first - 2 * (1 - first), 2 + 2 * first]
    np.testing.assert_allclose(model, expected, rtol=1e-6)

    # Queue now 16, 8, 4, 1 -> 8, 4, 1, 1: mean 3.5, Temp = 3.5/8 * 2 + 0.5 = 1.375.
    rule.add(make_update([1, 0], sketch=[1, 0]))  # κ = 1
    rule.add(make_update([0, 1], sketch=[-1, 0]))  # κ = -1
    second = 1 / (1 + math.exp(-2 / 1.375))
    assert rule.version_report["temperature"] == pytest.approx(1.375)
    assert rule.version_report["kappas"] == [1.0, -1.0]
    expected = [expected[0] + second, expected[1] + 1 - second]
    np.testing.assert_allclose(rule.model, expected, rtol=1e-6)


def test_fedpsa_sketches_each_version_once_and_clears_its_buffer():
    calls = []
    rule = psa(calls, buffer_size=2)
    for _ in range(4):
        rule.add(make_update([1, 1], sketch=[1, 1]))
    assert [model.tolist() for model in calls] == [[0, 0], [1, 1]]
    assert rule.buffer == []


def test_fedpsa_does_not_write_into_models_it_was_given_or_handed_out():
    rule = psa(buffer_size=1)
    first = rule.add(make_update([1, 0], sketch=[1, 0]))
    rule.add(make_update([1, 0], sketch=[1, 0]))
    assert ZERO.tolist() == [0, 0]
    assert first.tolist() == [1, 0]


def test_without_thermometer_there_is_no_warm_up_and_the_temperature_is_one():
    rule = psa(buffer_size=2, thermometer=False)
    rule.add(make_update([1, 0], sketch=[1, 0]))
    rule.add(make_update([0, 1], sketch=[0, 1]))
    assert rule.version_report["weights"] == pytest.approx(
        [math.e / (math.e + 1), 1 / (math.e + 1)]
    )


def test_zero_sketches_have_kappa_zero():
    assert cosine(np.zeros(3), np.ones(3)) == 0.0
    assert cosine(np.ones(3), np.zeros(3)) == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_cosine_survives_extreme_sketches(scale):
    a, b = np.array([3.0, 4.0]), np.array([4.0, 3.0])
    assert cosine(a * scale, b) == pytest.approx(24 / 25)


def test_softmax_with_large_kappa_over_temperature():
    assert softmax([1.0, -1.0, 1.0], 1e-300) == [0.5, 0.0, 0.5]
    assert softmax([0.3, -0.2], 0.0) == [1.0, 0.0]
    assert sum(softmax([1.0, 0.999, -1.0], 1e-3)) == pytest.approx(1.0)


def test_thermometer_with_zero_reference_stays_at_gamma_plus_delta():
    thermometer = Thermometer(5.0, 0.5, deque(maxlen=2))
    thermometer.push(0.0)
    assert thermometer.temperature is None
    thermometer.push(0.0)
    thermometer.push(7.0)
    assert thermometer.temperature == 5.5


def test_a_thermometer_takes_the_largest_norms_that_there_are():
    thermometer = Thermometer(5.0, 0.5, deque(maxlen=2))
    for _ in range(3):
        thermometer.push(1.7e308)
    assert thermometer.temperature == 5.5
    thermometer.push(0.0)
    assert thermometer.temperature == 3.0


def test_thermometer_drops_the_oldest():
    thermometer = Thermometer(1.0, 0.0, deque(maxlen=2))
    for norm in (1.0, 3.0, 5.0):
        thermometer.push(norm)
    assert thermometer.temperature == (3 + 5) / 2 / ((1 + 3) / 2)


def test_fedbuff_by_hand_over_three_versions():
    """K = 2, η = 0.5, s = 1/√(1+τ): weights η s / K, not normalised."""
    rule = FedBuffMethod(buffer_size=2, server_lr=0.5).make_rule()
    rule.start(ZERO)
    assert rule.add(make_update([4, 0], staleness=0)) is None
    assert rule.add(make_update([0, 8], staleness=3)).tolist() == [1.0, 1.0]  # 4/4, 8 · ½/4
    rule.add(make_update([4, 4], staleness=0))
    assert rule.add(make_update([4, 4], staleness=0)).tolist() == [3.0, 3.0]
    rule.add(make_update([0, 0], staleness=0))
    model = rule.add(make_update([6, 0], staleness=8))  # 6 · ⅓ / 4
    np.testing.assert_allclose(model, [3.5, 3.0])
    assert rule.version_report["weights"] == pytest.approx([0.25, 0.25 / 3])


def test_fedbuff_without_damping_is_the_uniform_buffer():
    rule = FedBuffMethod(buffer_size=2, staleness_exponent=0.0).make_rule()
    rule.start(ZERO)
    rule.add(make_update([2, 0], staleness=9))
    assert rule.add(make_update([0, 2], staleness=0)).tolist() == [1.0, 1.0]
    assert rule.version_report["effective_number"] == 2


def test_effective_number_of_one_dominant_weight_is_one():
    assert effective_number([1.0, 0.0, 0.0]) == 1.0
    assert effective_number([0.2] * 5) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: psa(buffer_size=0), "buffer_size"),
        (lambda: psa(queue_size=0), "queue_size"),
        (lambda: psa(gamma=-1.0), "gamma"),
        (lambda: psa(delta=math.nan), "delta"),
        (lambda: psa(gamma=0.0, delta=0.0), "gamma=0 and delta=0"),
        (lambda: FedBuffMethod(buffer_size=0), "buffer_size"),
        (lambda: FedBuffMethod(server_lr=0.0), "server_lr"),
        (lambda: FedBuffMethod(staleness_exponent=-0.5), "staleness_exponent"),
        (lambda: FedAsyncMethod(mixing=0.0), "mixing"),
        (lambda: FedAsyncMethod(mixing=1.5), "mixing"),
        (lambda: FedAsyncMethod(staleness="linear"), "staleness"),
        (lambda: FedAsyncMethod(hinge_slope=-1.0), "hinge_slope"),
        (lambda: CA2FLMethod(buffer_size=0), "buffer_size"),
        (lambda: CA2FLMethod(server_lr=math.inf), "server_lr"),
        (lambda: FedFaMethod(buffer_size=0), "buffer_size"),
    ],
)
def test_impossible_parameters_are_refused_by_name(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_work_in_blocks_has_the_bits_of_work_on_whole_vectors():
    generator = np.random.default_rng(0)
    for size in (1, 2**14, 2**14 + 1, 50_000):
        model, *deltas = generator.standard_normal((4, size)).astype(np.float32)
        expected = model.copy()
        for weight, delta in zip((0.2, 0.3, 0.5), deltas, strict=True):
            expected += delta * np.float32(weight)
        found = weighted_step(model, (0.2, 0.3, 0.5), deltas)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
        assert sum(len(model[part]) for part in blocks(size)) == size
