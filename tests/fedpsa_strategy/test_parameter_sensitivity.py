import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpsa_strategy.probe import layer_moments, per_sample
from fedpsa_strategy.probe import sensitivity as module
from fedpsa_strategy.probe.sensitivity import sensitivity, trainable_vector
from support.sensitivities import by_definition


class Pooled(nn.Module):
    """Bag of words: embedding, mean over the tokens, linear."""

    def __init__(self, padding_idx=None):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.head = nn.Linear(6, 4)
        if padding_idx is not None:
            nn.init.normal_(self.embedding.weight)  # so that a gradient there would show

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


class Positions(nn.Module):
    """Every sample adds the same embedded positions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.tanh(x + self.embedding(torch.arange(8, device=x.device))).mean(1))


class SequenceFirst(nn.Module):
    """A linear layer that sees (sequence, batch, features)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


class Function(nn.Module):
    """A model whose forward pass is given, with a layer `first` and a layer `head`."""

    def __init__(self, forward, width=6):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.head = nn.Linear(width, 4)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def behind_the_back(model, x):
    hidden = torch.tanh(model.first(x))
    return model.head(torch.tanh(functional.linear(hidden, model.first.weight)))


def behind_the_back_only(model, x):
    model.first(x)
    return model.head(torch.tanh(functional.linear(x, model.first.weight, model.first.bias)))


def never_called(model, x):
    return model.head(torch.tanh(functional.linear(x, model.first.weight, model.first.bias)))


def called_in_vain(model, x):
    model.first(x.square())
    return model.head(torch.tanh(model.first(x)))


def twice(model, x):
    return model.head(torch.tanh(model.first(torch.tanh(model.first(x)))))


def without_first(model, x):
    return model.head(x)


def detached_first(model, x):
    with torch.no_grad():
        hidden = model.first(x)
    return model.head(hidden)


def by_keyword(model, x):
    return model.head(input=model.first(input=x))


def flattened(model, x):
    samples = len(x)
    hidden = torch.tanh(model.first(x.reshape(-1, 6)))
    return model.head(hidden.reshape(samples, -1, hidden.shape[1]).mean(1))


def penalised(model, x):
    return model.head(torch.tanh(model.first(x))) * (1 + model.first.weight.square().sum())


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return functional.linear(x, self.one) + functional.linear(x, self.other).square()


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(x * self.scale)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    return model


def shared():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


def patched():
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].forward = lambda x: 3 * functional.linear(x, model[0].weight, model[0].bias)
    return model


def user_hook():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].register_forward_hook(lambda layer, args, output: torch.tanh(output) * 2)
    model[1].register_forward_pre_hook(lambda layer, args: (args[0] ** 2,))
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrised():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


def norm_with_statistics(norm):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.running_mean.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)
        norm.weight.normal_(generator=generator)
    return norm


def convolutional(*layers, width):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 4))


