"""The ClientApp's functions, called as Flower calls them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import nn
from torch.nn import functional

from client_app import app as client_app
from client_app.app import app
from fedpsa_strategy.client.fedpac import train_from_message
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS
from server_app.settings import Settings
from support.messages import delivered, node
from task.models import make_model
from task.shards import dataset_source
from task.tensors import Shard

TRAIN = {"lr": 0.1, "local-epochs": 1, "batch-size": 16, "seed": 3, "version": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def context(cache, node_config=None, **settings):
    run_config = Settings(num_clients=4, cache_dir=cache, **settings).to_run_config()
    partition = {"partition-id": 1, "num-partitions": 4}
    return node(partition if node_config is None else node_config, run_config)


def call(kind, context, config=None, model=None, **records):
    arrays = ArrayRecord((model or make_model("digits", 0)).state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config or {}), **records})
    return app(delivered(content, kind), context)


def test_training_is_a_pure_function_of_the_message_and_the_data(cache):
    first = call(MessageType.TRAIN, context(cache), TRAIN).content
    call(MessageType.TRAIN, context(cache), TRAIN | {"seed": 99})
    torch.manual_seed(123)
    second = call(MessageType.TRAIN, context(cache), TRAIN).content
    assert all(first["arrays"][key].data == second["arrays"][key].data for key in first["arrays"])
    other = call(MessageType.TRAIN, context(cache), TRAIN | {"seed": 4}).content
    assert any(first["arrays"][key].data != other["arrays"][key].data for key in first["arrays"])
    assert first["metrics"]["train-loss"] > 0
    assert first["metrics"]["train-seconds"] > 0


class Averaging(nn.Module):
    """Puts a new tensor in the place of its buffer in every forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.layer(x - self.mean)


class AveragingTask:
    def make_model(self, seed):
        return Averaging()

    def train_data(self, node_config):
        return torch.arange(20.0).reshape(10, 2), torch.arange(10) % 2

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")


def test_a_worker_loads_all_of_the_message_whatever_the_last_task_did(cache, monkeypatch):
    task = AveragingTask()
    monkeypatch.setattr(client_app, "node_task", lambda context: task)
    model = Averaging()
    model.mean.fill_(5.0)
    first, second = (
        call(MessageType.TRAIN, context(cache), TRAIN | {"batch-size": 10}, model).content
        for _ in range(2)
    )
    # One epoch of one batch, whose mean is (9, 10).
    mean = [5 + 0.1 * (9 - 5), 5 + 0.1 * (10 - 5)]
    for content in (first, second):
        np.testing.assert_allclose(content["arrays"]["mean"].numpy(), mean, rtol=1e-5)
    assert all(first["arrays"][key].data == second["arrays"][key].data for key in first["arrays"])


def test_the_proximal_term_keeps_the_update_small(cache):
    def size(**more):
        config = TRAIN | {REPLY_ARRAYS: DELTA} | more
        arrays = call(MessageType.TRAIN, context(cache), config).content["arrays"]
        return sum(np.square(array.numpy()).sum() for array in arrays.values())

    assert size(proximal=5.0) < 0.9 * size(proximal=0.0)
    assert size(proximal=0.0) == size()


def test_query_tells_partition_and_size(cache):
    metrics = call(MessageType.QUERY, context(cache)).content["metrics"]
    assert metrics["partition-id"] == 1
    assert metrics["num-examples"] == 404  # 90 % of 1,797 samples over four clients


def test_a_node_tells_the_host_name_of_its_node_config_and_no_other(cache):
    def told(**more):
        config = {"partition-id": 1, "num-partitions": 4, **more}
        return call(MessageType.QUERY, context(cache, config)).content.config_records

    assert told(**{"host-name": "lab-3"})["node"]["host-name"] == "lab-3"
    assert not told()
    assert not told(**{"host-name": ""})


def test_evaluate_reports_loss_and_accuracy(cache):
    metrics = call(MessageType.EVALUATE, context(cache)).content["metrics"]
    assert 0 <= metrics["accuracy"] <= 0.5  # untrained
    assert metrics["loss"] > 1
    assert metrics["num-examples"] == 404


def test_a_node_brings_its_own_data(cache, tmp_path):
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.normal(size=(30, 1, 8, 8)).astype(np.float32), y=rng.integers(0, 10, 30))
    own = context(cache, {"data-path": str(path)})
    metrics = call(MessageType.QUERY, own).content["metrics"]
    assert metrics["num-examples"] == 30
    assert "partition-id" not in metrics
    assert call(MessageType.TRAIN, own, TRAIN).content["metrics"]["num-examples"] == 30


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "no data.*--node-config"),
        ({"partition-id": 1, "num-partitions": 7}, "partition of 7, but num-clients is 4"),
        ({"partition-id": 1}, "'num-partitions' is missing"),
        ({"partition-id": "one", "num-partitions": 4}, "partition-id='one' must be a int"),
        ({"data-path": "/no/such/file.npz"}, "/no/such/file.npz"),
    ],
)
def test_a_wrong_node_config_is_a_clear_error(cache, config, text):
    with pytest.raises(Exception, match=text):
        call(MessageType.QUERY, context(cache, config))


