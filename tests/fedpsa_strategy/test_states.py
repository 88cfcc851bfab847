"""Arrays that are not trained travel as values and stay within what clients hold, on every method;
clients that know nothing of this library are understood."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch import nn

from fedpsa_strategy import (
    CA2FL,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFa,
    FedPAC,
    FedPSA,
    Midpoint,
    Probe,
    UniformLatency,
    fedpsa_mod,
    make_reply,
)
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.options import Training
from fedpsa_strategy.wire.contract import MARK, STATES, trainable_keys
from fedpsa_strategy.wire.states import check_states, combine_states
from support.grids import FlowersGrid, ScriptedGrid, as_update, model_arrays, update
from support.runs import Recorder, recorded, run, virtual

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS = {
    "fedpsa": None,
    "fedbuff": FedBuff,
    "ca2fl": CA2FL,
    "midpoint": Midpoint,
    "fedasync": FedAsync,
    "fedfa": FedFa,
    "fedavg": FedAvg,
    "fedpac": None,
}


class Normed1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class Normed2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


SHAPES = {Normed1d: (6,), Normed2d: (1, 6, 6)}


def make(net, seed=0):
    torch.manual_seed(seed)
    return net()


def make_strategy(method, net, **kwargs):
    if method == "fedpsa":
        probe = Probe.gaussian(net(), SHAPES[net], num_classes=3, size=8)
        return FedPSA(sketch_fn=probe.sketch_fn(net()), queue_size=4, **kwargs)
    if method == "fedpac":
        keys = ["head.weight", "head.bias"]
        return FedPAC(head_keys=keys, num_classes=3, num_features=5, **kwargs)
    return METHODS[method](**kwargs)


def local_training(net, message, client, scale=1.0):
    """Some steps on data of this client's own mean and spread."""
    model = make(net)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(message.content["config"]["seed"] % 2**32)
    model.train()
    for _ in range(5):
        x = scale * (client + 1) * torch.randn(8, *SHAPES[net], generator=generator) + client
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 3)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return model


@pytest.mark.parametrize(("net", "update_dtype"), [(Normed1d, "float32"), (Normed2d, "float16")])
@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_stay_within_what_clients_hold(method, update_dtype, net):
    held = {}

    def behaviour(message):
        model = local_training(net, message, grid.partition(message))
        for key, value in model.state_dict().items():
            held.setdefault(key, []).append(value.clone())
        reply = make_reply(message, model, num_examples=8)
        if "fedpac" in message.content:
            rng = np.random.default_rng(message.content["config"]["seed"])
            reply.content["fedpac"] = ArrayRecord(
                {
                    "centroids": torch.from_numpy(rng.normal(size=(3, 5)).astype(np.float32)),
                    "features": torch.from_numpy(rng.normal(size=(3, 5)).astype(np.float32)),
                    "class-counts": torch.tensor([3, 3, 2]),
                    "variance": torch.tensor(0.5),
                }
            )
        return reply.content

    versions = []

    def evaluate(version, arrays):
        model = make(net).eval()
        model.load_state_dict(arrays.to_torch_state_dict())
        x = torch.randn(16, *SHAPES[net], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), torch.arange(16) % 3)
        assert torch.isfinite(loss)
        if version:
            versions.append(model.state_dict())
        return MetricRecord({"loss": float(loss)})

    grid = ScriptedGrid(6, behaviour)
    strategy = make_strategy(
        method,
        net,
        max_in_flight=4,
        training=Training(update_dtype=update_dtype),
        **virtual(6, UniformLatency(seed=2)),
    )
    recorder = recorded(
        strategy,
        grid,
        num_versions=8,
        arrays=ArrayRecord(make(net).state_dict()),
        evaluate_fn=evaluate,
        config={"lr": 0.1},
    )
    assert not recorder.of("reject")
    assert len(versions) == 8
    for key in ("encoder.1.running_mean", "encoder.1.running_var"):
        start = make(net).state_dict()[key]
        lowest = torch.stack([*held[key], start]).amin(0)
        highest = torch.stack([*held[key], start]).amax(0)
        for state in versions:
            assert (state[key] >= lowest).all()
            assert (state[key] <= highest).all()
        assert not torch.equal(versions[-1][key], start)
    counts = [int(state["encoder.1.num_batches_tracked"]) for state in versions]
    assert set(counts) <= {int(value) for value in held["encoder.1.num_batches_tracked"]}


