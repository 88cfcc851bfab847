"""Clients that train and send some of a model; the rest is on both sides and never travels."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional

from fedpsa_strategy import (
    FedBuff,
    FedPSA,
    Probe,
    arrays_of,
    fedpsa_mod,
    load_arrays,
    make_reply,
    sensitivity,
)
from fedpsa_strategy.probe.probe import ProbeError
from fedpsa_strategy.probe.state_dicts import fingerprint_of_rest, part_of
from fedpsa_strategy.wire.contract import BASE, DELTA, REPLY_ARRAYS
from support.grids import ScriptedGrid
from support.messages import node, train_message
from support.runs import Recorder, in_train, killed_and_resumed, run, virtual


class Adapted(nn.Module):
    """A frozen layer beside a low-rank one that is trained, and a trained head."""

    def __init__(self, width=6, rank=2):
        super().__init__()
        self.backbone = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x) + self.up(self.down(x))))


TRAINED = {"down.weight", "up.weight", "head.weight", "head.bias"}


def adapted(base=0, rest=1):
    """Return a model whose frozen part depends on one seed, and the rest on another."""
    torch.manual_seed(rest)
    model = Adapted()
    torch.manual_seed(base)
    model.backbone.reset_parameters()
    return model


def short_names(model):
    """As `peft.get_peft_model_state_dict`: some tensors, under names of its own."""
    state = model.state_dict()
    return {f"adapter/{key.replace('.weight', '')}": state[key] for key in TRAINED}


def probe_for(model, **kwargs):
    return Probe.gaussian(model, (6,), num_classes=3, size=16, dim=8, **kwargs)


def batch(seed, size=16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(model, seed):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    x, y = batch(seed)
    for _ in range(5):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# --- Which arrays ------------------------------------------------------------------------------


def test_frozen_parameters_do_not_travel_and_all_else_does():
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    names = arrays_of(model).keys()
    assert names == model.state_dict().keys() - {"0.weight", "0.bias"}
    assert arrays_of(nn.Linear(3, 2)).keys() == {"weight", "bias"}


def test_loading_leaves_the_rest_alone():
    source, model = adapted(rest=1), adapted(base=5, rest=2)
    before = model.backbone.weight.clone()
    load_arrays(model, arrays_of(source))
    assert torch.equal(model.backbone.weight, before)
    assert torch.equal(model.head.weight, source.head.weight)
    for state_fn in (None, short_names):
        load_arrays(model, arrays_of(adapted(rest=3), state_fn), state_fn)
        assert torch.equal(model.up.weight, adapted(rest=3).up.weight)


@pytest.mark.parametrize(
    ("change", "state_fn", "text"),
    [
        (lambda a: a.pop("head.bias"), None, r"trains \['head.bias'\]"),
        (lambda a: a.update(extra=a["head.bias"]), None, r"no arrays \['extra'\]"),
        (
            lambda a: a.update({"head.bias": a["head.weight"]}),
            None,
            r"'head.bias' has shape \(3, 6\)",
        ),
        (lambda a: a.pop("adapter/up"), short_names, r"trains \['up.weight'\]"),
        (lambda a: a.update(extra=a["adapter/up"]), short_names, r"no arrays \['extra'\]"),
        (
            lambda a: a.update({"adapter/up": a["adapter/down"]}),
            short_names,
            r"'adapter/up' has shape \(2, 6\), in the model \(6, 2\)",
        ),
    ],
)
def test_arrays_of_another_model_are_refused(change, state_fn, text):
    arrays = arrays_of(adapted(), state_fn)
    change(arrays)
    with pytest.raises(ValueError, match=text):
        load_arrays(adapted(), arrays, state_fn)


def test_a_state_fn_that_copies_is_refused():
    def copies(model):
        return {key: value.clone() for key, value in model.state_dict().items()}

    with pytest.raises(ValueError, match="not the model's own memory"):
        arrays_of(adapted(), copies)


def test_two_names_of_a_parameter_are_in_or_out_together():
    model = adapted()
    model.tail = nn.Linear(6, 3)
    model.tail.weight = model.head.weight
    part = part_of(model, ["down.weight", "up.weight", "head.weight", "head.bias"])
    assert part.rest.keys() == {"backbone.weight", "backbone.bias", "tail.bias"}


# --- Strategies, with make_reply and with the mod ----------------------------------------------


def own_client(base=0, state_fn=None):
    """A client that calls make_reply."""
    context = node()

    def behaviour(message):
        model = adapted(base, rest=9)
        load_arrays(model, message.content["arrays"], state_fn)
        train(model, message.content["config"]["seed"] % 1000)
        reply = make_reply(message, model, num_examples=16, context=context, state_fn=state_fn)
        return reply.content

    return behaviour


def ordinary_client(base=0, state_fn=None, mods=None):
    """An app as people write them: it replies with the arrays that it was sent."""
    if mods is None:
        mods = [fedpsa_mod(lambda: adapted(base, rest=8), state_fn=state_fn)]
    app = ClientApp(mods=mods)

    @app.train()
    def fit(message, context):
        model = adapted(base, rest=9)
        load_arrays(model, message.content["arrays"], state_fn)
        train(model, message.content["config"]["seed"] % 1000)
        metrics = MetricRecord({"num-examples": 16})
        content = {"arrays": arrays_of(model, state_fn), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return lambda message: app(message, node()).content


def go(behaviour, *, state_fn=None, method=FedPSA, versions=6, listeners=(), **kwargs):
    model = adapted(rest=4)
    if method is FedPSA:
        sketch_fn = probe_for(model).sketch_fn(adapted(rest=5), state_fn=state_fn)
        kwargs |= {"sketch_fn": sketch_fn, "audit_fraction": 1.0, "queue_size": 4}
    strategy = method(
        buffer_size=2, max_in_flight=3, listeners=list(listeners), **kwargs, **virtual(5)
    )
    grid = ScriptedGrid(5, behaviour)
    result = run(strategy, grid, num_versions=versions, arrays=arrays_of(model, state_fn))
    return result, grid


def accuracy(arrays, state_fn=None):
    model = adapted()
    load_arrays(model, arrays, state_fn)
    x, y = batch(10**6, 500)
    return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("state_fn", [None, short_names])
@pytest.mark.parametrize("client", [own_client, ordinary_client])
@pytest.mark.parametrize("method", [FedPSA, FedBuff])
def test_a_run_over_adapters(method, client, state_fn):
    events = Recorder()
    result, grid = go(
        client(state_fn=state_fn),
        state_fn=state_fn,
        method=method,
        versions=20,
        listeners=[events],
    )
    assert not events.of("reject"), events.of("reject")[0].reason
    names = (
        TRAINED if state_fn is None else {f"adapter/{k.replace('.weight', '')}" for k in TRAINED}
    )
    assert result.arrays.keys() == names
    sent = [message.content["arrays"] for message in grid.sent if in_train(message)]
    assert all(arrays.keys() == names for arrays in sent)
    first = arrays_of(adapted(rest=4), state_fn)
    assert accuracy(result.arrays, state_fn) > accuracy(first, state_fn) + 0.2
    # Bytes of 24 + 3 * 7 numbers and what is around them, not those of the backbone's 42 as well.
    assert all(event.num_bytes < 1200 for event in events.of("upload"))


def test_without_the_mod_a_method_that_needs_no_sketch_runs_too():
    events = Recorder()
    result, _ = go(ordinary_client(mods=[]), method=FedBuff, listeners=[events])
    assert not events.of("reject")
    assert result.arrays.keys() == TRAINED


def test_with_either_client_and_either_names_it_is_the_same_run():
    results = [
        go(client(state_fn=state_fn), state_fn=state_fn)[0].arrays
        for client in (own_client, ordinary_client)
        for state_fn in (None, short_names)
    ]
    values = [sorted(array.numpy().tobytes() for array in arrays.values()) for arrays in results]
    assert all(item == values[0] for item in values)


def test_a_resumed_run_ends_in_the_same_bits(tmp_path):
    model = adapted(rest=4)
    sketch_fn = probe_for(model).sketch_fn(adapted(rest=5))

    def strategy(**options):
        return FedPSA(sketch_fn=sketch_fn, buffer_size=2, max_in_flight=3, queue_size=4, **options)

    resumed, whole, saved = killed_and_resumed(
        strategy, own_client, tmp_path, arrays=arrays_of(model)
    )
    assert resumed == whole
    assert saved["size"] == 45  # the adapters and the head


def test_sketches_are_over_what_is_trained():
    model = adapted()
    probe = probe_for(model)
    assert probe.sketch.size == 45
    expected = probe.sketch(sensitivity(model, *probe.calibration.tensors()))
    assert probe.sketch_fn(adapted(rest=7))(arrays_of(model)) == expected.tolist()


# --- The same base on both sides ---------------------------------------------------------------


@pytest.mark.parametrize("client", [own_client, ordinary_client])
def test_another_base_model_is_refused_with_a_sentence(client):
    honest, other = client(), client(base=3)
    events = Recorder()

    def behaviour(message):
        if message.metadata.dst_node_id != 1000:
            return honest(message)
        try:
            return other(message)
        except ProbeError as error:
            return Error(code=1, reason=str(error))

    go(behaviour, listeners=[events])
    assert events.of("reject")
    for event in events.of("reject"):
        assert "'backbone.bias', 'backbone.weight'" in event.reason
        assert "load the same base model on both sides" in event.reason


def test_without_a_sketch_the_base_is_the_apps_business():
    events = Recorder()
    go(own_client(base=3), method=FedBuff, listeners=[events])
    assert not events.of("reject")


def test_a_base_that_training_moved_is_noticed():
    """BatchNorm's statistics that stay at home, and move there."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    keys = ["0.weight", "0.bias", "1.weight", "1.bias"]
    arrays = ArrayRecord({k: v for k, v in arrays_of(model).items() if k in keys})
    sketch_fn = probe_for(model).sketch_fn(model)
    config = {
        REPLY_ARRAYS: DELTA,
        **sketch_fn.client_config(),
        BASE: sketch_fn.base_fingerprint(arrays),
    }
    message = train_message(arrays, config)
    assert "sketch" in make_reply(message, model, num_examples=1).content["metrics"]
    model(torch.randn(8, 6))
    with pytest.raises(ProbeError, match=r"running_mean.*or to be in eval mode"):
        make_reply(message, model, num_examples=1)


