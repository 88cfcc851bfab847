"""Flower's own parts around ours: mods in either order, federated evaluation, own metrics."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from torch import nn

from fedpsa_strategy import FedBuff, FedPSA, Probe, fedpsa_mod
from fedpsa_strategy.server.options import Evaluation, Training
from support.grids import ScriptedGrid
from support.runs import Recorder, run, virtual

CLIP = 0.01
MODEL_MODS = {
    "fixed clipping": fixedclipping_mod,
    "adaptive clipping": adaptiveclipping_mod,
    "local DP": LocalDpMod(clipping_norm=CLIP, sensitivity=1e-4, epsilon=10.0, delta=1e-5),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def net_with_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def app_of(mods, model_fn=net):
    """An app as people write them; the mods are around its training alone."""
    app = ClientApp()

    @app.train(mods=mods)
    def train(message, context):
        model = model_fn()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        torch.manual_seed(message.content["config"]["seed"] % 2**32)
        x, y = torch.randn(8, 5), torch.arange(8) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": 8, "f1": 0.5})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        weight = 1 + message.metadata.dst_node_id % 2
        metrics = MetricRecord({"f1": 0.2 * weight, "num-examples": weight})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Grid(ScriptedGrid):
    """Every node runs the app, with a context of its own."""

    def __init__(self, num_nodes, app):
        self.contexts = {}
        super().__init__(num_nodes, lambda message: self.answer(app, message))

    def answer(self, app, message):
        node = message.metadata.dst_node_id
        context = self.contexts.setdefault(node, Context(1, node, {}, RecordDict(), {}))
        reply = app(message, context)
        return reply.error if reply.has_error() else reply.content


def train_with(mods, *, kind=FedPSA, model_fn=net, num_versions=3, transport="seed", **kwargs):
    recorder = Recorder()
    model = model_fn()
    own, config = {}, {"clipping_norm": CLIP}
    if kind is FedPSA:
        probe = Probe.gaussian(model, (5,), num_classes=3, size=16)
        own = {"sketch_fn": probe.sketch_fn(model_fn()), "audit_fraction": 1.0}
        config |= probe.config(transport)
        if transport == "arrays":
            own["calibration_arrays"] = probe.arrays()
    strategy = kind(
        **own, buffer_size=2, max_in_flight=2, listeners=[recorder], **kwargs, **virtual(4)
    )
    result = run(
        strategy,
        Grid(4, app_of(mods, model_fn)),
        num_versions=num_versions,
        arrays=ArrayRecord(model.state_dict()),
        config=config,
    )
    return result, recorder


@pytest.mark.parametrize("transport", ["seed", "arrays"])
@pytest.mark.parametrize("name", MODEL_MODS)
def test_mods_that_change_models_follow_ours(name, transport):
    """The sketch is of the clipped and noised model: every audit would notice another one."""
    mods = [fedpsa_mod(net), MODEL_MODS[name]]
    _, recorder = train_with(mods, transport=transport)
    norms = np.sqrt([event.squared_norm for event in recorder.of("upload")])
    assert not recorder.of("reject")
    if name == "local DP":  # 39 numbers with noise beside the clipped update
        deviation = 1e-4 * np.sqrt(2 * np.log(1.25 / 1e-5)) / 10
        assert (norms < CLIP + 2 * deviation * np.sqrt(39)).all()
        assert not (norms <= CLIP).all()
    else:
        np.testing.assert_allclose(norms, CLIP, rtol=1e-3)
    if name == "adaptive clipping":
        assert {event.metrics["norm_bit"] for event in recorder.of("upload")} <= {0, 1}
    plain = train_with([fedpsa_mod(net)])[1]
    assert min(event.squared_norm for event in plain.of("upload")) > (2 * CLIP) ** 2


@pytest.mark.parametrize("update_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", MODEL_MODS)
def test_before_ours_they_are_refused_with_what_to_do(name, update_dtype):
    """There they take Δ for a model; what comes out is neither."""
    mods = [MODEL_MODS[name], fedpsa_mod(net)]
    # Bytes of levels they cannot even subtract.
    reason = r"mods=\[fedpsa_mod\(Net\), LocalDpMod\(...\)\]"
    with pytest.raises(Exception, match="broadcast" if update_dtype == "int8" else reason):
        train_with(mods, training=Training(update_dtype=update_dtype))


@pytest.mark.parametrize("name", MODEL_MODS)
def test_before_ours_they_refuse_a_model_with_statistics_themselves(name):
    mods = [MODEL_MODS[name], fedpsa_mod(net_with_statistics)]
    with pytest.raises(Exception, match="expects exactly one ArrayRecord"):
        train_with(mods, model_fn=net_with_statistics)


@pytest.mark.parametrize("name", MODEL_MODS)
def test_without_ours_they_work_with_the_rules_that_need_no_sketch(name):
    _, recorder = train_with([MODEL_MODS[name]], kind=FedBuff)
    assert not recorder.of("reject")
    norms = np.sqrt([event.squared_norm for event in recorder.of("upload")])
    assert (norms < 3 * CLIP).all()


@pytest.mark.parametrize("size_mod", [message_size_mod, arrays_size_mod])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("update_dtype", "transport"), [("float32", "seed"), ("int4", "arrays")])
def test_mods_that_measure_work_in_every_place(size_mod, first, update_dtype, transport, caplog):
    mods = [size_mod, fedpsa_mod(net)] if first else [fedpsa_mod(net), size_mod]
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO, logger="flwr"):
        _, recorder = train_with(
            mods, transport=transport, training=Training(update_dtype=update_dtype)
        )
    assert not recorder.of("reject")
    assert "Outgoing" in caplog.text


def test_federated_evaluation_own_metrics_and_evaluate_fn_go_together():
    seen = []

    def evaluate_fn(version, arrays):
        seen.append(version)
        model = net()
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"auc": 0.5 + version / 100})

    def harmonic(records, key):
        values = [next(iter(record.metric_records.values()))["f1"] for record in records]
        return MetricRecord({"f1-of-all": len(values) / sum(1 / value for value in values)})

    probe = Probe.gaussian(net(), (5,), num_classes=3, size=16)
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(net()),
        buffer_size=2,
        max_in_flight=2,
        fraction_evaluate=1.0,
        train_metrics_aggr_fn=harmonic,
        evaluate_metrics_aggr_fn=harmonic,
        evaluation=Evaluation(every=2),
        **virtual(4),
    )
    result = run(
        strategy,
        Grid(4, app_of([fedpsa_mod(net), fixedclipping_mod])),
        num_versions=4,
        arrays=ArrayRecord(net().state_dict()),
        config={"clipping_norm": CLIP},
        evaluate_fn=evaluate_fn,
    )
    assert seen == [0, 2, 4]
    assert result.evaluate_metrics_serverapp[4]["auc"] == 0.54
    assert sorted(result.evaluate_metrics_clientapp) == [0, 2, 4]
    assert 0.2 <= result.evaluate_metrics_clientapp[4]["f1-of-all"] <= 0.4
    assert result.train_metrics_clientapp[4]["f1-of-all"] == pytest.approx(0.5)
