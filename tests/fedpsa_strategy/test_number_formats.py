"""Models in float64, float16 and bfloat16: calibration, sketches, replies, runs and resumes."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedpsa_strategy import (
    Calibration,
    FedBuff,
    FedPSA,
    Probe,
    Sketch,
    Training,
    arrays_of,
    load_arrays,
    make_reply,
    sensitivity,
)
from fedpsa_strategy.probe.sensitivity import num_trainable
from support.grids import ScriptedGrid
from support.messages import node, train_message
from support.runs import Recorder, killed_and_resumed, run

FORMATS = {"float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
BITS = {"float64": 53, "float16": 11, "bfloat16": 8}


class Net(nn.Module):
    """Layers of known kinds, or with a bare parameter beside them."""

    def __init__(self, bare=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(3)) if bare else None

    def forward(self, x):
        outputs = self.layers(x)
        return outputs if self.scale is None else outputs * self.scale


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layers(x[:, None]))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


def made(make, name, seed=0):
    torch.manual_seed(seed)
    return make().to(FORMATS[name])


MODELS = {
    "layers": (Net, {"shape": (5,), "num_classes": 3}),
    "bare": (lambda: Net(bare=True), {"shape": (5,), "num_classes": 3}),
    "statistics": (WithStatistics, {"shape": (5,), "num_classes": 3}),
    "tokens": (Tokens, {"shape": (4,), "vocabulary": 7, "num_classes": 3}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", MODELS)
def test_the_batch_has_the_models_format_and_the_sketch_is_that_of_float64(case, name):
    make, arguments = MODELS[case]
    model = made(make, name)
    probe = Probe.gaussian(model, size=16, **arguments)
    found = np.array(probe(model))
    assert np.array_equal(found, probe(model))
    assert np.array_equal(found, probe.sketch_fn(made(make, name, seed=1))(arrays_of(model)))
    twin = made(make, "float64")
    twin.load_state_dict(model.state_dict())
    exact = np.array(Probe.gaussian(twin, size=16, **arguments)(twin))
    cosine = found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)
    assert 1 - cosine < 2.0 ** (4 - BITS[name]) + 1e-7


def test_targets_of_a_regression_have_the_models_format_too():
    for name in FORMATS:
        model = made(lambda: nn.Linear(5, 2), name)
        probe = Probe.gaussian(
            model,
            (5,),
            target_shape=(2,),
            loss_fn=lambda o, t: nn.functional.mse_loss(o, t, reduction="none"),
        )
        assert any(probe(model))


def test_tensors_are_made_once_per_format():
    batch = Calibration.gaussian((3,), size=4, num_classes=2)
    inputs, targets = batch.tensors("cpu", torch.bfloat16)
    assert (inputs.dtype, targets.dtype) == (torch.bfloat16, torch.int64)
    assert batch.tensors("cpu", torch.bfloat16)[0] is inputs
    assert batch.tensors()[0].dtype == torch.float32
    torch.testing.assert_close(inputs, batch.tensors()[0].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("bare", [False, True])
def test_sums_over_many_samples_are_not_rounded_to_sixteen_bits(bare):
    """1024 equal samples give what one gives: sums of 8 bits would stop growing at 256."""
    model = made(lambda: Net(bare), "bfloat16")
    x, y = torch.randn(1, 5).bfloat16(), torch.tensor([1])
    one = sensitivity(model, x, y)
    many = sensitivity(model, x.expand(1024, -1).clone(), y.expand(1024).clone())
    torch.testing.assert_close(many, one, rtol=0.02, atol=0.02 * float(one.mean()))


@pytest.mark.parametrize("name", FORMATS)
def test_the_default_format_of_torch_does_not_matter(name):
    model = made(Net, name)
    probe = Probe.gaussian(model, (5,), num_classes=3)
    expected = probe(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert probe(model) == expected
        assert sensitivity(model, *probe.calibration.tensors("cpu", FORMATS[name])).dtype == (
            torch.float32
        )
    finally:
        torch.set_default_dtype(torch.float32)


# --- What travels ------------------------------------------------------------------------------


def test_bfloat16_travels_as_float32():
    model = made(WithStatistics, "bfloat16")
    arrays = arrays_of(model)
    assert arrays.keys() == model.state_dict().keys()
    assert {array.dtype for array in arrays.values()} == {"float32", "int64"}
    twin = made(WithStatistics, "bfloat16", seed=1)
    load_arrays(twin, arrays)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in twin.state_dict().items())


def trained_by(make, name):
    """An honest client: a step on its own data in the model's format, then make_reply."""
    context = node()

    def behaviour(message):
        model = made(make, name, seed=5)
        load_arrays(model, message.content["arrays"])
        generator = torch.Generator().manual_seed(message.content["config"]["seed"] % 2**32)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(3):
            if make is Tokens:
                x = torch.randint(7, (8, 4), generator=generator)
            else:
                x = torch.randn(8, 5, generator=generator).to(FORMATS[name])
            nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return make_reply(message, model, num_examples=8, context=context).content

    return behaviour