HOOKS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "no bias": (lambda: nn.Linear(6, 4, bias=False), (6,)),
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), (6,)),
    "in-place": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(True), nn.Linear(9, 4)), (6,)),
    "linear on a sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), Mean(), nn.Linear(5, 4)),
        (3, 6),
    ),
    "linear on a grid": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 4)),
        (2, 3, 6),
    ),
    "sequence as long as the batch": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Mean(), nn.Linear(5, 4)),
        (8, 6),
    ),
    "conv1d": (
        lambda: convolutional(
            nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), nn.Tanh(), width=20
        ),
        (2, 9),
    ),
    "conv2d": (lambda: convolutional(nn.Conv2d(2, 3, 3), nn.Tanh(), width=72), (2, 6, 8)),
    "conv2d, few places": (
        lambda: convolutional(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2)),
            nn.Tanh(),
            width=18,
        ),
        (2, 3, 3),
    ),
    "conv2d, few places, circular": (
        lambda: convolutional(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(), width=12
        ),
        (2, 2, 2),
    ),
    "conv2d, one place": (
        lambda: convolutional(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), width=3),
        (2, 1, 2),
    ),
    "conv2d, all options": (
        lambda: convolutional(
            nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2),
            nn.Tanh(),
            width=180,
        ),
        (4, 7, 6),
    ),
    "conv2d, stride leaves a rest": (
        lambda: convolutional(nn.Conv2d(1, 3, 2, stride=3), nn.Tanh(), width=12),
        (1, 6, 7),
    ),
    "conv2d, same": (
        lambda: convolutional(
            nn.Conv2d(2, 3, (2, 3), padding="same", bias=False), nn.Tanh(), width=90
        ),
        (2, 5, 6),
    ),
    "conv2d, circular": (
        lambda: convolutional(
            nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), nn.Tanh(), width=120
        ),
        (2, 5, 6),
    ),
    "conv3d": (
        lambda: convolutional(nn.Conv3d(2, 4, 2, padding=1, groups=2), nn.Tanh(), width=192),
        (2, 3, 3, 2),
    ),
    "batch norm 1d": (
        lambda: nn.Sequential(norm_with_statistics(nn.BatchNorm1d(6)), nn.Linear(6, 4)),
        (6,),
    ),
    "batch norm 1d on a sequence": (
        lambda: convolutional(norm_with_statistics(nn.BatchNorm1d(2)), nn.Tanh(), width=10),
        (2, 5),
    ),
    "batch norm 2d": (
        lambda: convolutional(
            nn.Conv2d(1, 3, 2), norm_with_statistics(nn.BatchNorm2d(3)), nn.ReLU(True), width=36
        ),
        (1, 4, 5),
    ),
    "batch norm 3d": (
        lambda: convolutional(norm_with_statistics(nn.BatchNorm3d(2)), nn.Tanh(), width=24),
        (2, 3, 2, 2),
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), (6,)),
    "layer norm on a sequence": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Tanh(), Mean(), nn.Linear(6, 4)),
        (3, 6),
    ),
    "layer norm over two dimensions": (
        lambda: convolutional(nn.LayerNorm((3, 4)), nn.Tanh(), width=24),
        (2, 3, 4),
    ),
    "group norm": (lambda: convolutional(nn.GroupNorm(2, 4), nn.Tanh(), width=24), (4, 2, 3)),
    "unused layer": (lambda: Function(without_first), (6,)),
    "detached layer": (lambda: Function(detached_first), (6,)),
    "keyword argument": (lambda: Function(by_keyword), (6,)),
    "hooks of the user": (user_hook, (6,)),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4)), (6,)),
}

VMAP = {
    "tied weights": (tied, (6,)),
    "shared layer": (shared, (6,)),
    "bare parameter": (Bare, (6,)),
    "attention": (Attention, (3, 6)),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(6, 2, 7, batch_first=True), Mean(), nn.Linear(6, 4)
        ),
        (3, 6),
    ),
    "subclass": (lambda: nn.Sequential(ScaledLinear(6, 4)), (6,)),
    "patched": (patched, (6,)),
    "parametrised weight": (parametrised, (6,)),
    "behind the back": (lambda: Function(behind_the_back), (6,)),
    "behind the back only": (lambda: Function(behind_the_back_only), (6,)),
    "never called": (lambda: Function(never_called), (6,)),
    "called in vain": (lambda: Function(called_in_vain), (6,)),
    "two names": (TwoNames, (6,)),
    "penalty on a weight": (lambda: Function(penalised), (6,)),
    "twice": (lambda: Function(twice), (6,)),
    "batch and sequence flattened": (lambda: Function(flattened, 5), (3, 6)),
    "sequence first": (SequenceFirst, (8, 6)),
    "positions of all samples": (Positions, (8, 6)),
    "batch statistics": (
        lambda: convolutional(
            nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2, track_running_stats=False), width=10
        ),
        (1, 6),
    ),
}


@pytest.fixture
def path(monkeypatch):
    """Tells which of the two ways the sensitivity went."""
    ways = ["hooks"]
    from_vmap = module.moments_of_any_model

    def noted(*arguments):
        ways.append("vmap")
        return from_vmap(*arguments)

    monkeypatch.setattr(module, "moments_of_any_model", noted)
    return ways


def made(make, seed=0):
    torch.manual_seed(seed)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():  # a bias or a norm that starts at 0 or 1 hides much
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch_of(shape, samples=8, classes=4):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (samples,), generator=generator)


