"""Models that no fast way serves are sketched all the same, with one warning."""

import logging
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedpsa_strategy import Probe, arrays_of
from fedpsa_strategy.probe import per_sample
from fedpsa_strategy.probe.sensitivity import sensitivity
from support.sensitivities import by_definition, cross_entropy

WORDS, LENGTH, CLASSES = 11, 7, 3


class MaskedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        hidden = self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, tokens):
        lengths = (tokens != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(
            self.words(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(packed)[1][0][-1])


class Bare(nn.Module):
    """A bare parameter, which the layers' rules do not know, beside code that looks at values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, CLASSES)
        self.shift = nn.Parameter(torch.randn(CLASSES))


class LooksAtAValue(Bare):
    def forward(self, x):
        outputs = self.linear(x) + self.shift
        return outputs * 2 if outputs.sum().item() > 1e6 else outputs


class BooleanMask(Bare):
    def forward(self, x):
        outputs = self.linear(x) + self.shift
        negative = outputs < 0
        changed = outputs.clone()
        changed[negative] = 0.1 * outputs[negative]
        return changed


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)
        self.shift = nn.Parameter(torch.randn(CLASSES))

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1)) + self.shift


TOKENS = {"shape": (LENGTH,), "vocabulary": WORDS}
# class, the arguments of its probe, what the warning calls the place
MODELS = {
    "masked transformer": (MaskedEncoder, TOKENS, "layer 'encoder' (TransformerEncoder)"),
    "packed sequences": (Packed, TOKENS, "its own forward pass"),
    "a value looked at": (LooksAtAValue, {"shape": (5,)}, "its own forward pass"),
    "boolean mask": (BooleanMask, {"shape": (5,)}, "its own forward pass"),
    "sparse embedding": (Sparse, TOKENS, "layer 'words' (Embedding)"),
}


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch):
    monkeypatch.setattr(per_sample, "_warned", set())


def made(make):
    torch.manual_seed(0)
    return make().double()


def batch_for(arguments, samples=6):
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    if "vocabulary" in arguments:
        tokens = torch.randint(WORDS, (samples, LENGTH), generator=generator)
        for row, length in enumerate([7, 5, 3, 7, 1, 6]):
            tokens[row, length:] = 0
            tokens[row, :length].clamp_(min=1)
        return tokens, targets
    return torch.randn(samples, 5, generator=generator, dtype=torch.float64), targets


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error")
def test_what_has_no_vectorised_form_equals_the_by_definition(name, caplog):
    make, arguments, place = MODELS[name]
    model, batch = made(make), batch_for(arguments)
    expected = by_definition(model, *batch)
    for _ in range(2):
        found = sensitivity(model, *batch)
        torch.testing.assert_close(
            found.double(), expected, rtol=2e-6, atol=2e-6 * float(expected.mean())
        )
    sensitivity(made(make), *batch)  # another one of its class
    (text,) = caplog.messages
    assert text.startswith(f"A sketch of {make.__name__} takes ")
    assert f" ms: {place} does not" in text
    assert "each of the 6 samples" in text


@pytest.mark.parametrize("name", MODELS)
def test_their_probes_make_the_same_sketch_each_time(name):
    make, arguments, _ = MODELS[name]
    model = made(make).float()
    probe = Probe.gaussian(model, num_classes=CLASSES, size=8, **arguments)
    assert probe(model) == probe(model) == probe(made(make).float())
    assert any(probe(model))


class MaskedWords(nn.Module):
    """A layer that sees masked words alone, as many as there are samples: by chance."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6).requires_grad_(False)
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens):
        masked = tokens == 0
        hidden = torch.tanh(self.first(self.words(torch.roll(tokens, 1, 1))[masked]))
        totals = torch.zeros(len(tokens), 5, dtype=hidden.dtype)
        return self.head(totals.index_add(0, masked.nonzero()[:, 0], hidden))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("samples", [2, 3, 6, 9, 40])
def test_rows_that_are_as_many_as_the_samples_by_chance(samples, seed):
    model, generator = made(MaskedWords), torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    places = torch.randperm(samples * LENGTH, generator=generator)[:samples]
    tokens.view(-1)[places] = 0
    targets = torch.arange(samples) % CLASSES
    expected = by_definition(model, tokens, targets)
    found = sensitivity(model, tokens, targets).double()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * float(expected.mean()))


