"""The peers on the loop: rounds, clocks, validation, what travels, and Flower's own FedAvg."""

import flwr.serverapp.strategy
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedpsa_strategy import (
    CA2FL,
    ConstantLatency,
    FedAsync,
    FedAvg,
    FedBuff,
    FedPAC,
    Midpoint,
    UniformLatency,
)
from fedpsa_strategy.errors import NotRunningError
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.options import Failures
from fedpsa_strategy.server.strategies import strategy_of
from support.grids import (
    FlowersGrid,
    RealTime,
    ScriptedGrid,
    as_update,
    model_arrays,
    statistics,
    update,
)
from support.runs import in_train, recorded, run, virtual


class ByClient(ConstantLatency):
    """Client i takes i + 1 units."""

    def __call__(self, client, sequence):
        return client + 1.0


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client():
    strategy = FedAvg(fraction_train=1.0, **virtual(4, ByClient()))
    recorder = recorded(strategy, ScriptedGrid(4), num_versions=3)
    assert [event.time for event in recorder.of("aggregate")] == [4.0, 8.0, 12.0]
    assert [event.staleness for event in recorder.of("upload")] == [0] * 12


def test_a_synchronous_round_samples_its_clients_together():
    grid = ScriptedGrid(10, delay=lambda m: 1.0 + grid.partition(m))
    recorder = recorded(FedAvg(fraction_train=0.3), grid, num_versions=5)
    assert grid.most_outstanding == 3
    rounds = [
        {event.client for event in recorder.of("dispatch") if event.version == version}
        for version in range(5)
    ]
    assert all(len(clients) == 3 for clients in rounds)
    assert len(set(map(frozenset, rounds))) > 1


def test_a_round_goes_on_without_clients_that_fail():
    def behaviour(message):
        if grid.partition(message) == 1:
            return Error(code=2, reason="broken")
        return update([2.0, 4.0]) if grid.partition(message) == 0 else update([4.0, 8.0])

    grid = ScriptedGrid(3, behaviour)
    strategy = FedAvg(fraction_train=1.0, failures=Failures(max_failures=5), **virtual(3))
    result = run(strategy, grid, num_versions=1)
    assert result.arrays["w"].numpy().tolist() == [3.0, 6.0]
    assert result.train_metrics_clientapp[1]["train-loss"] == 0.5


def test_a_round_ends_also_when_its_last_reply_never_comes():
    grid = ScriptedGrid(2)
    grid.delay = lambda m: 1e9 if in_train(m) and grid.partition(m) == 1 else 0.1
    result = run(FedAvg(fraction_train=1.0), grid, num_versions=2, timeout=5.0)
    assert result.arrays["w"].numpy().tolist() == [2.0, 2.0]


def pac(**kwargs):
    return FedPAC(head_keys=["head"], num_classes=2, num_features=1, **kwargs)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"fedpsa"}))
def test_every_method_is_deterministic_whatever_the_order_of_arrival(method):
    make = pac if method == "fedpac" else strategy_of(METHODS[method])

    def behaviour(message):
        seed = message.content["config"]["seed"]
        rng = np.random.default_rng(seed)
        start = message.content["arrays"]["w"].numpy()
        content = update(
            rng.normal(size=2) - 0.1 * start, head=rng.normal(size=1).astype(np.float32)
        )
        if "fedpac" in message.content:
            content["fedpac"] = statistics(rng)
        return content

    def go(delay):
        grid = ScriptedGrid(6, behaviour, delay=delay)
        strategy = make(max_in_flight=3, seed=5, **virtual(6, UniformLatency(seed=2)))
        arrays = model_arrays([1.0, 2.0], head=np.ones(1, np.float32))
        return run(strategy, grid, num_versions=8, arrays=arrays).arrays

    first = go(lambda message: 0.01)
    second = go(lambda message: 0.5 + 13 * int(message.metadata.message_id[1:]) % 7)
    for key in first:
        assert first[key].data == second[key].data
        assert np.isfinite(first[key].numpy()).all()


def test_fedpac_sends_each_client_its_own_head_and_the_centroids():
    seen = {}

    def behaviour(message):
        client = grid.partition(message)
        seen.setdefault(client, []).append(message.content)
        content = update([1.0, 1.0], head=np.array([1.0 + client], np.float32))
        content["fedpac"] = statistics(
            np.random.default_rng(0), features=np.full((2, 1), 100.0 * client, np.float32)
        )
        return content

    grid = ScriptedGrid(2, behaviour)
    arrays = model_arrays([0.0, 0.0], head=np.zeros(1, np.float32))
    result = run(pac(fraction_train=1.0, **virtual(2)), grid, num_versions=2, arrays=arrays)
    # Features far apart: every client keeps its own head, the global model has the mean one.
    assert [content["arrays"]["head"].numpy()[0] for content in seen[0]][:2] == [0.0, 1.0]
    assert [content["arrays"]["head"].numpy()[0] for content in seen[1]][:2] == [0.0, 2.0]
    assert seen[0][0]["fedpac"]["known"].numpy().tolist() == [0, 0]
    assert seen[0][1]["fedpac"]["known"].numpy().tolist() == [1, 1]
    assert seen[0][1]["config"]["head-epochs"] == 1
    np.testing.assert_allclose(result.arrays["head"].numpy(), [3.0])  # mean of 2 and 4
    np.testing.assert_allclose(result.arrays["w"].numpy(), [2.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "must hold"),
        ({"centroids": np.zeros((3, 1), np.float32)}, "shape"),
        ({"features": np.full((2, 1), np.nan, np.float32)}, "not finite"),
        ({"class-counts": np.array([-1, 3])}, "negative"),
        ({"class-counts": np.array([0, 0])}, "negative"),
        ({"class-counts": np.array([2**62, 2**62])}, "negative"),  # the sum overflows
        ({"class-counts": np.array([3, 8])}, "sum to 11, of 10 examples"),
        ({"centroids": np.full((2, 1), 1e30, np.float32)}, "which no encoder makes"),
        ({"variance": np.asarray(-1.0, np.float32)}, "negative"),
        ({"variance": np.asarray(1.0, np.float64)}, "dtype"),
    ],
)
def test_fedpac_refuses_bad_statistics(changes, reason):
    def behaviour(message):
        content = update(head=np.ones(1, np.float32))
        bad = grid.partition(message) == 0
        if not (bad and changes is None):
            content["fedpac"] = statistics(np.random.default_rng(0), **(changes if bad else {}))
        return content

    grid = ScriptedGrid(2, behaviour)
    arrays = model_arrays([0.0, 0.0], head=np.zeros(1, np.float32))
    strategy = pac(fraction_train=1.0, **virtual(2))
    recorder = recorded(strategy, grid, num_versions=2, arrays=arrays)
    assert {event.client for event in recorder.of("reject")} == {0}
    assert all(reason in event.reason for event in recorder.of("reject"))


