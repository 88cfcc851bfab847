"""The client mod: any model, any per-sample loss, any ordinary Flower client."""

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import nn

from fedpsa_strategy import Probe, fedpsa_mod
from fedpsa_strategy.wire.contract import DELTA, MARK, REPLY_ARRAYS, STATES
from support.messages import delivered, node


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.classify = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.classify(self.embedding(tokens).mean(dim=1))


def resnet():
    from task.torchvision_import import import_torchvision_datasets

    import_torchvision_datasets()  # works beside any build of torch
    from torchvision.models import resnet18

    return resnet18(num_classes=4)


def squared_error(outputs, targets):
    return (outputs - targets).square().mean(dim=1)


CASES = {
    "regression": (
        Regressor,
        {"shape": (6,), "target_shape": (2,)},
        squared_error,
        lambda n: (torch.randn(n, 6), torch.randn(n, 2)),
    ),
    "text": (
        TextClassifier,
        {"shape": (7,), "vocabulary": 50, "num_classes": 3},
        None,
        lambda n: (torch.randint(0, 50, (n, 7)), torch.randint(0, 3, (n,))),
    ),
    "resnet18": (
        resnet,
        {"shape": (3, 32, 32), "num_classes": 4},
        None,
        lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 4, (n,))),
    ),
}


def ordinary_app(model_fn, loss_fn, batch, mods):
    """An app as people write them: trains, and replies with the whole model."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        model = model_fn()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        torch.manual_seed(1)
        x, y = batch(4)
        per_sample = loss_fn or (lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"))
        loss = per_sample(model(x), y).mean()
        loss.backward()
        optimizer.step()
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"train_loss": loss.item(), "num-examples": 4}),
                "notes": ConfigRecord({"who": "me"}),
            }
        )
        return Message(content=content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 4})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    return app


def send(app, kind, model, config):
    content = {"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord(config)}
    return app(delivered(RecordDict(content), kind), node())


@pytest.mark.parametrize("case", CASES)
def test_an_ordinary_client_becomes_one_that_sends_updates_and_sketches(case):
    model_fn, shape, loss_fn, batch = CASES[case]
    torch.manual_seed(0)
    model = model_fn()
    probe = Probe.gaussian(model, size=16, loss_fn=loss_fn, **shape)
    config = {"lr": 0.05, REPLY_ARRAYS: DELTA, **probe.config()}
    plain = send(ordinary_app(model_fn, loss_fn, batch, []), MessageType.TRAIN, model, config)
    mods = [fedpsa_mod(model_fn, loss_fn=loss_fn)]
    reply = send(ordinary_app(model_fn, loss_fn, batch, mods), MessageType.TRAIN, model, config)

    before, after = model.state_dict(), plain.content["arrays"].to_torch_state_dict()
    sent = reply.content["arrays"].to_torch_state_dict()
    for key, delta in sent.items():
        torch.testing.assert_close(before[key] + delta, after[key])
    states = reply.content.array_records.get(STATES, ArrayRecord()).to_torch_state_dict()
    for key, value in states.items():
        assert torch.equal(value, after[key])
    assert sent.keys() | states.keys() == before.keys()
    metrics = reply.content["metrics"]
    twin = model_fn()
    twin.load_state_dict(after)
    torch.testing.assert_close(
        torch.tensor(metrics["sketch"]), torch.tensor(probe(twin)), rtol=1e-3, atol=1e-8
    )
    assert metrics["num-examples"] == 4
    assert metrics["train_loss"] == plain.content["metrics"]["train_loss"]
    assert reply.content["notes"]["who"] == "me"
    assert reply.metadata.reply_to_message_id == "m1"


def test_other_messages_and_errors_pass_unchanged():
    app = ordinary_app(Regressor, squared_error, CASES["regression"][3], [fedpsa_mod(Regressor)])
    reply = send(app, MessageType.EVALUATE, Regressor(), {})
    assert reply.content["metrics"]["accuracy"] == 0.5

    failing = ClientApp(mods=[fedpsa_mod(Regressor)])

    @failing.train()
    def train(message, context):
        return Message(Error(code=7, reason="not today"), reply_to=message)

    assert send(failing, MessageType.TRAIN, Regressor(), {"lr": 0.1}).error.reason == "not today"


def test_records_keep_their_names_and_metrics_their_values():
    app = ClientApp(mods=[fedpsa_mod(Regressor, loss_fn=squared_error)])

    @app.train()
    def train(message, context):
        arrays = message.content.array_records["model"]  # as it came: Δ = 0
        metrics = MetricRecord({"share": 0.5, "num-examples": 3})
        return Message(RecordDict({"after": arrays, "figures": metrics}), reply_to=message)

    probe = Probe.gaussian(Regressor(), shape=(6,), target_shape=(2,), loss_fn=squared_error)
    content = RecordDict(
        {
            "model": ArrayRecord(Regressor().state_dict()),
            "settings": ConfigRecord({"lr": 0.1, REPLY_ARRAYS: DELTA, **probe.config()}),
        }
    )
    reply = app(delivered(content), node())
    assert reply.content.keys() == {"model", "figures", MARK}  # Δ where the strategy looks for it
    assert reply.content["figures"]["share"] == 0.5
    assert reply.content["figures"]["num-examples"] == 3
    assert len(reply.content["figures"]["sketch"]) == 16
    assert all(not array.numpy().any() for array in reply.content["model"].values())


def test_a_reply_without_arrays_is_a_clear_error():
    app = ClientApp(mods=[fedpsa_mod(Regressor)])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    with pytest.raises(ValueError, match="exactly one ArrayRecord in the reply"):
        send(app, MessageType.TRAIN, Regressor(), {"lr": 0.1, REPLY_ARRAYS: DELTA})