def assert_close(actual, expected, relative=2e-6):
    """Compare in float32; no element may be off by more than its share or a little of the mean."""
    assert actual.dtype == torch.float32
    assert actual.dim() == 1
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=relative, atol=relative * float(expected.mean())
    )
    assert expected.mean() > 0


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_known_layers_equal_the_definition(name, path):
    make, shape = HOOKS[name]
    model, batch = made(make), batch_of(shape)
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))
    assert path == ["hooks"]


@pytest.mark.parametrize("name", VMAP)
@pytest.mark.filterwarnings("error")
def test_everything_else_equals_the_definition_too(name, path):
    make, shape = VMAP[name]
    model, batch = made(make), batch_of(shape)
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))
    assert path == ["hooks", "vmap"]


@pytest.mark.parametrize("padding_idx", [None, 3, -2])
def test_embedding(padding_idx, path):
    model = made(lambda: Pooled(padding_idx))
    tokens = torch.randint(11, (8, 20), generator=torch.Generator().manual_seed(2))
    labels = batch_of((1,))[1]
    expected = by_definition(model, tokens, labels)
    actual = sensitivity(model, tokens, labels)
    assert_close(actual, expected)
    assert path == ["hooks"]
    if padding_idx is not None:
        rows = actual[: 11 * 6].reshape(11, 6)
        assert torch.equal(rows[padding_idx], torch.zeros(6))
        assert (rows.sum(1) > 0).sum() == 10


def test_embedding_scaled_by_frequency_is_left_to_autograd(path):
    model = made(Pooled)
    model.embedding.scale_grad_by_freq = True
    tokens = torch.randint(11, (8, 20), generator=torch.Generator().manual_seed(2))
    sensitivity(model, tokens, batch_of((1,))[1])
    assert path == ["hooks", "vmap"]


@given(
    samples=st.integers(1, 6),
    channels=st.integers(1, 3),
    width=st.integers(4, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_convolutions_of_any_geometry(
    samples, channels, width, kernel, stride, padding, groups, seed
):
    torch.manual_seed(seed)
    convolution = nn.Conv2d(
        channels * groups, 2 * groups, kernel, stride=stride, padding=padding, groups=groups
    )
    pool = nn.AdaptiveAvgPool2d(2)
    model = convolutional(convolution, nn.Tanh(), pool, width=8 * groups).double()
    batch = batch_of((channels * groups, width, width + 1), samples)
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))


