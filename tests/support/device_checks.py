"""What runs on a device, run on one that forgives nothing; pytest in a process of its own.

`tests/task/test_pseudo_device.py` starts it. As the device computes on the CPU, all results have to
be the CPU's, bit for bit.
"""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import nn

from client_app import app as client_app
from fedpsa_strategy import Calibration, Probe, Sketch, fedpsa_mod, make_reply, sensitivity
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS
from server_app.alignment import Alignment
from server_app.build import build_experiment
from server_app.settings import Settings
from support.messages import delivered, node, train_message
from support.pseudo_device import NAME, MixedDevicesError, install
from task.hardware import resolve_device
from task.models import make_model
from task.tensors import Shard
from task.training import evaluate, train

MODES = install()
DEVICE = torch.device(NAME, 0)


@pytest.fixture(autouse=True, scope="session")
def device():
    with MODES[0], MODES[1]:
        yield


def cases():
    """The models with which sensitivities are tested on the CPU."""
    path = Path(__file__).parents[1] / "fedpsa_strategy" / "test_parameter_sensitivity.py"
    spec = importlib.util.spec_from_file_location("sensitivity_cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = cases()


def on_device(model):
    there = copy.deepcopy(model).to(DEVICE)
    assert all(tensor.device.type == NAME for tensor in there.state_dict().values())
    return there


def values(model):
    return {key: tensor.cpu().numpy() for key, tensor in model.state_dict().items()}


def assert_same(model, other):
    for key, value in values(other).items():
        np.testing.assert_array_equal(values(model)[key], value, key)


def shard(shape=(784,), n=20, classes=10):
    generator = torch.Generator().manual_seed(0)
    return Shard(torch.randn(n, *shape, generator=generator), torch.arange(n) % classes)


# --- The device itself -------------------------------------------------------------------------


def test_it_keeps_to_the_rules_of_a_gpu():
    there = torch.ones(3, device=NAME)
    for wrong in (
        lambda: there + torch.ones(3),
        lambda: torch.stack([there, torch.ones(3)]),
        lambda: nn.Linear(3, 2)(there),
        lambda: torch.ones(3).index_select(0, torch.zeros(1, dtype=torch.int64, device=NAME)),
    ):
        with pytest.raises(MixedDevicesError):
            wrong()
    for wrong in (lambda: there.numpy(), lambda: np.asarray(there)):
        with pytest.raises(TypeError):
            wrong()
    assert float((2 * there + torch.tensor(1.0)).sum()) == 9.0  # single numbers may be mixed


def test_auto_finds_it():
    assert resolve_device("auto").type == resolve_device(NAME).type == NAME
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(RuntimeError, match="there are 1 of them"):
        resolve_device(f"{NAME}:1")
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        resolve_device("cuda")


# --- Training and evaluation -------------------------------------------------------------------


class Net(nn.Module):
    """Every kind of layer that training may meet: statistics, dropout, embedded positions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x):
        return self.head(self.layers(x))


@pytest.mark.parametrize("proximal", [0.0, 0.1])
def test_training(proximal):
    torch.manual_seed(0)
    here = Net()
    there = on_device(here)
    before = torch.get_rng_state()
    found = [
        train(
            model,
            shard((1, 8, 8)),
            lr=0.1,
            epochs=2,
            batch_size=8,
            seed=5,
            device=place,
            proximal=proximal,
        )
        for model, place in ((here, "cpu"), (there, None))
    ]
    assert found[0] == found[1]
    assert_same(there, here)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.pseudo.seeds[-1] == 5
    assert not torch.are_deterministic_algorithms_enabled()
    assert evaluate(there, shard((1, 8, 8)), device=NAME) == evaluate(here, shard((1, 8, 8)))


def test_deterministic_algorithms_are_on_during_training():
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x)

    model = Looking(784, 10).to(DEVICE)
    train(model, shard(), lr=0.1, epochs=1, batch_size=10, seed=0, device=None)
    train(model.to("cpu"), shard(), lr=0.1, epochs=1, batch_size=10, seed=0)
    assert seen == [True, True, False, False]


# --- Sketches ----------------------------------------------------------------------------------


# But for the one whose forward pass holds on to the model on the CPU.
@pytest.mark.parametrize(
    "case", [case for case in (*CASES.HOOKS, *CASES.VMAP) if case != "patched"]
)
def test_sensitivity(case):
    make, shape = (CASES.HOOKS | CASES.VMAP)[case]
    model = CASES.made(make)
    inputs, targets = CASES.batch_of(shape)
    expected = sensitivity(model, inputs, targets)
    found = sensitivity(on_device(model), inputs, targets)
    assert found.device.type == NAME
    np.testing.assert_array_equal(found.cpu().numpy(), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_sketch(kind, dtype):
    vector = torch.randn(5000, dtype=dtype)
    sketch = Sketch(5000, 16, 0, kind)
    np.testing.assert_array_equal(sketch(vector.to(DEVICE)), sketch(vector))


def test_calibration_and_probe():
    model = make_model("mnist", 0)
    probe = Probe.gaussian(on_device(model), (1, 28, 28), num_classes=10, size=16)
    expected = Probe.gaussian(model, (1, 28, 28), num_classes=10, size=16)(model)
    assert list(probe(on_device(model))) == list(expected)
    assert list(probe.sketch_fn(on_device(model))(ArrayRecord(model.state_dict()))) == list(
        expected
    )
    batch = Calibration.gaussian((3,), num_classes=2, size=16)
    assert [item.device.type for item in batch.tensors(DEVICE)] == [NAME, NAME]


# --- Replies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("update_dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_reply_and_mod(update_dtype):
    torch.manual_seed(0)
    start, trained = Net(), Net()
    probe = Probe.gaussian(start, (1, 8, 8), num_classes=10, size=16)
    config = {REPLY_ARRAYS: DELTA, "seed": 3, "update-dtype": update_dtype, **probe.config()}
    message = train_message(ArrayRecord(start.state_dict()), config)
    replies = [
        make_reply(message, model, num_examples=8)
        for model in (copy.deepcopy(trained), on_device(trained))
    ]

    def app(message, context):
        content = RecordDict(
            {
                "arrays": ArrayRecord(
                    {k: v.cpu() for k, v in on_device(trained).state_dict().items()}
                )
            }
        )
        metrics = {"num-examples": 8}
        content["metrics"] = replies[0].content["metrics"].copy()
        del content["metrics"]["sketch"]
        assert dict(content["metrics"]) == metrics
        return Message(content, reply_to=message)

    mod = fedpsa_mod(lambda: on_device(Net()))
    replies.append(mod(message, node(), app))
    expected = replies[0].content
    for reply in replies[1:]:
        assert reply.content["metrics"]["sketch"] == expected["metrics"]["sketch"]
        for record in ("arrays", "fedpsa-states"):
            for key, array in expected[record].items():
                assert reply.content[record][key].data == array.data


# --- The app -----------------------------------------------------------------------------------


def context(cache, **settings):
    values = {"num_clients": 4, "cache_dir": str(cache), "device": "auto"} | settings
    return node({"partition-id": 1, "num-partitions": 4}, Settings(**values).to_run_config())


def call(kind, context, arrays, config, **records):
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config), **records})
    return client_app.app(delivered(content, kind), context)


CONFIG = {"lr": 0.1, "local-epochs": 1, "batch-size": 16, "seed": 3, "version": 0}


@pytest.mark.parametrize("strategy", ["fedpsa", "fedasync", "fedpac"])
def test_both_apps(strategy, tmp_path):
    found = {}
    for place in ("cpu", "auto"):
        options = {"device": place, "cache_dir": str(tmp_path), "alignment_every": 1}
        settings = Settings(strategy=strategy, num_clients=4, **options)
        experiment = build_experiment(settings, [])
        strategy_there = experiment.strategy
        arrays = experiment.initial_arrays
        strategy_there.begin(arrays, [7])
        (message,) = strategy_there.configure_train(1, arrays, experiment.train_config, None)
        message.metadata.__dict__["_message_id"] = "m1"
        reply = client_app.app(message, context(tmp_path, device=place, strategy=strategy))
        assert not reply.has_error(), reply
        reply.metadata.__dict__["_src_node_id"] = 7
        for callback in strategy_there.callbacks:
            if isinstance(callback, Alignment):
                callback.idle()
        strategy_there.aggregate_train(1, [reply])
        assert strategy_there.state.uploads == 1, strategy_there.state.reasons
        metrics = experiment.evaluate_fn(0, arrays)
        evaluated = call(MessageType.EVALUATE, context(tmp_path, device=place), arrays, CONFIG)
        found[place] = (
            {key: array.data for key, array in reply.content["arrays"].items()},
            reply.content["metrics"].get("sketch"),
            dict(metrics),
            dict(evaluated.content["metrics"]),
        )
    assert found["cpu"] == found["auto"]
    assert torch.pseudo.emptied >= 2


def test_a_full_memory_is_told_and_freed(tmp_path, monkeypatch):
    model = make_model("digits", 0)
    arrays = ArrayRecord(model.state_dict())
    emptied = torch.pseudo.emptied

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(client_app, "train_model", full)
        with pytest.raises(
            RuntimeError, match=r"the memory of pseudo is full: .*20\.00 MiB"
        ) as error:
            call(MessageType.TRAIN, context(tmp_path), arrays, CONFIG)
    assert type(error.value).__name__ == "OutOfMemoryError"
    assert torch.pseudo.emptied == emptied + 2
    assert client_app._workspace.cache_info().currsize == 0
    reply = call(MessageType.TRAIN, context(tmp_path), arrays, CONFIG)
    assert reply.content["metrics"]["train-loss"] > 0