def test_resnet18_learns_for_a_few_versions():
    from task.torchvision_import import import_torchvision_datasets

    import_torchvision_datasets()  # works beside any build of torch
    from torchvision.models import resnet18

    def net():
        torch.manual_seed(0)
        return resnet18(num_classes=3)

    SHAPES[net] = (3, 16, 16)
    probe = Probe.gaussian(net(), (3, 16, 16), num_classes=3, size=2)
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(net()), buffer_size=2, max_in_flight=2, **virtual(3)
    )

    def behaviour(message):
        model = local_training(net, message, grid.partition(message))
        return make_reply(message, model, num_examples=8).content

    grid = ScriptedGrid(3, behaviour)
    result = run(strategy, grid, num_versions=2, arrays=ArrayRecord(net().state_dict()))
    for key, value in result.arrays.to_torch_state_dict().items():
        assert torch.isfinite(value.float()).all(), key
        if key.endswith("running_var"):
            assert (value >= 0).all(), key


# --- The weights, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_rule", "means", "expected"),
    [
        # τ = 0, 0: equal weights whatever the server's rate.
        (lambda **kw: FedBuff(buffer_size=2, server_lr=3.0, **kw), [2.0, 6.0], [4.0]),
        (lambda **kw: CA2FL(buffer_size=2, **kw), [2.0, 6.0], [4.0]),
        (lambda **kw: Midpoint(buffer_size=2, **kw), [2.0, 6.0], [4.0]),
        # α_t = ½ for fresh uploads: 10 -> 6 -> 6.
        (
            lambda **kw: FedAsync(mixing=0.5, staleness="constant", **kw),
            [2.0, 6.0],
            [6.0, 6.0],
        ),
        # A window of two: nothing, (2 + 6) / 2, (6 + 20) / 2.
        (lambda **kw: FedFa(buffer_size=2, **kw), [2.0, 6.0, 20.0], [4.0, 13.0]),
    ],
    ids=["fedbuff", "ca2fl", "midpoint", "fedasync", "fedfa"],
)
def test_whose_states_a_version_takes(make_rule, means, expected):
    values = iter(means)
    grid = ScriptedGrid(2, lambda message: update(mean=np.float32([next(values)])))
    seen = []

    def evaluate(version, arrays):
        seen.append(float(arrays["mean"].numpy()[0]))

    strategy = make_rule(max_in_flight=1, trainable=["w"], **virtual(2))
    arrays = model_arrays(mean=np.float32([10.0]))
    run(strategy, grid, num_versions=len(expected), arrays=arrays, evaluate_fn=evaluate)
    assert seen == [10.0, *expected]


def test_fedavg_weighs_states_by_the_amount_of_data():
    def behaviour(message):
        first = grid.partition(message) == 0
        mean = np.float32([1.0 if first else 5.0])
        return update(num_examples=30 if first else 10, mean=mean)

    grid = ScriptedGrid(2, behaviour)
    strategy = FedAvg(fraction_train=1.0, trainable=["w"], **virtual(2))
    result = run(strategy, grid, num_versions=1, arrays=model_arrays(mean=np.float32([9.0])))
    assert result.arrays["mean"].numpy().tolist() == [2.0]


floats = arrays_of.arrays(np.float32, 3, elements=st.floats(-(2.0**60), 2.0**60, width=32))


