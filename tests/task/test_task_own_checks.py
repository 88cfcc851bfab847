"""Tasks whose data, outputs and losses do not fit: refused with a sentence, not silently wrong."""

import sys

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import nn
from torch.nn import functional

from client_app.app import app
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from server_app.build import build_experiment
from server_app.settings import Settings
from support.messages import delivered, node
from support.own_tasks import install
from support.sensitivities import cross_entropy
from task.errors import TaskError
from task.own_checks import check_cross_entropy, check_own_task
from task.tensors import Shard

N = 12
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3
NUMBERS = torch.linspace(-1, 1, N)


def squares(outputs, targets):
    return (outputs - targets).square()


def mean_squares(outputs, targets):
    return squares(outputs, targets).mean(dim=1)


def one_logit(outputs, targets):
    return functional.binary_cross_entropy_with_logits(
        outputs[:, 0], targets.float(), reduction="none"
    )


def check(model, y, loss, x=X):
    check_own_task(model, Shard(x, y), loss, "test_data")


class Returning(nn.Module):
    """Returns what a function makes of the outputs."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(5, 3), change

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("model", "y", "loss"),
    [
        (nn.Linear(5, 3), LABELS, cross_entropy),
        (nn.Linear(5, 3), torch.zeros(N, dtype=torch.int64), cross_entropy),
        (nn.Linear(5, 1), NUMBERS[:, None], squares),
        (nn.Linear(5, 1), NUMBERS[:, None], mean_squares),
        (nn.Linear(5, 1), NUMBERS, lambda o, t: squares(o.squeeze(), t)),
        (nn.Linear(5, 3), functional.one_hot(LABELS, 3).float(), cross_entropy),
        (nn.Linear(5, 1), (LABELS > 0).float(), one_logit),
    ],
)
def test_what_fits_is_accepted(model, y, loss):
    check(model, y, loss)
    check(model, y[:1], loss, X[:1])
    check(model, y[:2], loss, X[:2])


@pytest.mark.parametrize(
    ("model", "y", "loss", "text"),
    [
        (nn.Linear(5, 1), LABELS, one_logit, "must be 0 or 1, but they are 0 to 2"),
        (nn.Linear(5, 1), LABELS % 2 * 2 - 1, one_logit, "must be 0 or 1, but they are -1 to 1"),
        (nn.Linear(5, 1), LABELS > 0, one_logit, r"bool; make them integers"),
        (
            Returning(lambda o: o[:, :, None].expand(-1, -1, 7)),
            torch.full((N, 7), 3),
            lambda o, t: cross_entropy(o, t).mean(dim=1),
            "classes 3 to 3, but the model has 3 outputs",
        ),
        (
            Returning(lambda o: o[:, :, None].expand(-1, -1, 7)),
            torch.zeros(N, 7, dtype=torch.int64),
            cross_entropy,
            r"losses of shape \(3, 7\).*have to be averaged",
        ),
        (nn.Linear(5, 3), torch.zeros(N, 2, dtype=torch.int64), squares, r"int64 \(3, 2\) do not"),
        (
            nn.Linear(5, 3),
            LABELS[:, None],
            cross_entropy,
            r"\(3, 1\) do not fit the model's outputs",
        ),
        (nn.Linear(5, 1), NUMBERS, squares, r"\(3, 3\), not \(3,\).*broadcast"),
        (nn.Linear(5, 1), NUMBERS, mean_squares, r"\(3, 1\).*\(3,\).*broadcast to all pairs"),
        (nn.Linear(5, 1), NUMBERS.sign(), mean_squares, "broadcast to all pairs"),
        (nn.Linear(5, 1), NUMBERS[:, None], lambda o, t: squares(o, t).mean(), "single number"),
        (nn.Linear(5, 3), X[:, :3], lambda o, t: squares(o, t).mean(dim=0), "one loss per sample"),
        (nn.Linear(5, 3), X[:, :3], squares, "have to be averaged"),
        (nn.Linear(5, 3), X[:, :3], lambda o, t: squares(o, t).tolist(), "returns a list"),
        (nn.Linear(5, 3), LABELS.float(), cross_entropy, r"float32 \(3,\)\) failed.*int.*classes"),
        (nn.Linear(5, 2), LABELS, cross_entropy, "0 to 2.*2 outputs.*0 to 1"),
        (nn.Linear(5, 3), LABELS - 1, cross_entropy, "-1 to 1"),
        (nn.Linear(4, 3), LABELS, cross_entropy, r"inputs float32 \(3, 5\): mat1"),
        (Returning(lambda o: (o, o)), LABELS, cross_entropy, r"outputs of type tuple.*failed"),
        (
            Returning(lambda o: {"logits": o}),
            LABELS,
            cross_entropy,
            r"outputs of type dict.*failed",
        ),
        (
            Returning(lambda o: {"logits": o}),
            LABELS + 1,
            lambda o, t: cross_entropy(o["logits"], t),
            "classes 1 to 3, but the model has 3 outputs",
        ),
        (
            Returning(lambda o: (o.mean(0), o)),
            LABELS,
            lambda o, t: cross_entropy(o[1], t) + o[0].sum(),
            "changes with the other samples",
        ),
        (Returning(lambda o: o.T.reshape(-1, 9)), LABELS, cross_entropy, "over the samples"),
        (nn.Linear(5, 1), NUMBERS[:, None] / 0, squares, "values of the targets are NaN or inf"),
    ],
)
def test_what_does_not_fit_is_refused(model, y, loss, text):
    with pytest.raises(TaskError, match=text):
        check(model, y, loss)


def test_inputs_that_are_not_finite_are_refused():
    x = X.clone()
    x[-1, 2] = torch.nan
    with pytest.raises(TaskError, match="test_data: 1 values of the inputs are NaN or infinite"):
        check(nn.Linear(5, 3), LABELS, cross_entropy, x)


class Counting(nn.Module):
    """Writes into its buffers in every forward pass, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        outputs = self.norm(self.layer(x))
        self.last = outputs[0].detach()
        return outputs


