"""Local training and evaluation."""

import copy
import math
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.programs import printed_by
from task import hardware
from task.models import make_model
from task.shards import dataset_source
from task.tensors import Shard
from task.training import CompiledStepError, evaluate, resolve_device, set_threads, train

pytestmark = pytest.mark.usefixtures("one_thread")


def toy_shard(n=50, shape=(1, 8, 8), classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Shard(
        torch.randn(n, *shape, generator=generator),
        torch.randint(0, classes, (n,), generator=generator),
    )


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def distance(first, second):
    pairs = zip(first, second, strict=True)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))


SETTINGS = {"lr": 0.1, "epochs": 2, "batch_size": 16, "seed": 0}


def test_digits_are_learnt(tmp_path):
    shard = dataset_source("digits", cache_dir=tmp_path).client(0, 1)
    test = dataset_source("digits", cache_dir=tmp_path).test()
    model = make_model("digits", 0)
    before_loss, before = evaluate(model, test)
    train(model, shard, lr=0.1, epochs=15, batch_size=64, seed=0)
    loss, accuracy = evaluate(model, test)
    assert before < 0.3
    assert accuracy > 0.9
    assert loss < before_loss


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_equal_arguments_give_equal_bits(dataset):
    shape = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}[dataset]
    shard = toy_shard(n=20, shape=shape)
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        model = make_model(dataset, 0)
        loss = train(model, shard, **SETTINGS)
        results.append((loss, parameters(model)))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])
    assert not equal(results[0][1], parameters(make_model(dataset, 0)))


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.2}, {"epochs": 3}, {"batch_size": 17}])
def test_every_setting_matters(change):
    shard = toy_shard()
    models = [make_model("digits", 0) for _ in range(2)]
    train(models[0], shard, **SETTINGS)
    train(models[1], shard, **(SETTINGS | change))
    assert not equal(parameters(models[0]), parameters(models[1]))


def reference(model, shard, *, lr, epochs, batch_size, seed, proximal=0.0):
    """Train by the textbook, the proximal term left to autograd."""
    start = parameters(model)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(shard), generator=generator)
        for first in range(0, len(shard), batch_size):
            batch = order[first : first + batch_size]
            loss = functional.cross_entropy(model(shard.x[batch]), shard.y[batch])
            losses.append(loss.item())
            pairs = zip(model.parameters(), start, strict=True)
            penalty = sum((parameter - origin).square().sum() for parameter, origin in pairs)
            model.zero_grad()
            (loss + proximal / 2 * penalty).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_steps_agree_with_the_textbook(dataset, proximal):
    single = toy_shard(n=40, shape=(1, 8, 8) if dataset == "digits" else (3, 32, 32))
    # Double precision, so that no rounding decides a ReLU or a maximum differently.
    shard = Shard(single.x.double(), single.y)
    ours, theirs = make_model(dataset, 0).double(), make_model(dataset, 0).double()
    loss = train(ours, shard, **SETTINGS, proximal=proximal)
    expected, steps = reference(theirs, shard, **SETTINGS, proximal=proximal)
    # 40 samples in batches of 16: two full ones and a short one, which counts like the others.
    assert steps == 2 * 3
    assert loss == pytest.approx(expected, rel=1e-9)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-12)


def test_the_proximal_term_holds_the_model_back():
    shard = toy_shard()
    distances = []
    for proximal in (0.0, 1.0, 5.0):
        model = make_model("digits", 0)
        start = parameters(model)
        train(model, shard, **(SETTINGS | {"epochs": 10}), proximal=proximal)
        distances.append(distance(parameters(model), start))
    assert distances[0] > distances[1] > distances[2] > 0.0


def test_the_proximal_gradient_is_that_of_the_formula():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([1.0, -1.0]))

        def forward(self, x):
            return self.bias.expand(len(x), 2)

    shard = Shard(torch.zeros(2, 1), torch.tensor([0, 1]))
    model = Constant()
    # Both classes equally often: the gradient at b is softmax(b) - 1/2 + ρ (b - start).
    lr, proximal = 0.5, 2.0
    train(model, shard, lr=lr, epochs=2, batch_size=2, seed=0, proximal=proximal)
    start = torch.tensor([1.0, -1.0])
    expected = start.clone()
    for _ in range(2):
        gradient = expected.softmax(0) - 0.5 + proximal * (expected - start)
        expected = expected - lr * gradient
    assert torch.allclose(model.bias.detach(), expected)


