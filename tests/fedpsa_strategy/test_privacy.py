"""Central differential privacy: what is clipped, noised, counted, refused, saved."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error

from fedpsa_strategy import (
    CA2FL,
    DifferentialPrivacy,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFa,
    FedPSA,
    WallClock,
)
from fedpsa_strategy.errors import AllClientsFailedError
from fedpsa_strategy.methods.fedbuff import FedBuffMethod, FedBuffRule
from fedpsa_strategy.server.callbacks.privacy import epsilon_of, weight_of
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.options import Limits
from fedpsa_strategy.server.strategies import strategy_of
from fedpsa_strategy.watch.run_state import RunState
from support.grids import ScriptedGrid, model_arrays, update
from support.runs import Killed, Recorder, in_train, run, virtual

pytest.importorskip("dp_accounting", reason="pip install dp-accounting")


def private(**changes):
    values = {"clip": 0.5, "noise_multiplier": 1.0, "max_participations": 100, "noise_seed": 3}
    return DifferentialPrivacy(**values | changes)


def go(dp, *, behaviour=None, num_versions=4, clients=6, kind=FedBuff, arrays=None, **kwargs):
    recorder = Recorder()
    own = {} if kind is FedAsync else {"buffer_size": 2}
    strategy = kind(
        **own,
        callbacks=[dp] if dp else [],
        listeners=[recorder],
        **virtual(clients) | {"max_in_flight": 3} | kwargs,
    )
    grid = ScriptedGrid(clients, behaviour or (lambda message: update((3.0, 4.0), sketch=None)))
    result = run(strategy, grid, num_versions=num_versions, arrays=arrays)
    return result, recorder, strategy


def weights_of(result):
    return result.arrays["w"].numpy()


# --- The accountant ----------------------------------------------------------------------------


def delta_of(sigma, epsilon):
    """The exact curve of the Gaussian mechanism (Balle and Wang, 2018)."""

    def phi(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    return phi(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * phi(
        -1 / (2 * sigma) - epsilon * sigma
    )


@pytest.mark.parametrize(("z", "n"), [(1.0, 1), (2.0, 10), (4.0, 100), (0.7, 3)])
def test_epsilon_is_that_of_composed_gaussians(z, n):
    epsilon = epsilon_of(z, n, 1e-5)
    assert delta_of(z / math.sqrt(n), epsilon) == pytest.approx(1e-5, rel=1e-3)


def test_epsilon_agrees_with_an_accountant_that_composes_step_by_step():
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant().compose(GaussianDpEvent(3.0), 20)
    loose = accountant.get_epsilon(1e-5)
    assert 0.8 * loose < epsilon_of(3.0, 20, 1e-5) <= loose


# --- Clipping and noise ------------------------------------------------------------------------


def test_updates_are_clipped_and_versions_noised_as_told():
    size = 20_000
    arrays = model_arrays(np.zeros(size))
    big = np.full(size, 1.0)  # of norm 141
    behaviour = lambda message: update(big, sketch=None)  # noqa: E731
    exact, _, _ = go(
        private(noise_multiplier=1e-6), behaviour=behaviour, num_versions=1, arrays=arrays
    )
    # Two updates of norm 0.5 in the same direction, of weight 1/2 each.
    assert np.linalg.norm(weights_of(exact)) == pytest.approx(0.5, rel=1e-3)
    noisy, recorder, _ = go(private(), behaviour=behaviour, num_versions=1, arrays=arrays)
    noise = weights_of(noisy) - weights_of(exact)
    expected = 1.0 * 0.5 * (1 / 2)  # z C η/K
    assert noise.std() == pytest.approx(expected, rel=0.03)
    assert abs(noise.mean()) < 5 * expected / math.sqrt(size)
    assert [event.squared_norm for event in recorder.of("upload")] == pytest.approx([0.25] * 2)


def test_the_rule_goes_on_from_the_noised_model():
    result, _, strategy = go(private())
    np.testing.assert_array_equal(strategy.rule.model, weights_of(result))
    np.testing.assert_array_equal(strategy.state.model.vector, weights_of(result))
    small, _, _ = go(private(noise_multiplier=1e-9))
    assert np.linalg.norm(weights_of(small)) == pytest.approx(4 * 0.5, rel=0.5)  # four steps


def test_the_noise_is_secret_unless_it_is_seeded():
    first, second = (weights_of(go(private(noise_seed=None))[0]) for _ in range(2))
    assert (first != second).all()
    first, second = (weights_of(go(private(noise_seed=5))[0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (weights_of(go(private(noise_seed=6))[0]) != first).all()


def test_other_updates_get_other_noise():
    """Else somebody who sees both models would see the difference of the updates."""
    found = []
    for value in (0.1, 0.2):
        behaviour = lambda message, value=value: update((value, 0.0), sketch=None)  # noqa: E731
        found.append(weights_of(go(private(), behaviour=behaviour, num_versions=1)[0]))
    difference = found[1] - found[0]
    assert abs(difference[1]) > 1e-6  # where the updates are equal


def test_arrays_that_are_not_trained_stay_as_they_are():
    arrays = model_arrays((0.0, 0.0), frozen=np.ones(3, np.float32))
    behaviour = lambda message: update(frozen=np.full(3, 7.0, np.float32), sketch=None)  # noqa: E731
    result, recorder, _ = go(
        private(), behaviour=behaviour, arrays=arrays, trainable=["w"], num_versions=2
    )
    np.testing.assert_array_equal(result.arrays["frozen"].numpy(), np.ones(3))
    assert not recorder.of("reject")


# --- Participations ----------------------------------------------------------------------------


def test_who_has_used_up_its_participations_is_not_asked_again():
    result, recorder, _ = go(private(max_participations=2), num_versions=100)
    uploads = Counter(event.client for event in recorder.of("upload"))
    assert set(uploads.values()) == {2}
    assert not recorder.of("reject")
    end = recorder.of("end")[0]
    assert end.reason == "all clients have used up their 2 participations"
    assert end.uploads == 12
    assert end.version == 6
    assert result.arrays is not None


def test_two_uploads_in_one_version_count_four_times():
    # One client alone: both uploads of every version are its own.
    _, recorder, _ = go(private(max_participations=9), clients=1, num_versions=100)
    reports = [event.report for event in recorder.of("aggregate")]
    assert [report["participations"] for report in reports] == [4, 8]
    assert reports[-1]["epsilon"] == epsilon_of(1.0, 8, 1e-5)
    assert len(recorder.of("upload")) == 5  # the last one waits for another, which may not come
    assert recorder.of("end")[0].reason.startswith("all clients have used up")


def test_a_client_that_may_not_meet_itself_is_back_in_the_next_version():
    _, recorder, _ = go(private(max_participations=3), clients=2, max_in_flight=1, num_versions=100)
    uploads = Counter(event.client for event in recorder.of("upload"))
    assert uploads == {0: 3, 1: 3}
    assert not recorder.of("reject")


def test_what_is_spent_is_in_the_events_and_the_summary():
    _, recorder, _ = go(private())
    state = RunState()
    for event in recorder:
        state(event)
    spent = state.numbers()["privacy"]
    counts = Counter(event.client for event in recorder.of("upload"))
    assert spent == {
        "epsilon": epsilon_of(1.0, max(counts.values()), 1e-5),
        "delta": 1e-5,
        "epsilon_bound": epsilon_of(1.0, 100, 1e-5),
        "participations": max(counts.values()),
    }
    assert spent["epsilon"] < spent["epsilon_bound"]
    plain = RunState()
    for event in go(None)[1]:
        plain(event)
    assert "privacy" not in plain.numbers()


def test_the_second_task_of_a_client_does_not_count_where_one_was_left():
    dp = private(max_participations=1)
    _, recorder, strategy = go(
        dp,
        clients=2,
        clock=WallClock(),
        num_clients=None,
        max_in_flight=2,
        queued_per_node=1,
        num_versions=100,
    )
    assert Counter(event.client for event in recorder.of("upload")) == {0: 1, 1: 1}
    assert {event.reason for event in recorder.of("reject")} == {
        "the client has used up its 1 participations"
    }
    assert not recorder.of("quarantine")
    assert [client.failures for client in strategy.state.clients] == [0, 0]
    assert recorder.of("end")[0].reason == "all clients have used up their 1 participations"


def test_who_has_used_up_its_part_stays_left_out_after_a_task_that_expired():
    """Else it is given tasks for ever, all of them ignored, and the run never ends."""
    asked = Counter()

    def delay(message):
        if not in_train(message):
            return 0.1
        node = grid.partition(message)
        asked[node] += 1
        if node:
            return 45.0
        return 1e9 if asked[node] == 31 else 1.0  # its 31st task waits while it does the 30th

    grid = ScriptedGrid(3, lambda message: update(sketch=None), delay=delay)
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=1,
        queued_per_node=1,
        fraction_train=1.0,
        callbacks=[private(max_participations=30)],
        limits=Limits(time_limit=5000.0),
        listeners=[recorder],
    )
    run(strategy, grid, num_versions=1000, timeout=50.0)
    assert recorder.of("end")[0].reason == "all clients have used up their 30 participations"
    reasons = Counter(event.reason for event in recorder.of("reject"))
    assert reasons["no reply within 50 s"] == 1
    assert sum(reasons.values()) <= 5


def test_a_run_ends_when_only_failing_clients_may_take_part_any_more():
    """With the virtual clock nobody's pause would ever end."""

    def behaviour(message):
        if in_train(message) and grid.partition(message) == 0:
            return Error(code=1, reason="it broke")
        return update(sketch=None)

    grid = ScriptedGrid(4, behaviour)
    strategy = FedBuff(
        buffer_size=1,
        fraction_train=1.0,
        callbacks=[private(max_participations=2)],
        limits=Limits(time_limit=1000.0),
        listeners=[],
        **virtual(4),
    )
    with pytest.raises(AllClientsFailedError, match="3x client error: it broke"):
        run(strategy, grid, num_versions=100)
    assert strategy.state.uploads == 6


