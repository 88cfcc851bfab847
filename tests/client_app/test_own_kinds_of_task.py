"""Own tasks of every kind, through the app's server and clients."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpsa_strategy import load_arrays
from fedpsa_strategy.watch.run_state import RunState
from support.own_tasks import install, run_task
from task.errors import TaskError

WORDS, LENGTH = 9, 6
REAL = {"calibration": "real", "calibration_transport": "arrays"}


def cross_entropy(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def bce(outputs, targets):
    return functional.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none")


def network(*layers):
    def make_model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*(layer() for layer in layers))

    return make_model


def points(generator, size):
    return torch.randn(size, 4, generator=generator)


class Wrapped(nn.Module):
    """Returns what a function makes of features and outputs."""

    def __init__(self, form):
        super().__init__()
        self.first, self.head, self.form = nn.Linear(4, 8), nn.Linear(8, 2), form

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.form(hidden, self.head(hidden))


def wrapped(form):
    def make_model(seed):
        torch.manual_seed(seed)
        return Wrapped(form)

    return make_model


class Tagger(nn.Module):
    """A class for every token, in the form of `transformers`: (n, tokens, classes)."""

    def __init__(self, like_transformers=True):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)
        self.like_transformers = like_transformers

    def forward(self, tokens):
        logits = self.head(self.words(tokens))
        if self.like_transformers:
            return types.SimpleNamespace(logits=logits, hidden_states=None)
        return logits.mT


def tagger(**kwargs):
    def make_model(seed):
        torch.manual_seed(seed)
        return Tagger(**kwargs)

    return make_model


def sentences(generator, size):
    tokens = torch.randint(WORDS, (size, LENGTH), generator=generator)
    tags = tokens % 3
    tags[tokens == 0] = -100  # padding
    return tokens, tags


def squares(generator, size):
    x = torch.randn(size, 1, 5, 5, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 0] > 1).long()


def right(mask):
    return float(mask.double().mean())


# make_model, data, loss, accuracy by hand (outputs, targets), how much training gains at least
TASKS = {
    "one logit": (
        network(lambda: nn.Linear(4, 1)),
        lambda g, n: (lambda x: (x, (x[:, 0] > x[:, 1]).long()))(points(g, n)),
        lambda o, t: bce(o[:, 0], t),
        lambda o, t: right((o[:, 0] > 0) == (t == 1)),
        0.2,
    ),
    "one probability": (
        network(lambda: nn.Linear(4, 1), nn.Sigmoid, lambda: nn.Flatten(0)),
        lambda g, n: (lambda x: (x, (x[:, 0] > x[:, 1] + 0.5).long()))(points(g, n)),
        lambda o, t: functional.binary_cross_entropy(o, t.float(), reduction="none"),
        lambda o, t: right((o > 0.5) == (t == 1)),
        0.2,
    ),
    "many labels": (
        network(lambda: nn.Linear(4, 3)),
        lambda g, n: (lambda x: (x, (x[:, :3] > 0.3).long()))(points(g, n)),
        lambda o, t: bce(o, t).mean(1),
        lambda o, t: right((o > 0) == (t == 1)),
        0.2,
    ),
    "tokens": (
        tagger(),
        sentences,
        lambda o, t: cross_entropy(o.logits.mT, t),
        lambda o, t: right((o.logits.argmax(-1) == t)[t != -100]),
        0.2,
    ),
    "tokens, classes second": (
        tagger(like_transformers=False),
        sentences,
        cross_entropy,
        lambda o, t: right((o.argmax(1) == t)[t != -100]),
        0.2,
    ),
    "segmentation": (
        network(lambda: nn.Conv2d(1, 6, 1), nn.Tanh, lambda: nn.Conv2d(6, 3, 1)),
        squares,
        cross_entropy,
        lambda o, t: right(o.argmax(1) == t),
        0.1,
    ),
    "binary segmentation": (
        network(lambda: nn.Conv2d(1, 1, 1)),
        lambda g, n: (lambda x: (x, (x[:, 0] > 0.5).long()))(torch.randn(n, 1, 5, 5, generator=g)),
        lambda o, t: bce(o[:, 0], t).flatten(1).mean(1),
        lambda o, t: right((o[:, 0] > 0) == (t == 1)),
        0.05,
    ),
    "regression": (
        network(lambda: nn.Linear(4, 2)),
        lambda g, n: (lambda x: (x, x[:, :2] * 2))(points(g, n)),
        lambda o, t: (o - t).square().mean(1),
        None,
        0.2,
    ),
    "tuple": (
        wrapped(lambda hidden, outputs: (hidden, outputs)),
        lambda g, n: (lambda x: (x, (x[:, 0] > 0).long()))(points(g, n)),
        lambda o, t: cross_entropy(o[1], t),
        None,
        0.2,
    ),
    "dict": (
        wrapped(lambda hidden, outputs: {"hidden": hidden, "logits": outputs}),
        lambda g, n: (lambda x: (x, (x[:, 0] > 0).long()))(points(g, n)),
        lambda o, t: cross_entropy(o["logits"], t),
        lambda o, t: right(o["logits"].argmax(1) == t),
        0.2,
    ),
}


def functions_of(case):
    make_model, data, loss, _, _ = TASKS[case]

    def sample(seed, size):
        return data(torch.Generator().manual_seed(seed), size)

    return {
        "make_model": make_model,
        "train_data": lambda node_config: sample(node_config["partition-id"], 64),
        "test_data": lambda: sample(10**6, 150),
        "calibration_data": lambda: sample(10**6 + 1, 100),
        "loss": loss,
    }


def accuracies(events):
    evaluations = [event for event in events.of("evaluate") if event.where == "server"]
    return [event.metrics.get("accuracy") for event in evaluations]


@pytest.mark.parametrize("case", TASKS)
def test_it_learns_and_reports_what_there_is(case, monkeypatch):
    functions = functions_of(case)
    name = install(monkeypatch, **functions)
    result, events, _, _ = run_task(name, versions=16, fraction_evaluate=1.0)
    _, _, loss, by_hand, gain = TASKS[case]
    evaluations = [event.metrics for event in events.of("evaluate") if event.where == "server"]
    losses = [metrics["loss"] for metrics in evaluations]
    assert losses[-1] < losses[0] * 0.9

    model = functions["make_model"](3)
    load_arrays(model.eval(), result.arrays)
    x, y = functions["test_data"]()
    with torch.no_grad():
        outputs = model(x)
        assert losses[-1] == pytest.approx(float(loss(outputs, y).mean()), rel=1e-4)
    if by_hand is None:
        assert not any("accuracy" in metrics for metrics in evaluations)
    else:
        found = accuracies(events)
        assert found[-1] == pytest.approx(by_hand(outputs, y))
        assert found[-1] > found[0] + gain or found[-1] > 0.95
    of_clients = [event.metrics for event in events.of("evaluate") if event.where == "clients"]
    assert of_clients
    assert all(("accuracy" in metrics) == (by_hand is not None) for metrics in of_clients)


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync", "ca2fl", "fedavg"])
def test_other_methods_take_them_too(strategy, monkeypatch):
    for case in ("one logit", "tokens", "tuple"):
        name = install(monkeypatch, **functions_of(case))
        _, events, _, _ = run_task(name, strategy=strategy, versions=2)
        assert events.of("aggregate")


@pytest.mark.parametrize("case", ["many labels", "tokens"])
def test_a_real_calibration_batch(case, monkeypatch):
    name = install(monkeypatch, **functions_of(case))
    _, events, _, _ = run_task(name, versions=2, **REAL)
    assert events.of("aggregate")


def test_a_real_calibration_batch_never_comes_from_the_test_data(monkeypatch):
    functions = functions_of("one logit")
    del functions["calibration_data"]
    name = install(monkeypatch, **functions)
    with pytest.raises(ValueError, match="calibration_data"):
        run_task(name, versions=1, **REAL)


# --- Metrics of one's own ----------------------------------------------------------------------


def test_a_task_brings_its_own_metrics(monkeypatch):
    seen = []

    def metrics(outputs, targets):
        seen.append((outputs, targets))
        positive = outputs[:, 0] > 0
        hits = (positive & (targets == 1)).sum()
        return {
            "f1": 2 * hits / (positive.sum() + (targets == 1).sum()),
            "recall": float(hits) / int((targets == 1).sum()),
        }

    functions = functions_of("one logit")
    name = install(monkeypatch, **functions, metrics=metrics)
    run = RunState()
    _, events, _, _ = run_task(name, versions=3, fraction_evaluate=1.0)
    for event in events:
        run(event)
    for event in events.of("evaluate"):
        assert {"loss", "accuracy", "f1", "recall"} <= event.metrics.keys()
    assert run.numbers()["metrics"].keys() == {"f1", "recall"}
    assert any(len(targets) == 150 for _, targets in seen)
    assert all(len(outputs) == len(targets) for outputs, targets in seen)


@pytest.mark.parametrize("case", ["tuple", "dict", "tokens"])
def test_metrics_get_outputs_in_the_form_that_the_loss_gets(case, monkeypatch):
    functions = functions_of(case)

    def metrics(outputs, targets):
        return {"mean-loss": functions["loss"](outputs, targets).mean()}

    name = install(monkeypatch, **functions, metrics=metrics)
    _, events, _, _ = run_task(name, versions=1)
    for event in events.of("evaluate"):
        assert event.metrics["mean-loss"] == pytest.approx(event.metrics["loss"], rel=1e-4)


def test_an_accuracy_of_ones_own_counts(monkeypatch):
    name = install(
        monkeypatch, **functions_of("tuple"), metrics=lambda outputs, targets: {"accuracy": 0.75}
    )
    _, events, _, _ = run_task(name, versions=1)
    assert set(accuracies(events)) == {0.75}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (lambda outputs, targets: 1 / 0, "failed: division by zero"),
        (lambda outputs, targets: 0.5, "must return numbers by their names"),
        (lambda outputs, targets: {"f1": "high"}, "must return numbers by their names"),
        (lambda outputs, targets: {"loss": 0.5}, "'loss', which the app reports"),
        (lambda outputs, targets: {"a\nb": 0.5}, "no such name"),
        (5, "must be a function"),
    ],
)
def test_metrics_that_fail_say_so(metrics, text, monkeypatch):
    name = install(monkeypatch, **functions_of("one logit"), metrics=metrics)
    with pytest.raises(TaskError, match=text):
        run_task(name, versions=1)


# --- Number formats and frozen parts -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tasks_in_other_number_formats(dtype, monkeypatch):
    functions = functions_of("one logit")
    make_model = functions["make_model"]

    def cast(data):
        return data[0].to(dtype), data[1]

    name = install(
        monkeypatch,
        make_model=lambda seed: make_model(seed).to(dtype),
        train_data=lambda node_config: cast(functions["train_data"](node_config)),
        test_data=lambda: cast(functions["test_data"]()),
        calibration_data=lambda: cast(functions["calibration_data"]()),
        loss=functions["loss"],
    )
    for calibration in ({}, REAL):
        _, events, _, _ = run_task(name, versions=8, **calibration)
        found = accuracies(events)
        assert found[-1] > found[0] + 0.1 or found[-1] > 0.9


def test_a_frozen_backbone_stays_at_home(monkeypatch):
    def make_model(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 2))
        model[0].requires_grad_(False)
        return model

    functions = functions_of("dict") | {"make_model": make_model, "loss": cross_entropy}
    name = install(monkeypatch, **functions)
    for strategy in ("fedpsa", "fedbuff"):
        result, events, grid, _ = run_task(name, versions=6, strategy=strategy)
        assert result.arrays.keys() == make_model(0).state_dict().keys() - {"0.weight", "0.bias"}
        for message in grid.sent:
            if "arrays" in message.content:
                assert message.content["arrays"].keys() == result.arrays.keys()
        assert accuracies(events)[-1] > 0.8


def test_a_base_that_depends_on_more_than_the_seed_is_refused(monkeypatch):
    def make_model(seed):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        model[0].requires_grad_(False)  # other values in every process
        return model

    functions = functions_of("dict") | {"make_model": make_model, "loss": cross_entropy}
    name = install(monkeypatch, **functions)
    with pytest.raises(Exception, match="load the same base model on both sides"):
        run_task(name, versions=2)


class Normed(nn.Module):
    """An encoder with BatchNorm and a linear head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["fedpac", "midpoint", "fedac"])
def test_models_in_all_number_formats(monkeypatch, strategy, dtype):
    def data(seed, size):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
        return x.to(dtype), (x[:, 0] > 0).long()

    def make_model(seed):
        torch.manual_seed(seed)
        return Normed().to(dtype)

    name = install(
        monkeypatch,
        make_model=make_model,
        train_data=lambda config: data(int(config["partition-id"]), 40),
        test_data=lambda: data(99, 200),
        # As one would write it for a model in 16 bits.
        loss=lambda outputs, targets: cross_entropy(
            outputs.to(torch.promote_types(outputs.dtype, torch.float32)), targets
        ),
    )
    result, events, *_ = run_task(name, strategy=strategy, versions=8, audit_fraction=0.0)
    assert events.of("evaluate")[-1].metrics["accuracy"] > 0.7
    if strategy == "fedpac":
        assert events.of("evaluate")[-1].metrics["personal-accuracy"] > 0.7
    assert result.arrays["encoder.1.running_var"].numpy().min() > 0