def test_looking_changes_nothing():
    model = Counting()
    model.norm.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check(model, LABELS, cross_entropy)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_method_that_knows_cross_entropy_alone_refuses_other_losses():
    model = nn.Linear(5, 3)
    check_cross_entropy(model, Shard(X, LABELS), cross_entropy, "it")

    def smoothed(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)

    for y, loss in ((LABELS, smoothed), (X[:, :3], squares)):
        with pytest.raises(TaskError, match="it trains with cross-entropy"):
            check_cross_entropy(model, Shard(X, y), loss, "it")


# --- Where a run meets it ----------------------------------------------------------------------


@pytest.fixture
def task(monkeypatch):
    """A task whose functions a test may replace."""
    name = install(
        monkeypatch,
        make_model=lambda seed: nn.Linear(5, 3),
        train_data=lambda node_config: (X, LABELS),
        test_data=lambda: (X, LABELS),
        loss=cross_entropy,
    )
    return sys.modules[name]


@pytest.mark.parametrize("strategy", ["fedpsa", "fedbuff"])
def test_the_server_refuses_before_any_message(task, strategy):
    settings = Settings(task=task.__name__, strategy=strategy)
    build_experiment(settings, [])
    task.test_data = lambda: (X, LABELS + 1)
    with pytest.raises(TaskError, match="test_data: targets are classes 1 to 3"):
        build_experiment(settings, [])


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class HeadedMethod(FedBuffMethod):
    needs_head = True
    label = "Theirs"


@pytest.mark.parametrize(
    ("strategy", "label"), [("fedpac", "FedPAC"), (f"{__name__}:HeadedMethod", "Theirs")]
)
def test_a_method_that_needs_a_head_refuses_a_model_without_one(task, strategy, label):
    settings = Settings(task=task.__name__, strategy=strategy)
    with pytest.raises(ValueError, match=f"{label} needs a model with an `encoder` and a linear"):
        build_experiment(settings, [])
    task.make_model = lambda seed: Parts()
    build_experiment(settings, [])


def test_fedpac_refuses_a_loss_that_it_would_not_use(task):
    task.make_model = lambda seed: Parts()
    build_experiment(Settings(task=task.__name__, strategy="fedpac"), [])
    task.loss = lambda outputs, targets: 2 * cross_entropy(outputs, targets)
    with pytest.raises(TaskError, match="strategy='fedpac' trains with cross-entropy"):
        build_experiment(Settings(task=task.__name__, strategy="fedpac"), [])


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_client_refuses_its_own_data(task, kind):
    run_config = Settings(task=task.__name__).to_run_config()
    config = {"lr": 0.1, "local-epochs": 1, "batch-size": 4, "seed": 1}

    def send():
        arrays = ArrayRecord(nn.Linear(5, 3).state_dict())
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
        return app(delivered(content, kind), node(run_config=run_config))

    assert send().content["metrics"]["num-examples"] == N
    task.train_data = lambda node_config: (X, LABELS - 1)
    with pytest.raises(TaskError, match="train_data: targets are classes -1 to 1"):
        send()