# --- Resuming ----------------------------------------------------------------------------------


def resumable(tmp_path, dp, resume=None, die_after=10**9, store=True, **kwargs):
    answered = []

    def behaviour(message):
        answered.append(message)
        if len(answered) > die_after:
            raise Killed
        values = np.random.default_rng(message.content["config"]["seed"]).normal(size=2)
        return update(values, sketch=None)

    checkpointer = Checkpointer(
        CheckpointStore(tmp_path) if store else None, every_versions=1, resume_from=resume
    )
    return go(dp, behaviour=behaviour, num_versions=8, checkpointer=checkpointer, **kwargs)


def test_a_resumed_run_ends_in_the_same_bits_and_counts_on(tmp_path):
    dp = private(noise_seed=None)
    with pytest.raises(Killed):
        resumable(tmp_path, dp, die_after=9)
    saved = CheckpointStore(tmp_path).load_newest()
    assert 0 < saved["version"] < 8
    # Twice from the same checkpoint: the secret is in it.
    first, second = (
        resumable(tmp_path, private(noise_seed=None), resume=saved, store=False) for _ in range(2)
    )
    np.testing.assert_array_equal(weights_of(first[0]), weights_of(second[0]))
    seeded = resumable(tmp_path, private(), store=False)
    with pytest.raises(Killed):
        resumable(tmp_path / "b", private(), die_after=9)
    saved = CheckpointStore(tmp_path / "b").load_newest()
    resumed = resumable(tmp_path / "b", private(), resume=saved, store=False)
    np.testing.assert_array_equal(weights_of(resumed[0]), weights_of(seeded[0]))
    last = [found[1].of("aggregate")[-1].report["participations"] for found in (seeded, resumed)]
    assert last[0] == last[1]