class Noisy(nn.Module):
    """Everything a plain model lacks: dropout, statistics, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(64, 10)
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.drop(self.norm(x.flatten(1) * self.frozen)))


def noisy_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Noisy()


def test_dropout_follows_the_seed_and_no_global_state():
    shard = toy_shard()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second, third = noisy_model(), noisy_model(), noisy_model()
    train(first, shard, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    train(second, shard, **SETTINGS)
    assert equal(parameters(first), parameters(second))
    assert torch.equal(first.norm.running_mean, second.norm.running_mean)
    assert first.norm.num_batches_tracked == 8
    assert torch.equal(first.frozen, torch.ones(64))
    assert torch.equal(first.unused, torch.ones(3))
    train(third, shard, **(SETTINGS | {"seed": 1}))
    assert not equal(parameters(first), parameters(third))


def test_modes_are_restored():
    model = noisy_model()
    model.train()
    model.norm.eval()
    evaluate(model, toy_shard())
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    train(model, toy_shard(), **SETTINGS)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    with pytest.raises(RuntimeError):
        evaluate(model, toy_shard(shape=(1, 3, 3)))
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)


def test_a_model_may_keep_a_part_of_it_out_of_training():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()  # its statistics stay as they are
            return self

    model = Frozen(nn.BatchNorm1d(3), nn.Linear(3, 2))
    shard = Shard(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    train(model, shard, lr=0.1, epochs=1, batch_size=4, seed=0)
    assert int(model[0].num_batches_tracked) == 0


def test_evaluation_counts_every_sample_once_and_changes_nothing():
    shard = toy_shard(n=23)
    model = noisy_model()
    before = copy.deepcopy(model.state_dict())
    results = [evaluate(model, shard, batch_size=size) for size in (1, 10, 23, 1000)]
    model.eval()
    with torch.no_grad():
        logits = model(shard.x)
    expected_loss = float(functional.cross_entropy(logits, shard.y))
    expected_accuracy = float((logits.argmax(1) == shard.y).float().mean())
    for loss, accuracy in results:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert accuracy == pytest.approx(expected_accuracy)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_shard_is_not_changed():
    shard = toy_shard()
    x, y = shard.x.clone(), shard.y.clone()
    train(make_model("digits", 0), shard, **SETTINGS)
    assert torch.equal(shard.x, x)
    assert torch.equal(shard.y, y)


def test_diverging_steps_return_what_they_computed():
    loss = train(make_model("digits", 0), toy_shard(), **(SETTINGS | {"lr": 1e38}))
    assert not math.isfinite(loss)


def test_bad_arguments_are_refused():
    model, shard = make_model("digits", 0), toy_shard()
    with pytest.raises(ValueError, match="unknown step 'fast'; choose from eager, compiled"):
        train(model, shard, **SETTINGS, step="fast")
    for bad in ({"epochs": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            train(model, shard, **(SETTINGS | bad))


def test_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    for bad in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ValueError, match="choose auto, cpu, cuda or cuda:N"):
            resolve_device(bad)
    monkeypatch.setattr(hardware.torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(RuntimeError, match=f"'{name}' was asked for but CUDA is not available"):
            resolve_device(name)
    monkeypatch.setattr(hardware.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware.torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="there are 2 of them"):
        resolve_device("cuda:2")


def test_a_model_is_moved_unless_all_of_it_is_there(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    moved = []
    to = model.to
    monkeypatch.setattr(model, "to", lambda device: (moved.append(device), to(device)))
    hardware.move(model, torch.device("cpu"))
    assert moved == []
    model[1].running_mean = model[1].running_mean.to("meta")  # a single buffer is elsewhere
    with pytest.raises(NotImplementedError, match="meta"):
        hardware.move(model, torch.device("cpu"))
    hardware.move(model, torch.device("meta"))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert len(moved) == 2


def test_a_model_may_be_trained_where_it_is(monkeypatch):
    models = [make_model("digits", 0) for _ in range(2)]
    train(models[0], toy_shard(), **SETTINGS)
    monkeypatch.setattr(nn.Module, "to", None)  # nothing is moved
    train(models[1], toy_shard(), **SETTINGS, device=None)
    assert equal(*map(parameters, models))


def test_mixed_precision_rounds_the_products_and_keeps_the_parameters():
    shard = toy_shard()
    models = [make_model("digits", 0) for _ in range(3)]
    losses = [
        train(model, shard, **SETTINGS, autocast=autocast)
        for model, autocast in zip(models, ("off", "bfloat16", "bfloat16"), strict=True)
    ]
    assert equal(parameters(models[1]), parameters(models[2]))
    assert losses[0] != losses[1] == losses[2]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    for exact, rounded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert rounded.dtype == torch.float32
        assert torch.allclose(exact, rounded, rtol=0.1, atol=0.02)
        assert not equal([exact], [rounded])


def test_mixed_precision_is_refused_where_it_is_not_known_to_work():
    for bad in ({"autocast": "float16"}, {"autocast": "bfloat16", "step": "compiled"}):
        with pytest.raises(ValueError, match="autocast"):
            train(make_model("digits", 0), toy_shard(), **SETTINGS, **bad)


def test_threads_can_be_set_again_and_again():
    for count in (2, 1, 2):
        set_threads(count)
        assert torch.get_num_threads() == count
    with pytest.raises(ValueError, match="at least one thread"):
        set_threads(0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_training_on_cuda_is_reproducible_and_close_to_the_cpu():
    shard = toy_shard(n=40, shape=(3, 32, 32))
    models = [make_model("cifar10", 0) for _ in range(3)]
    train(models[0], shard, **SETTINGS, device="cuda")
    train(models[1], shard, **SETTINGS, device="cuda")
    train(models[2], shard, **SETTINGS)
    assert equal(parameters(models[0]), parameters(models[1]))
    for a, b in zip(models[0].parameters(), models[2].parameters(), strict=True):
        assert torch.allclose(a.cpu(), b, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("dataset", ["digits", "fmnist", "cifar10"])
def test_compiled_steps_agree_with_eager_ones(dataset, proximal):
    shape = {"digits": (1, 8, 8), "fmnist": (1, 28, 28), "cifar10": (3, 32, 32)}[dataset]
    shard = toy_shard(n=40, shape=shape)
    results = []
    for step in ("eager", "compiled", "compiled"):
        model = make_model(dataset, 0)
        loss = train(model, shard, **SETTINGS, step=step, proximal=proximal)
        results.append((loss, parameters(model)))
    (eager_loss, eager), (loss, compiled), (_, again) = results
    assert loss == pytest.approx(eager_loss, rel=1e-5)
    # The stated tolerance: a thousandth of the way that the parameters moved.
    moved = distance(parameters(make_model(dataset, 0)), eager)
    assert distance(eager, compiled) < 1e-3 * moved
    assert equal(compiled, again)


@pytest.mark.slow
def test_compiled_code_is_shared_by_models_of_one_architecture():
    from torch._dynamo.utils import counters

    shard = toy_shard(n=40)
    torch.compiler.reset()
    train(make_model("digits", 0), shard, **SETTINGS, step="compiled")
    graphs = counters["stats"]["unique_graphs"]
    # Neither another model, another rate nor another start means compiling anew.
    train(make_model("digits", 1), shard, **(SETTINGS | {"lr": 0.05}), step="compiled")
    assert counters["stats"]["unique_graphs"] == graphs
    # A proximal term does.
    train(make_model("digits", 1), shard, **SETTINGS, proximal=0.1, step="compiled")
    assert counters["stats"]["unique_graphs"] > graphs


@pytest.mark.slow
def test_compiled_code_is_shared_by_clients_of_different_sizes():
    from torch._dynamo.utils import counters

    shard = toy_shard(100)

    def trained(n):
        model = make_model("digits", 0)
        part = Shard(shard.x[:n].clone(), shard.y[:n].clone())
        train(model, part, **SETTINGS, step="compiled")
        return parameters(model)

    torch.compiler.reset()
    alone = trained(67)
    torch.compiler.reset()
    trained(35)
    trained(51)  # compiled for any number of samples
    graphs = counters["stats"]["unique_graphs"]
    beside_others = trained(67)
    for n in (40, 83, 99):
        trained(n)
    assert counters["stats"]["unique_graphs"] == graphs
    assert equal(alone, beside_others)


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 32, 16, 9])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_compiled_epoch_takes_every_step(n, epochs):
    shard = toy_shard(n)
    settings = SETTINGS | {"epochs": epochs}
    expected, found = make_model("digits", 0), make_model("digits", 0)
    expected_loss = train(expected, shard, **settings)
    found_loss = train(found, shard, **settings, step="compiled")
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    moved = distance(parameters(make_model("digits", 0)), parameters(expected))
    assert distance(parameters(expected), parameters(found)) < 1e-3 * moved


@pytest.mark.slow
def test_dropout_in_a_compiled_epoch_is_drawn_anew_for_every_step():
    class Shows(nn.Module):
        """Its gradient tells how many steps an entry was there."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64))

        def forward(self, x):
            return functional.dropout(x.flatten(1), 0.5, self.training) * self.weight

    shard = Shard(torch.ones(5, 1, 8, 8), torch.zeros(5))
    results = []
    for seed in (0, 0, 1):
        model = Shows()
        # Two full batches and a shorter one an epoch, every sample of it with a mask of its own.
        settings = {"lr": 1.0, "epochs": 13, "batch_size": 2, "seed": seed}
        train(model, shard, **settings, step="compiled", loss_fn=lambda out, _: out.sum(1))
        results.append(-model.weight.detach() / 2)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # Of 39 steps an entry is there in about half. If the masks of all epochs, or of all batches of
    # one, were the same, some entries would be there nearly always, or never.
    assert results[0].min() > 7
    assert results[0].max() < 32


