"""The probe and the client's half: what travels, and that both sides mean the same."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.nn import functional

from fedpsa_strategy import Calibration, FedPSA, Probe, Sketch, make_reply, sensitivity
from fedpsa_strategy.probe.probe import ProbeError
from fedpsa_strategy.probe.sensitivity import num_trainable
from fedpsa_strategy.wire.contract import DELTA, MARK, REPLY_ARRAYS, STATES
from support.grids import ScriptedGrid
from support.messages import node, train_message
from support.runs import run, virtual


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    )


def make_probe(model, **kwargs):
    return Probe.gaussian(model, (2, 3), num_classes=3, size=16, dim=8, **kwargs)


def asked(model, config, **records):
    arrays = ArrayRecord(model.state_dict())
    return train_message(arrays, {REPLY_ARRAYS: DELTA, **config}, **records)


def trained(model, steps=3):
    """The same architecture after some steps, its buffers moved as well."""
    after = small_model()
    after.load_state_dict(model.state_dict())
    after.train()
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 2, 3, generator=generator)
        nn.functional.cross_entropy(after(x), torch.arange(8) % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return after


def test_the_probe_is_the_sketch_of_the_sensitivity():
    model = small_model()
    probe = make_probe(model, seed=3, sketch_seed=4)
    calibration = Calibration.gaussian((2, 3), size=16, seed=3, num_classes=3)
    expected = Sketch(num_trainable(model), 8, 4)(sensitivity(model, *calibration.tensors()))
    np.testing.assert_array_equal(probe(model), expected)
    raw = make_probe(model, sketch_seed=4, signal="parameters")
    flat = torch.cat([item.detach().flatten() for item in model.parameters()])
    np.testing.assert_array_equal(raw(model), Sketch(num_trainable(model), 8, 4)(flat))


def test_a_client_rebuilds_the_servers_probe_from_the_config():
    model = small_model()
    probe = make_probe(model, seed=1, sketch_seed=2, kind="gaussian")
    rebuilt = Probe.from_config(ConfigRecord(probe.config()))
    assert rebuilt(model) == probe(model)
    sent = Probe.from_config(ConfigRecord(probe.config("arrays")), arrays=probe.arrays())
    assert sent(model) == probe(model)


def test_server_and_client_sketch_the_same_model_alike():
    model = small_model()
    probe = make_probe(model)
    server = probe.sketch_fn(small_model(seed=9))
    assert server(ArrayRecord(model.state_dict())) == probe(model)


def test_the_strategy_tells_clients_what_to_sketch_unless_the_app_does():
    model = small_model()
    probe = make_probe(model)
    context, told = node(), []

    def behaviour(message):
        told.append(dict(message.content["config"]))
        return make_reply(message, trained(model), num_examples=8, context=context).content

    def messages(config, **kwargs):
        told.clear()
        sketch_fn = probe.sketch_fn(small_model())
        strategy = FedPSA(sketch_fn=sketch_fn, buffer_size=1, **virtual(1), **kwargs)
        arrays = ArrayRecord(model.state_dict())
        run(strategy, ScriptedGrid(1, behaviour), num_versions=2, arrays=arrays, config=config)
        return list(told)

    assert all(sent.items() >= probe.config().items() for sent in messages({"lr": 0.1}))
    own = messages({"lr": 0.1, **probe.config("arrays")}, calibration_arrays=probe.arrays())
    assert not any("calibration-seed" in sent for sent in own)


@pytest.mark.parametrize("key", ["sketch-seed", "calibration-seed", "sketch-dim"])
def test_another_fingerprint_is_a_clear_error(key):
    config = make_probe(small_model()).config()
    with pytest.raises(ProbeError, match="fingerprint"):
        Probe.from_config(ConfigRecord(config | {key: config[key] + 1}))


def test_a_probe_is_rebuilt_only_from_something_new():
    config = {"lr": 0.1, **make_probe(small_model()).config()}
    first = Probe.from_config(ConfigRecord(config))
    again = Probe.from_config(ConfigRecord(config | {"lr": 0.2}))
    assert again.calibration is first.calibration
    assert again.sketch is first.sketch
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    assert Probe.from_config(ConfigRecord(config), loss_fn=loss_fn).loss_fn is loss_fn
    other = Probe.from_config(ConfigRecord(config | {"sketch-signal": "parameters"}))
    assert other.signal == "parameters"
    arrays = make_probe(small_model(), seed=1)
    sent = ConfigRecord(arrays.config("arrays"))
    assert Probe.from_config(sent, arrays=arrays.arrays()) == arrays
    with pytest.raises(ProbeError, match="not cached"):
        Probe.from_config(sent)


def test_a_config_that_lacks_something_is_a_clear_error():
    config = make_probe(small_model()).config()
    del config["calibration-shape"]
    with pytest.raises(ProbeError, match="calibration-shape"):
        Probe.from_config(ConfigRecord(config))
    config = make_probe(small_model()).config("arrays")
    with pytest.raises(ProbeError, match="not cached"):
        Probe.from_config(ConfigRecord(config))


def test_real_batches_cannot_travel_as_a_seed():
    calibration = Calibration.real(np.zeros((2, 6), np.float32), np.zeros(2, np.int64))
    probe = Probe(calibration, Sketch(39, 8))
    with pytest.raises(ValueError, match="arrays"):
        probe.config("seed")
    assert probe.config("arrays")["calibration-transport"] == "arrays"


def test_reply_carries_the_update_new_integers_and_the_sketch_of_what_the_server_will_see():
    model = small_model()
    probe = make_probe(model)
    after = trained(model)
    reply = make_reply(
        asked(model, probe.config()), after, num_examples=8, metrics={"train-loss": 0.25}
    )
    before = model.state_dict()
    delta = reply.content["arrays"].to_torch_state_dict()
    states = reply.content[STATES].to_torch_state_dict()
    assert delta.keys() | states.keys() == before.keys()
    assert delta.keys() == dict(model.named_parameters()).keys()
    assert states["2.num_batches_tracked"] == 3  # values, not differences
    assert torch.equal(states["2.running_var"], after.state_dict()["2.running_var"])
    seen_by_server = states | {key: before[key] + value for key, value in delta.items()}
    twin = small_model()
    twin.load_state_dict(seen_by_server)
    metrics = reply.content["metrics"]
    assert metrics["sketch"] == probe(twin)
    assert metrics["num-examples"] == 8
    assert metrics["train-loss"] == 0.25
    assert "sensitivity-seconds" not in metrics  # which are the user's
    assert reply.content[MARK]["sensitivity-seconds"] > 0
    assert reply.metadata.reply_to_message_id == "m1"


def test_reply_without_a_probe_in_the_config_has_no_sketch():
    model = small_model()
    reply = make_reply(asked(model, {"lr": 0.1}), trained(model), num_examples=1)
    assert "sketch" not in reply.content["metrics"]


class Tied(nn.Module):
    """Two names of one parameter, beside one without dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("update_dtype", ["float32", "float16", "bfloat16"])