def test_the_bound_holds_over_a_resume(tmp_path):
    with pytest.raises(Killed):
        resumable(tmp_path, private(max_participations=2), die_after=9)
    saved = CheckpointStore(tmp_path).load_newest()
    _, recorder, _ = resumable(tmp_path, private(max_participations=2), resume=saved, store=False)
    assert recorder.of("end")[0].uploads == 12


def test_a_run_without_privacy_is_not_gone_on_with_nor_one_with_other_settings(tmp_path):
    with pytest.raises(Killed):
        resumable(tmp_path, None, die_after=9)
    saved = CheckpointStore(tmp_path).load_newest()
    with pytest.raises(ValueError, match="which was made without it"):
        resumable(tmp_path, private(), resume=saved, store=False)
    with pytest.raises(Killed):
        resumable(tmp_path / "b", private(), die_after=9)
    saved = CheckpointStore(tmp_path / "b").load_newest()
    with pytest.raises(ValueError, match="the checkpoint was made with"):
        resumable(tmp_path / "b", private(clip=0.6), resume=saved, store=False)


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CA2FL, FedAvg, FedFa])
def test_methods_whose_sensitivity_is_not_known_are_refused(kind):
    strategy = kind(callbacks=[private()], **virtual(3))
    with pytest.raises(ValueError, match=f"is not known for {strategy.method.label}: it may"):
        strategy.begin(model_arrays())


def test_fedpsa_is_refused_because_updates_weigh_each_other():
    strategy = FedPSA(sketch_fn=lambda arrays: [1.0, 0.0], callbacks=[private()], **virtual(3))
    with pytest.raises(ValueError, match=r"not known for FedPSA: .* the weights of others"):
        strategy.begin(model_arrays())


def test_what_is_known_of_one_rule_is_not_believed_of_another():
    class Summed(FedBuffRule):
        """Does whatever it likes."""

    @dataclass(frozen=True)
    class SummedMethod(FedBuffMethod):
        rule = Summed

    @dataclass(frozen=True)
    class Renamed(FedBuffMethod):
        """The same rule under another name."""

    @dataclass(frozen=True)
    class Known(SummedMethod):
        @property
        def largest_weight(self):
            return 0.5

    weights = [weight_of(method()) for method in (FedBuffMethod, SummedMethod, Renamed, Known)]
    assert weights == [0.2, None, 0.2, 0.5]
    with pytest.raises(ValueError, match="is not known for SummedMethod"):
        strategy_of(SummedMethod)(callbacks=[private()], **virtual(3)).begin(model_arrays())


def test_statistics_of_clients_data_are_refused():
    arrays = ArrayRecord(
        {**model_arrays(), **model_arrays(**{"bn.running_var": np.ones(2, np.float32)})}
    )
    with pytest.raises(ValueError, match=r"bn\.running_var.* GroupNorm or LayerNorm"):
        FedBuff(callbacks=[private()], **virtual(3)).begin(arrays)


def test_fedasync_is_noised_with_every_upload():
    result, recorder, strategy = go(private(), kind=FedAsync, num_versions=3)
    assert strategy.rule.settings.largest_weight == 0.6
    assert len(recorder.of("upload")) == 3
    assert np.isfinite(weights_of(result)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip", 0), ("noise_multiplier", -1), ("max_participations", 0), ("delta", 0)],
)
def test_arguments_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}: must be"):
        private(**{name: value})