@pytest.mark.slow
def test_compiled_steps_handle_frozen_unused_and_double_parameters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64, bias=False)
            self.again = nn.Linear(64, 64)
            self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(3))
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            x = self.again(torch.tanh(self.first(x.flatten(1) * self.frozen)))
            return self.head(x)

    single, models = toy_shard(40), []
    shard = Shard(single.x.double(), single.y)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = Odd().double()
    for step in ("eager", "compiled"):
        models.append(copy.deepcopy(start))
        train(models[-1], shard, **SETTINGS, step=step, proximal=0.1)
    eager, compiled = map(parameters, models)
    moved = distance(parameters(start), eager)
    assert distance(eager, compiled) < 1e-6 * moved
    assert torch.equal(models[1].frozen, start.frozen)
    assert torch.equal(models[1].unused, start.unused)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["list", "twice", "writes", "counts"])
def test_what_a_compiled_epoch_would_get_wrong_is_refused(way):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)
            self.listed = [self.head.weight] if way == "list" else []
            self.again = self.head if way == "twice" else None
            self.written, self.seen = torch.zeros(()), 0

        def forward(self, x):
            if way == "list":  # a parameter, by another way than its name
                return functional.linear(x.flatten(1), self.listed[0], self.head.bias)
            if way == "twice":
                return self.head(x.flatten(1)) + self.again(x.flatten(1))
            if way == "writes":
                self.written.add_(1)
            if way == "counts":
                self.seen += 1
            return self.head(x.flatten(1))

    model = Odd()
    before = parameters(model)
    with pytest.raises(CompiledStepError, match='Otherwise set step = "eager"'):
        train(model, toy_shard(40), **SETTINGS, step="compiled")
    assert equal(before, parameters(model))