@given(
    values=st.lists(floats, min_size=2, max_size=6),
    raw=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_a_combination_never_leaves_what_was_held(values, raw):
    old, *uploads = ({"mean": value} for value in values)
    weights = [weight / max(sum(raw), 1.0) for weight in raw][: len(uploads)]
    combined = combine_states(old, uploads, weights)["mean"]
    assert combined.dtype == np.float32
    assert (combined >= np.min(values, axis=0)).all()
    assert (combined <= np.max(values, axis=0)).all()


@pytest.mark.parametrize(
    ("key", "values", "reason"),
    [
        ("n.running_mean", [1e18, 0.0], "1e\\+18: more than"),
        ("n.running_mean", [np.nan, 0.0], "not finite"),
        ("n.running_var", [-0.1, 1.0], "negative"),
    ],
)
def test_states_that_nobody_can_hold_are_refused(key, values, reason):
    start = {key: np.ones(2, np.float32)}
    check_states({key: np.float32([5.0, 0.0])}, start)
    with pytest.raises(InvalidReplyError, match=f"{key}.*{reason}"):
        check_states({key: np.float32(values)}, start)


# --- What a reply carries ----------------------------------------------------------------------


def quickstart(mods):
    """A client as Flower's tutorials write it, with its whole model in the reply."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        model = local_training(Normed1d, message, context.node_config["partition-id"])
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"train_loss": 0.5, "num-examples": 8}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def grid_of(app, kind=ScriptedGrid):
    contexts = {}

    def behaviour(message):
        client = grid.partition(message)
        node = {"partition-id": client}
        context = contexts.setdefault(client, Context(1, 1, node, RecordDict(), {}))
        return app(message, context).content

    grid = kind(4, behaviour)
    return grid


def flat(arrays):
    return {key: array.numpy() for key, array in arrays.items()}


@pytest.mark.parametrize("method", ["fedbuff", "ca2fl", "midpoint", "fedasync", "fedfa", "fedavg"])
def test_methods_without_a_sketch_need_nothing_at_the_client(method):
    def go(mods):
        strategy = make_strategy(method, Normed1d, max_in_flight=2, **virtual(4))
        arrays = ArrayRecord(make(Normed1d).state_dict())
        result = run(
            strategy, grid_of(quickstart(mods)), num_versions=6, arrays=arrays, config={"lr": 0.1}
        )
        return flat(result.arrays)

    plain, marked = go([]), go([fedpsa_mod(Normed1d)])
    for key, values in plain.items():
        np.testing.assert_array_equal(values, marked[key], err_msg=key)
    norm = np.sqrt(sum(np.square(value).sum() for key, value in plain.items() if "num_" not in key))
    assert norm < 50


def test_flowers_own_fedavg_is_not_disturbed_by_a_mod_that_was_left_in():
    class Seeded(FlowersFedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            config["seed"] = server_round
            return super().configure_train(server_round, arrays, config, grid)

    def go(mods):
        strategy = Seeded(fraction_train=1.0, fraction_evaluate=0.0)
        arrays = ArrayRecord(make(Normed1d).state_dict())
        grid = grid_of(quickstart(mods), FlowersGrid)
        result = strategy.start(grid, arrays, num_rounds=3)
        return flat(result.arrays)

    plain, left_in = go([]), go([fedpsa_mod(Normed1d)])
    for key, values in plain.items():  # Flower sums in any order
        np.testing.assert_allclose(values, left_in[key], rtol=1e-3, atol=1e-5, err_msg=key)


def test_a_missing_sketch_is_refused_with_what_to_do():
    with pytest.raises(Exception, match="add fedpsa_mod to the ClientApp"):
        run(
            make_strategy("fedpsa", Normed1d, max_in_flight=2, **virtual(4)),
            grid_of(quickstart([])),
            arrays=ArrayRecord(make(Normed1d).state_dict()),
            config={"lr": 0.1},
        )


def test_what_making_a_sketch_cost_is_not_among_the_users_metrics():
    recorder = Recorder()
    result = run(
        make_strategy("fedpsa", Normed1d, max_in_flight=2, listeners=[recorder], **virtual(4)),
        grid_of(quickstart([fedpsa_mod(Normed1d)])),
        num_versions=2,
        arrays=ArrayRecord(make(Normed1d).state_dict()),
        config={"lr": 0.1},
    )
    assert result.train_metrics_clientapp[1].keys() == {"train_loss"}
    assert all(event.metrics["sensitivity-seconds"] > 0 for event in recorder.of("upload"))


def test_a_frozen_array_that_the_server_takes_for_trained_is_a_clear_refusal():
    metrics = MetricRecord({"num-examples": 1})
    content = as_update({"w": np.zeros(2, np.float32)}, {"head": np.ones(1, np.float32)}, metrics)
    grid = ScriptedGrid(1, lambda message: content)
    with pytest.raises(Exception, match=r"does not train \['head'\].*`trainable`"):
        run(FedBuff(**virtual(1)), grid, arrays=model_arrays(head=np.ones(1, np.float32)))


@pytest.mark.parametrize(
    "mark", [ConfigRecord({"arrays": "whole"}), MetricRecord({"arrays": 1}), ConfigRecord()]
)
def test_an_unknown_mark_is_refused(mark):
    content = update()
    content[MARK] = mark
    with pytest.raises(Exception, match="record 'fedpsa' must be a config"):
        run(FedBuff(**virtual(1)), ScriptedGrid(1, lambda message: content))


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x))

    SHAPES[Tied] = (3,)
    probe = Probe.gaussian(Tied(), (3,), num_classes=3, size=4)
    strategy = FedPSA(sketch_fn=probe.sketch_fn(Tied()), max_in_flight=2, **virtual(3))

    def behaviour(message):
        model = local_training(Tied, message, grid.partition(message))
        return make_reply(message, model, num_examples=8).content

    grid = ScriptedGrid(3, behaviour)
    result = run(strategy, grid, num_versions=3, arrays=ArrayRecord(make(Tied).state_dict()))
    final = result.arrays.to_torch_state_dict()
    assert torch.equal(final["encoder.weight"], final["decoder.weight"])
    assert trainable_keys(Tied()) == [
        "encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias",
    ]  # fmt: skip
    assert STATES not in grid.behaviour(grid.sent[-1])