def test_regression_with_several_outputs(path):
    model = made(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
    inputs, _ = batch_of((6,))
    targets, _ = batch_of((4,))
    loss_fn = partial(functional.mse_loss, reduction="none")
    expected = by_definition(model, inputs, targets, loss_fn)
    assert_close(sensitivity(model, inputs, targets, loss_fn), expected)
    assert path == ["hooks"]
    tied_model = made(tied)
    expected = by_definition(tied_model, inputs, targets, loss_fn)
    assert_close(sensitivity(tied_model, inputs, targets, loss_fn), expected)


def test_one_label_per_position():
    model = made(lambda: nn.Conv1d(2, 4, 3, padding=1))
    inputs, _ = batch_of((2, 7))
    targets = torch.randint(4, (8, 7), generator=torch.Generator().manual_seed(1))
    assert_close(sensitivity(model, inputs, targets), by_definition(model, inputs, targets))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
@pytest.mark.parametrize("make", [HOOKS["two layers"][0], tied])
def test_frozen_parameters_are_left_out(frozen, make):
    model, batch = made(make), batch_of((6,))
    if frozen in dict(model.named_parameters()):
        model.get_parameter(frozen).requires_grad_(False)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    actual = sensitivity(model, *batch)
    assert len(actual) == trainable
    assert_close(actual, by_definition(model, *batch))


def test_nothing_trainable():
    model = nn.Linear(6, 4).requires_grad_(False)
    assert sensitivity(model, torch.ones(2, 6), torch.tensor([0, 1])).shape == (0,)
    assert trainable_vector(model).shape == (0,)


@pytest.mark.parametrize(
    "make", [HOOKS["batch norm 2d"][0], HOOKS["conv3d"][0], HOOKS["two layers"][0]]
)
def test_float32(make):
    shape = next(shape for other, shape in HOOKS.values() if other is make)
    model, (inputs, targets) = made(make), batch_of(shape)
    expected = by_definition(model, inputs, targets)
    assert_close(sensitivity(model.float(), inputs.float(), targets), expected, relative=1e-3)


@pytest.mark.parametrize("make", [nn.Linear, ScaledLinear])
def test_squares_of_half_precision_gradients_do_not_underflow(make):
    # g is about 2e-4, whose square float16 cannot hold; as θ is 4e3, half of s is from the square.
    model, (inputs, _) = make(6, 4, bias=False).half(), batch_of((6,))
    with torch.no_grad():
        model.weight.fill_(4e3)

    def loss_fn(outputs, targets):
        return outputs * 2e-4

    actual = sensitivity(model, inputs.half(), inputs, loss_fn)
    assert actual.dtype == torch.float32
    expected = by_definition(model.double(), inputs.half().double(), inputs, loss_fn)
    assert (actual.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("make", [HOOKS["batch norm 1d"][0], HOOKS["two layers"][0], tied])
def test_bfloat16(make):
    model, (inputs, targets) = made(make).bfloat16(), batch_of((6,))
    actual = sensitivity(model, inputs.bfloat16(), targets)
    expected = by_definition(model.double(), inputs.bfloat16().double(), targets)
    assert actual.dtype == torch.float32
    assert (actual.double() - expected).norm() < 0.05 * expected.norm()  # it has 8 bits


@pytest.mark.parametrize("samples", [2, 3])
def test_a_sequence_as_long_as_a_small_batch(samples, path):
    model, batch = made(SequenceFirst), batch_of((samples, 6), samples)
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))
    assert path == ["hooks", "vmap"]


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", ["linear on a sequence", "conv1d"])
def test_small_batches(samples, name, path):
    make, shape = HOOKS[name]
    model, batch = made(make), batch_of(shape, samples)
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))
    assert path == ["hooks"]


@pytest.mark.parametrize(
    ("make", "shape"), [HOOKS["conv2d"], HOOKS["linear on a sequence"], (Attention, (3, 6))]
)
@pytest.mark.parametrize("limit", [1, 1500, 10**9])
def test_per_sample_gradients_stay_within_the_memory_limit(make, shape, limit, monkeypatch):
    held = []
    added = layer_moments.added

    def noted(total, gradients):
        held.append(gradients)
        return added(total, gradients)

    for user in (per_sample, layer_moments):
        monkeypatch.setattr(user, "added", noted)
    model, batch = made(make), batch_of(shape)
    assert_close(sensitivity(model, *batch, memory_limit=limit), by_definition(model, *batch))
    assert held
    assert all(len(g) == 1 or 4 * g.numel() <= limit for g in held)
    assert limit < 10**9 or all(len(g) == 8 for g in held)


def test_each_sample_goes_through_the_model_once():
    model = made(lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(24, 4)))
    sizes = []
    model.register_forward_hook(lambda layer, args, output: sizes.append(len(output)))
    sensitivity(model, *batch_of((1, 4, 5), samples=64))
    assert sizes == [64, 8]


@pytest.mark.parametrize("name", ["conv2d", "batch norm 2d", "layer norm on a sequence"])
def test_the_same_twice(name):
    make, shape = HOOKS[name]
    model, batch = made(make), batch_of(shape)
    assert torch.equal(sensitivity(model, *batch), sensitivity(model, *batch))


class Broken(nn.Module):
    def forward(self, x):
        raise ArithmeticError("broken on purpose")