def test_a_train_message_that_lacks_something_is_a_clear_error(cache):
    with pytest.raises(ValueError, match="'lr' is missing"):
        call(MessageType.TRAIN, context(cache), {"seed": 1})


# --- FedPAC ------------------------------------------------------------------------------------


def pac_records(known=0, features=32):
    return ArrayRecord(
        {
            "centroids": Array(np.full((10, features), 0.5, np.float32)),
            "known": Array(np.full(10, known, np.int64)),
        }
    )


PAC = {"alignment": 1.0, "head-lr": 0.1, "head-epochs": 1}


def test_fedpac_replies_with_statistics(cache):
    reply = call(
        MessageType.TRAIN, context(cache, strategy="fedpac"), TRAIN | PAC, fedpac=pac_records()
    ).content
    counts = reply["fedpac"]["class-counts"].numpy()
    assert counts.sum() == 404
    assert reply["fedpac"]["centroids"].numpy().shape == (10, 32)
    assert reply["fedpac"]["variance"].numpy() > 0
    changed = {key for key, array in reply["arrays"].items() if np.any(array.numpy())}
    assert changed == {"encoder.1.weight", "encoder.1.bias", "head.weight", "head.bias"}


def run_fedpac(shard, model, *, known=0, **kwargs):
    arguments = {
        "lr": 0.1,
        "epochs": 1,
        "batch_size": 16,
        "seed": 0,
        "device": torch.device("cpu"),
    }
    settings = {key: kwargs.pop(key, value) for key, value in PAC.items()}
    message = SimpleNamespace(content={"config": settings, "fedpac": pac_records(known)})
    loss, records = train_from_message(model, shard, message, **(arguments | kwargs))
    return loss, records["fedpac"]


def test_fedpac_statistics_by_hand(cache):
    """p_k, μ_k, h_k = p_k μ_k and v from a plain loop over the incoming encoder's features."""
    shard = dataset_source("digits", cache_dir=cache).client(0, 4)
    model = make_model("digits", 0)
    with torch.no_grad():
        features = model.encoder(shard.x).double()
    _, record = run_fedpac(shard, model)
    n, h, spread = len(shard), torch.zeros(10, 32, dtype=torch.double), 0.0
    for k in range(10):
        mine = features[shard.y == k]
        if len(mine):
            p, mean = len(mine) / n, mine.mean(0)
            h[k] = p * mean
            spread += p * mine.square().sum(1).mean() - p**2 * mean.square().sum()
    np.testing.assert_allclose(record["features"].numpy(), h, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(record["variance"].numpy(), spread / n, rtol=1e-4)


def test_fedpac_phases_touch_one_part_each(cache):
    shard = dataset_source("digits", cache_dir=cache).client(0, 4)
    start = make_model("digits", 0).state_dict()
    only_encoder = make_model("digits", 0)
    run_fedpac(shard, only_encoder, **{"head-epochs": 0})
    moved = {key for key, value in only_encoder.state_dict().items() if not value.equal(start[key])}
    assert moved == {"encoder.1.weight", "encoder.1.bias"}
    assert all(item.requires_grad for item in only_encoder.parameters())


def test_fedpac_draws_features_to_known_centroids(cache):
    shard = dataset_source("digits", cache_dir=cache).client(0, 4)

    def distance(known, alignment):
        model = make_model("digits", 0)
        _, record = run_fedpac(shard, model, known=known, alignment=alignment, epochs=5)
        present = record["class-counts"].numpy() > 0
        return np.square(record["centroids"].numpy()[present] - 0.5).mean()

    assert distance(known=1, alignment=20.0) < 0.5 * distance(known=1, alignment=0.0)


def test_fedpac_with_dropout_depends_on_its_seed_alone(cache):
    shard = dataset_source("digits", cache_dir=cache).client(0, 4)
    ends = []
    for state in (1, 2):
        model = make_model("digits", 0)
        model.encoder.append(nn.Dropout(0.5))
        torch.manual_seed(state)
        run_fedpac(shard, model)
        assert torch.initial_seed() == state  # the global generator is as before
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
    np.testing.assert_array_equal(*ends)


def test_fedpac_needs_no_sample_of_every_class():
    x = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    shard = Shard(x, torch.zeros(12, dtype=torch.int64))
    loss, record = run_fedpac(shard, make_model("digits", 0))
    assert np.isfinite(loss)
    assert record["class-counts"].numpy().tolist() == [12] + [0] * 9
    assert all(np.isfinite(array.numpy()).all() for array in record.values())