def test_fedpac_refuses_a_model_without_an_encoder_before_the_first_message():
    grid = ScriptedGrid(1)
    for keys, text in ((["w"], "encoder"), (["nothing"], "not among")):
        strategy = FedPAC(head_keys=keys, num_classes=2, num_features=1, **virtual(1))
        with pytest.raises(ValueError, match=text):
            run(strategy, grid)
    assert grid.sent == []


def test_fedasync_tells_its_clients_the_proximal_weight():
    grid = ScriptedGrid(2)
    run(FedAsync(proximal=0.25, **virtual(2)), grid, num_versions=2)
    configs = [message.content["config"] for message in grid.sent if in_train(message)]
    assert all(config["proximal"] == 0.25 for config in configs)


@pytest.mark.parametrize("method", [CA2FL, Midpoint])
def test_the_memory_of_clients_is_in_a_file_when_asked_for(tmp_path, method):
    def go(**kwargs):
        grid = ScriptedGrid(4, lambda m: update([m.content["config"]["seed"] % 13, 1.0]))
        strategy = method(buffer_size=2, max_in_flight=2, **virtual(4), **kwargs)
        return run(strategy, grid, num_versions=6).arrays["w"].data

    assert go() == go(memory_path=tmp_path / "memory.bin")
    assert (tmp_path / "memory.bin").stat().st_size > 0


# --- Flower's own FedAvg -----------------------------------------------------------------------


def test_fedavg_agrees_with_flowers_own_fedavg():
    """The same torch clients, seeds and data sizes: the same global model to float32 rounding."""
    torch.manual_seed(0)
    data = [(torch.randn(5 + 3 * i, 4), torch.randn(5 + 3 * i, 1)) for i in range(3)]
    initial = ArrayRecord(torch.nn.Linear(4, 1).state_dict())

    def client(message: Message, as_delta: bool) -> RecordDict:
        model = torch.nn.Linear(4, 1)
        before = message.content["arrays"].to_torch_state_dict()
        model.load_state_dict(before)
        x, y = data[sorted(grid.nodes).index(message.metadata.dst_node_id)]
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        order = torch.Generator().manual_seed(message.content["config"]["server-round"])
        for i in torch.randperm(len(x), generator=order):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[i]), y[i]).backward()
            optimizer.step()
        after = model.state_dict()
        metrics = MetricRecord({"num-examples": len(x)})
        if as_delta:
            return as_update({key: after[key] - before[key] for key in after}, {}, metrics)
        return RecordDict({"arrays": ArrayRecord(after), "metrics": metrics})

    grid = FlowersGrid(3, lambda message: client(message, as_delta=False))
    flowers = flwr.serverapp.strategy.FedAvg(fraction_evaluate=0.0).start(
        grid, initial, num_rounds=5, train_config=ConfigRecord({"lr": 0.1})
    )
    for as_delta in (True, False):  # also with a client that knows nothing of this library
        grid = ScriptedGrid(3, lambda message: client(message, as_delta))  # noqa: B023
        ours = run(
            FedAvg(fraction_train=1.0, **virtual(3)),
            grid,
            num_versions=5,
            arrays=initial,
            config={"lr": 0.1},
        )
        moved = 0.0
        for key, theirs in flowers.arrays.items():
            np.testing.assert_allclose(ours.arrays[key].numpy(), theirs.numpy(), rtol=1e-5)
            moved += np.abs(ours.arrays[key].numpy() - initial[key].numpy()).sum()
        assert moved > 0.1


# --- Somebody else's loop ----------------------------------------------------------------------

WRAPPERS = {
    "DifferentialPrivacyServerSideFixedClipping": {"clipping_norm": 1.0},
    "DifferentialPrivacyClientSideFixedClipping": {"clipping_norm": 1.0},
    "DifferentialPrivacyServerSideAdaptiveClipping": {},
    "DifferentialPrivacyClientSideAdaptiveClipping": {},
}


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_flowers_privacy_wrappers_are_refused_before_any_message(wrapper, used_before):
    grid = FlowersGrid(2, time=RealTime())
    strategy = FedBuff(buffer_size=1, max_in_flight=2)
    if used_before:
        strategy.start(grid, model_arrays(), num_rounds=1)
        grid.sent.clear()
    wrap = getattr(flwr.serverapp.strategy, wrapper)
    wrapped = wrap(strategy, noise_multiplier=0.1, num_sampled_clients=2, **WRAPPERS[wrapper])
    with pytest.raises(NotRunningError, match=r"asynchronous loop.*start\(\).*privacy wrappers"):
        wrapped.start(grid, model_arrays(), num_rounds=1)
    assert grid.sent == []