def test_a_layer_that_is_trained_and_not_sent_has_no_sketch():
    model = adapted()
    arrays = arrays_of(model)
    sketch_fn = probe_for(model).sketch_fn(model)
    config = {REPLY_ARRAYS: DELTA, **sketch_fn.client_config()}
    message = train_message(arrays, config)
    model.backbone.bias.requires_grad_(True)
    with pytest.raises(ProbeError, match=r"the client trains \['backbone.bias'\]"):
        make_reply(message, model, num_examples=1)
    # Without a sketch it is the client's own affair: layers that each one keeps for itself.
    message = train_message(arrays, {REPLY_ARRAYS: DELTA})
    assert make_reply(message, model, num_examples=1).content["arrays"].keys() == TRAINED


def test_the_strategy_refuses_initial_arrays_that_lack_what_is_trained():
    model = adapted()
    strategy = FedPSA(sketch_fn=probe_for(model).sketch_fn(model), **virtual(2))
    arrays = arrays_of(model)
    del arrays["up.weight"]
    with pytest.raises(ValueError, match=r"trainable keys \['up.weight'\]"):
        strategy.begin(arrays)


def test_the_hash_of_the_base_is_kept_until_the_base_changes(monkeypatch):
    model = adapted()
    part = part_of(model, TRAINED)
    first = fingerprint_of_rest(model, part)
    assert len(first) == 32
    train(model, 1)  # of the rest nothing
    assert fingerprint_of_rest(model, part_of(model, TRAINED)) == first
    with torch.no_grad():
        model.backbone.weight[0, 0] += 1
    assert fingerprint_of_rest(model, part_of(model, TRAINED)) != first
    assert fingerprint_of_rest(model, part_of(model)) != first
    assert fingerprint_of_rest(nn.Linear(2, 2), part_of(nn.Linear(2, 2))) == ""


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_a_base_in_any_number_format(dtype):
    def fingerprint(*values):
        model = nn.Linear(2, 2)
        model.register_buffer("base", torch.tensor(values).to(dtype))
        model.register_buffer("empty", torch.zeros(0, 3))
        return fingerprint_of_rest(model, part_of(model, ["weight", "bias"]))

    assert fingerprint(1.0, 0.0) == fingerprint(1.0, 0.0) != fingerprint(0.0, 1.0)


def test_the_mod_refuses_a_reply_with_other_arrays():
    def behaviour_with(change):
        app = ClientApp(mods=[fedpsa_mod(adapted)])

        @app.train()
        def fit(message, context):
            arrays = message.content["arrays"]
            change(arrays)
            content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=message)

        return app(train_message(arrays_of(adapted()), {REPLY_ARRAYS: DELTA}), node())

    def less(arrays):
        arrays.pop("up.weight")

    def more(arrays):
        arrays["backbone.bias"] = Array(np.zeros(6, np.float32))

    for change in (less, more):
        with pytest.raises(ValueError, match="the reply must have the arrays of the message"):
            behaviour_with(change)