@pytest.mark.slow
def test_compiled_steps_handle_statistics_frozen_and_unused_parameters():
    shard = toy_shard()
    models = [noisy_model() for _ in range(2)]
    for model, step in zip(models, ("eager", "compiled"), strict=True):
        model.drop.p = 0.0
        train(model, shard, **SETTINGS, step=step)
    eager, compiled = (model.state_dict() for model in models)
    assert compiled["norm.num_batches_tracked"] == 8
    for key, value in eager.items():
        assert torch.allclose(value.double(), compiled[key].double(), rtol=1e-4, atol=1e-6), key


@pytest.mark.slow
def test_a_missing_compiler_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert shutil.which("g++", path=str(tmp_path)) is None
    script = (
        "import torch\n"
        "from task.models import make_model\n"
        "from task.tensors import Shard\n"
        "from task.training import CompiledStepError, train\n"
        "shard = Shard(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))\n"
        "model = make_model('digits', 0)\n"
        "try:\n"
        "    train(model, shard, lr=0.1, epochs=1, batch_size=4, seed=0, step='compiled')\n"
        "except CompiledStepError as error:\n"
        "    print(error)\n"
    )
    printed = printed_by(
        script, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    assert 'step = "compiled"' in printed
    assert 'step = "eager"' in printed
    assert "compiler" in printed
    assert issubclass(CompiledStepError, RuntimeError)