def test_the_vectorised_way_is_tried_once_per_model(monkeypatch):
    calls = []
    way = per_sample.vectorised
    monkeypatch.setattr(per_sample, "vectorised", lambda *a: calls.append(1) or way(*a))
    model, batch = made(LooksAtAValue), batch_for({})
    for _ in range(3):
        sensitivity(model, *batch)
    assert len(calls) == 1


def test_a_model_that_is_itself_at_fault_says_so_and_warns_nobody(caplog):
    class Broken(Bare):
        def forward(self, x):
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        sensitivity(made(Broken), *batch_for({}))
    assert not caplog.messages


def test_a_sample_that_takes_no_part(caplog):
    """The loss of some samples depends on no parameter at all."""

    class Gate(Bare):
        def forward(self, x):
            if len(x) == 1 and x[0, 0].item() > 0:
                return torch.zeros(1, CLASSES, dtype=x.dtype)
            return self.linear(x) + self.shift

    model, (inputs, targets) = made(Gate), batch_for({})
    kept = inputs[:, 0] <= 0
    assert 0 < kept.sum() < len(kept)
    plain = made(Bare)
    rows = []
    for k in range(len(inputs)):
        if kept[k]:
            outputs = plain.linear(inputs[k : k + 1]) + plain.shift
            loss = cross_entropy(outputs, targets[k : k + 1]).sum()
            parts = torch.autograd.grad(loss, list(plain.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
    gradients, value = torch.stack(rows), torch.cat([p.flatten() for p in plain.parameters()])
    total = len(inputs)
    share = gradients.sum(0) / total * value - 0.5 * (gradients**2).sum(0) / total * value**2
    found = sensitivity(model, inputs, targets)
    torch.testing.assert_close(found.double(), share.abs().detach(), rtol=1e-5, atol=1e-9)


class Own(torch.autograd.Function):
    """As people write it who never heard of torch.func."""

    @staticmethod
    def forward(context, x, scale):
        context.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(context, gradient):
        x, scale = context.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(5)), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(Own.apply(x, self.scale))


class Experts(nn.Module):
    """Which expert a sample goes to depends on the sample."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 2)
        self.experts = nn.ModuleList([nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)])

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        outputs = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            chosen = weights.argmax(1) == number
            part = expert(x[chosen]) * weights[chosen, number : number + 1]
            outputs = outputs.index_put((chosen.nonzero()[:, 0],), part)
        return outputs


class ExtraState(nn.Linear):
    """Keeps more than tensors in its state dict, as quantised layers do."""

    def get_extra_state(self):
        return {"scale": 0.5}

    def set_extra_state(self, state):
        raise AssertionError("nobody sends it")


def plain():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))


STRANGE = {
    "own autograd function": OwnFunction,
    "mixture of experts": Experts,
    "extra state": lambda: nn.Sequential(ExtraState(5, 4), nn.Linear(4, CLASSES)),
    "data parallel": lambda: nn.DataParallel(plain()),
    "scripted": lambda: torch.jit.script(plain()),
    "traced": lambda: torch.jit.trace(plain(), torch.zeros(2, 5)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
    "bfloat16 below float32": lambda: MixedFormats(),
}


class MixedFormats(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4).bfloat16(), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).float())


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_else_people_bring(name):
    torch.manual_seed(0)
    model = STRANGE[name]()
    probe = Probe.gaussian(model, (5,), num_classes=CLASSES, size=16)
    batch = probe.calibration.tensors("cpu", next(model.parameters()).dtype)
    expected = by_definition(model, *batch).float()
    error = (sensitivity(model, *batch) - expected).norm() / expected.norm()
    assert error < (2e-2 if name.startswith("bfloat16") else 1e-5)
    assert probe.sketch_fn(STRANGE[name]())(arrays_of(model)) == probe(model)


def test_a_scripted_model_is_named(caplog):
    sensitivity(torch.jit.script(plain()), torch.randn(4, 5), torch.arange(4) % CLASSES)
    assert "its own forward pass does not work on many" in caplog.text


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(5, 3).requires_grad_(False), "Linear has no parameters to train"),
        (nn.Linear(5, 3, dtype=torch.complex64), "'weight' is torch.complex64.*view_as_real"),
        (nn.LazyLinear(3), "uninitialized parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_have_no_sensitivities(model, text):
    with pytest.raises(ValueError, match=text):
        Probe.gaussian(model, (5,), num_classes=3)


def test_looking_at_a_model_leaves_its_buffers_alone():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(5, CLASSES)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(CLASSES))

        def forward(self, x):
            self.calls += 1
            outputs = super().forward(x)
            self.last = outputs[0].detach()
            return outputs

    model = Counting()
    last = model.last
    Probe.gaussian(model, (5,), num_classes=CLASSES)
    assert float(model.calls) == 0
    assert model.last is last
    assert not last.any()


# --- Outputs that are no tensor ----------------------------------------------------------------


@dataclass
class Output:
    """As models of `transformers` return it."""

    logits: torch.Tensor
    hidden: torch.Tensor


OUTPUTS = {
    "attribute": (lambda o, h: Output(o, h), lambda out: out.logits),
    "namespace": (lambda o, h: types.SimpleNamespace(logits=o), lambda out: out.logits),
    "tuple": (lambda o, h: (h, o), lambda out: out[1]),
    "list": (lambda o, h: [o], lambda out: out[0]),
    "dict": (lambda o, h: {"scores": o, "hidden": h}, lambda out: out["scores"]),
}


class Wrapping(nn.Module):
    """Returns its outputs in some form, on each of the three ways."""

    def __init__(self, form, way):
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, CLASSES)
        self.form, self.way = form, way
        if way != "layers":
            self.shift = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        outputs = self.head(hidden)
        if self.way != "layers":
            outputs = outputs + self.shift
        if self.way == "one by one":
            outputs.sum().item()
        return self.form(outputs, hidden)


@pytest.mark.parametrize("way", ["layers", "vectorised", "one by one"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_tensor_go_through_the_loss(name, way, caplog):
    form, logits_of = OUTPUTS[name]
    model, batch = made(lambda: Wrapping(form, way)), batch_for({})

    def loss_fn(outputs, targets):
        return cross_entropy(logits_of(outputs), targets)

    expected = by_definition(model, *batch, loss_fn)
    torch.testing.assert_close(
        sensitivity(model, *batch, loss_fn).double(), expected, rtol=1e-5, atol=1e-9
    )
    assert len(caplog.messages) == (way == "one by one")
    model = model.float()
    probe = Probe.gaussian(model, shape=(5,), num_classes=CLASSES, size=8, loss_fn=loss_fn)
    assert probe.sketch_fn(model).probe(model) == probe(model)
    with pytest.raises(ValueError, match=r"loss_fn"):
        Probe.gaussian(model, shape=(5,), num_classes=CLASSES, size=8)


def test_without_a_loss_the_error_says_how_to_take_the_logits():
    model = Wrapping(OUTPUTS["attribute"][0], "layers")
    with pytest.raises(ValueError, match=r"returns Output.*outputs\.logits"):
        Probe.gaussian(model, shape=(5,), num_classes=CLASSES)


def test_warnings_are_flowers_log(caplog):
    sensitivity(made(LooksAtAValue), *batch_for({}))
    assert [(r.name, r.levelno) for r in caplog.records] == [("flwr", logging.WARNING)]