def stateful(*more):
    """A model in mixed modes, with a frozen parameter, gradients and a hook of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Sequential(nn.Linear(6, 4)), *more
    )
    model.train()
    model[1].eval()
    model[3][0].eval()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(6, 6)
    model[0].register_forward_hook(lambda *arguments: None)
    return model


def state_of(model):
    return {
        "modes": [layer.training for layer in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "identities": [id(p) for p in model.parameters()],
        "values": [value.tolist() for value in model.state_dict().values()],
        "hooks": [len(layer._forward_hooks) for layer in model.modules()],
        "other hooks": [
            len(layer._forward_pre_hooks) + len(layer._backward_hooks) for layer in model.modules()
        ],
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "enabled": torch.is_grad_enabled(),
    }


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize(
    "more", [[], [FunctionalDropout()], [ScaledLinear(4, 4), FunctionalDropout()]]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_no_state_changes(more, enabled):
    model = stateful(*more)
    inputs, targets = batch_of((6,))
    with torch.set_grad_enabled(enabled):
        before = state_of(model)
        result = sensitivity(model, inputs.float(), targets)
        assert state_of(model) == before
    assert not result.requires_grad
    assert result.sum() > 0


@pytest.mark.parametrize("more", [[Broken()], [ScaledLinear(4, 4), Broken()]])
def test_no_state_changes_when_the_model_fails(more):
    model = stateful(*more)
    before = state_of(model)
    inputs, targets = batch_of((6,))
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        sensitivity(model, inputs.float(), targets)
    assert state_of(model) == before


def test_eval_mode_is_what_counts():
    model = made(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.9), nn.Linear(6, 4)))
    batch = batch_of((6,))
    in_training = sensitivity(model.train(), *batch)
    assert torch.equal(in_training, sensitivity(model.eval(), *batch))


@pytest.mark.parametrize("make", [HOOKS["two layers"][0], tied])
def test_what_is_not_finite_is_returned(make):
    model, batch = made(make), batch_of((6,))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    result = sensitivity(model, *batch)
    assert len(result) == sum(p.numel() for p in model.parameters())
    assert result.isnan().any()


def overwritten_input(model, x):
    hidden = torch.tanh(x) + 1
    output = model.first(hidden)
    hidden.zero_()
    return model.head(output)


def test_an_input_overwritten_after_use_is_no_silent_error():
    # Training such a model fails in autograd as well; zeros would be the wrong answer.
    model, batch = made(lambda: Function(overwritten_input)), batch_of((6,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sensitivity(model, *batch)


@pytest.mark.parametrize("make", [HOOKS["two layers"][0], tied])
def test_reduced_losses_are_refused(make):
    model, batch = made(make), batch_of((6,))
    with pytest.raises(ValueError, match="one loss per sample"):
        sensitivity(model, *batch, functional.cross_entropy)


@pytest.mark.parametrize(("inputs", "targets"), [(0, 0), (3, 2)])
def test_wrong_batches_are_refused(inputs, targets):
    batch = torch.zeros(inputs, 6), torch.zeros(targets, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"not {inputs} and {targets}"):
        sensitivity(nn.Linear(6, 4), *batch)


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(layer, path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = layer(6, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(10, 4)

        def forward(self, x):
            return self.head(self.recurrent(x)[0][:, -1])

    model, batch = made(Recurrent), batch_of((3, 6))
    assert_close(sensitivity(model, *batch), by_definition(model, *batch))
    assert path == ["hooks", "vmap"]


def test_trainable_vector_has_the_order_of_the_sensitivity():
    model = made(HOOKS["two layers"][0])
    model[0].bias.requires_grad_(False)
    vector = trainable_vector(model)
    expected = torch.cat([model[0].weight.flatten(), model[2].weight.flatten(), model[2].bias])
    assert torch.equal(vector, expected)
    assert not vector.requires_grad
    assert len(vector) == len(sensitivity(model, *batch_of((6,))))
    vector.zero_()
    assert model[2].bias.abs().sum() > 0
    # A parameter that is zero has no sensitivity, which ties the two orders together.
    with torch.no_grad():
        model[2].weight.zero_()
    zero = trainable_vector(model) == 0
    assert torch.equal(sensitivity(model, *batch_of((6,)))[zero], torch.zeros(int(zero.sum())))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("make", "shape"), [HOOKS["conv2d"], (Attention, (3, 6))])
def test_on_a_gpu(make, shape):
    model, batch = made(make), batch_of(shape)
    expected = by_definition(model, *batch)
    actual = sensitivity(model.cuda(), *batch)
    assert actual.device.type == "cuda"
    assert_close(actual.cpu(), expected)