def test_the_model_holds_afterwards_what_the_server_will_see(update_dtype):
    torch.manual_seed(0)
    model, after = Tied(), Tied()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    probe = Probe.gaussian(model, (3,), num_classes=3, signal="parameters")
    config = probe.config() | {"update-dtype": update_dtype}
    sent = make_reply(asked(model, config), after, num_examples=1).content["arrays"]
    assert sent["first.weight"].data == sent["second.weight"].data
    assert sent["scale"].shape == ()
    for key, value in after.state_dict().items():
        bits = torch.from_numpy(sent[key].numpy().copy())
        delta = bits.view(torch.bfloat16) if update_dtype == "bfloat16" else bits
        assert torch.equal(value, start[key] + delta.float())
    # The message was read, and nothing else.
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("update_dtype", ["float32", "float16", "bfloat16"])
def test_a_model_that_diverged_is_sent_as_it_is(update_dtype):
    model = small_model()
    message = asked(model, make_probe(model).config() | {"update-dtype": update_dtype})
    with torch.no_grad():
        model[1].weight[0] = torch.inf
        model[1].weight[1] = torch.nan
        model[1].weight[2] = 3e38
    arrays = make_reply(message, model, num_examples=1).content["arrays"]
    values = arrays["1.weight"].numpy()
    if update_dtype == "bfloat16":
        values = torch.from_numpy(values.copy()).view(torch.bfloat16).float().numpy()
    assert np.isinf(values[0]).all()
    assert np.isnan(values[1]).all()
    assert np.isinf(values[2]).all() == (update_dtype == "float16")