@pytest.mark.parametrize(
    ("case", "name", "update_dtype"),
    [
        ("layers", "float64", "float16"),
        ("layers", "float16", "int4"),
        ("statistics", "float16", "bfloat16"),
        ("bare", "bfloat16", "float32"),
        ("statistics", "bfloat16", "int8"),
        ("tokens", "float64", "bfloat16"),
    ],
)
def test_every_audit_passes_and_a_resumed_run_ends_in_the_same_bits(
    case, name, update_dtype, tmp_path
):
    make, arguments = MODELS[case]
    events = Recorder()

    def strategy(**options):
        model = made(make, name)
        probe = Probe.gaussian(model, size=8, **arguments)
        return FedPSA(
            sketch_fn=probe.sketch_fn(model),
            buffer_size=2,
            queue_size=4,
            max_in_flight=3,
            audit_fraction=1.0,
            audit_tolerance=1e-6,
            training=Training(update_dtype=update_dtype),
            listeners=[events],
            **options,
        )

    first = arrays_of(made(make, name))
    resumed, whole, _ = killed_and_resumed(
        strategy, lambda: trained_by(make, name), tmp_path, arrays=first
    )
    assert resumed == whole != {key: array.data for key, array in first.items()}
    assert not events.of("reject"), events.of("reject")[0].reason


def test_what_a_narrow_format_cannot_hold_is_no_update():
    """A global model in float32 keeps its last bits: clients that stand still do not round it."""
    arrays = arrays_of(made(lambda: nn.Linear(5, 3), "bfloat16"))
    fine = {key: array.numpy() * np.float32(1.001) for key, array in arrays.items()}

    def behaviour(message):
        model = made(lambda: nn.Linear(5, 3), "bfloat16", seed=5)
        load_arrays(model, message.content["arrays"])
        return make_reply(message, model, num_examples=8).content

    strategy = FedBuff(buffer_size=1, max_in_flight=1)
    result = run(
        strategy,
        ScriptedGrid(2, behaviour),
        num_versions=3,
        arrays=ArrayRecord({key: Array(value) for key, value in fine.items()}),
    )
    assert all(np.array_equal(result.arrays[key].numpy(), fine[key]) for key in fine)


def test_flowers_own_strategies_get_the_formats_that_they_sent():
    model = made(WithStatistics, "bfloat16")
    message = train_message(arrays_of(model), {"lr": 0.1})
    reply = make_reply(message, model, num_examples=1)
    assert reply.content.keys() == {"arrays", "metrics"}
    sent, back = message.content["arrays"], reply.content["arrays"]
    assert {k: (a.dtype, a.data) for k, a in sent.items()} == {
        k: (a.dtype, a.data) for k, a in back.items()
    }


def test_a_real_batch_is_cast_as_well():
    model = made(Net, "float64")
    batch = Calibration.real(np.ones((4, 5)), np.array([0, 1, 2, 0]))
    probe = Probe(batch, Sketch(num_trainable(model), 8))
    assert len(probe.sketch_fn(model).probe(model)) == 8