def test_a_calibration_batch_that_was_sent_is_kept_on_the_node():
    model = small_model()
    probe = make_probe(model)
    context = node()
    first = make_reply(
        asked(model, probe.config("arrays"), calibration=probe.arrays()),
        trained(model),
        num_examples=1,
        context=context,
    )
    second = make_reply(
        asked(model, probe.config("arrays")),
        trained(model),
        num_examples=1,
        context=context,
    )
    assert first.content["metrics"]["sketch"] == second.content["metrics"]["sketch"]
    with pytest.raises(ProbeError, match="not cached"):
        make_reply(
            asked(model, probe.config("arrays")),
            trained(model),
            num_examples=1,
            context=node(),
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_probe_works_on_a_gpu():
    model = small_model()
    probe = make_probe(model)
    np.testing.assert_allclose(probe(model.cuda()), probe(model.cpu()), rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_model_on_a_gpu_is_answered_with_the_same_update():
    model = small_model()
    message = asked(model, make_probe(model).config())
    here, there = trained(model), trained(model).cuda()
    replies = [make_reply(message, after, num_examples=1) for after in (here, there)]
    first, second = (reply.content["arrays"] for reply in replies)
    assert all(first[key].data == second[key].data for key in first)
    assert all(
        torch.equal(value, there.state_dict()[key].cpu())
        for key, value in here.state_dict().items()
    )


def test_a_loss_that_writes_into_its_targets_does_not_change_the_batch():
    def halving(outputs, targets):
        targets.mul_(0.5)
        return functional.mse_loss(outputs[:, 0], targets, reduction="none")

    model = nn.Linear(6, 1)
    probe = Probe.gaussian(model, (6,), loss_fn=halving)
    assert probe(model) == probe(model)


def test_a_model_that_writes_into_its_input_does_not_change_the_batch():
    class Writing(nn.Linear):
        def forward(self, x):
            x -= 0.5
            return super().forward(x)

    model = Writing(6, 3)
    probe = Probe.gaussian(model, (6,), num_classes=3)
    assert probe(model) == probe(model)


# --- Batches that do not fit the model ---------------------------------------------------------


def text_model():
    return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 3))


def squares(outputs, targets):
    return (outputs - targets).square().mean(dim=1)


@pytest.mark.parametrize(
    ("model", "arguments", "text"),
    [
        (
            small_model(),
            {"shape": (2, 2), "num_classes": 3},
            r"shape=\(2, 2\) does not fit the model.*'1', Linear\(in_features=6.*\(3, 4\)",
        ),
        (small_model(), {"shape": (2, 3), "num_classes": 4}, "num_classes=4 .*which has 3 outputs"),
        (small_model(), {"shape": (2, 3)}, "num_classes is missing.*3 outputs"),
        (text_model(), {"shape": (2,), "num_classes": 3}, "without vocabulary.*Embedding"),
        (
            text_model(),
            {"shape": (2,), "vocabulary": 30, "num_classes": 3},
            r"vocabulary=30 does not fit the model.*Embedding\(20, 4\)",
        ),
        (
            text_model(),
            {"shape": (3,), "vocabulary": 20, "num_classes": 3},
            r"shape=\(3,\) with vocabulary=20 .*Linear\(in_features=8",
        ),
        (
            nn.Linear(6, 2),
            {"shape": (6,), "target_shape": (3,), "loss_fn": squares},
            r"target_shape=\(3,\).*outputs are \(3, 2\), the targets \(3, 3\)",
        ),
        (
            nn.Linear(6, 1),
            {"shape": (6,), "loss_fn": squares},
            r"target_shape=\(\).*outputs are \(3, 1\), the targets \(3,\).*broadcast",
        ),
        (
            nn.Linear(6, 1),
            {"shape": (6,), "target_shape": (1,), "loss_fn": nn.MSELoss()},
            "one loss per sample",
        ),
        (nn.LSTM(6, 4), {"shape": (5, 6), "num_classes": 3}, "returns tuple"),
    ],
)
def test_the_argument_that_does_not_fit_the_model_is_named(model, arguments, text):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        Probe.gaussian(model, **arguments)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "text"),
    [
        (
            small_model(),
            np.zeros((4, 5)),
            [0, 1, 2, 0],
            r"real's inputs of shape \(5,\) per sample",
        ),
        (small_model(), np.zeros((4, 6)), [0, 1, 0, 9], "targets 0 to 9 .* 0 to 2"),
        (
            small_model(),
            np.zeros((4, 6)),
            [0.5, 1.0, 0.0, 0.0],
            r"targets of shape \(\) per sample",
        ),
        (text_model(), np.full((4, 2), 20), [0, 1, 2, 0], "numbers up to 20.*Embedding"),
    ],
)
def test_a_real_batch_that_does_not_fit_the_model_is_refused(model, inputs, targets, text):
    probe = Probe(Calibration.real(inputs, targets), Sketch(num_trainable(model), 8))
    with pytest.raises(ValueError, match=text):
        probe.sketch_fn(model)


def test_a_loss_may_take_outputs_that_are_no_tensor():
    def last_state(outputs, targets):
        return nn.functional.cross_entropy(outputs[0][:, -1], targets, reduction="none")

    model = nn.LSTM(6, 4, batch_first=True)
    probe = Probe.gaussian(model, (5, 6), num_classes=4, loss_fn=last_state)
    assert len(probe(model)) == 16
