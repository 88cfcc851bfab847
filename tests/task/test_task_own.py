"""A user's own task: found, checked, described."""

import sys
import types

import pytest
import torch
from torch import nn

from support.own_tasks import install
from task.kinds import Kind
from task.tasks import DatasetTask, TaskError, as_shard, calibration_recipe, find_task
from task.tensors import Shard


def complete():
    return {key: lambda *args: None for key in ("make_model", "train_data", "test_data", "loss")}


def test_a_module_an_object_or_a_class_can_be_a_task(monkeypatch):
    name = install(monkeypatch, **complete())
    found = sys.modules[name]
    assert find_task(name) is found
    found.thing = types.SimpleNamespace(**complete())
    found.Kind = type("Kind", (), complete())
    assert find_task(f"{name}:thing") is found.thing
    assert isinstance(find_task(f"{name}:Kind"), found.Kind)


def test_what_is_missing_is_said(monkeypatch):
    functions = complete()
    del functions["loss"]
    name = install(monkeypatch, **functions)
    with pytest.raises(TaskError, match=r"lacks the functions \['loss'\]"):
        find_task(name)
    with pytest.raises(TaskError, match="has no 'thing'"):
        find_task(f"{name}:thing")
    with pytest.raises(TaskError, match="PYTHONPATH"):
        find_task("no_such_module_at_all")


def test_data_is_checked():
    shard = as_shard((torch.zeros(3, 2), torch.zeros(3)), "train_data")
    assert len(shard) == 3
    assert as_shard(shard, "train_data") is shard
    for bad in (None, 5, (torch.zeros(3, 2), torch.zeros(4)), (torch.zeros(0, 2), torch.zeros(0))):
        with pytest.raises(TaskError, match="train_data"):
            as_shard(bad, "train_data")


def test_the_calibration_batch_follows_the_data():
    images = Shard(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    assert calibration_recipe(images, Kind(10, 1)) == {"shape": (1, 8, 8), "num_classes": 10}
    tokens = Shard(torch.tensor([[1, 7], [3, 2]]), torch.tensor([0, 1]))
    recipe = {"shape": (2,), "vocabulary": 8, "num_classes": 3}
    assert calibration_recipe(tokens, Kind(3, 1)) == recipe
    numbers = Shard(torch.zeros(2, 5), torch.zeros(2, 2))
    assert calibration_recipe(numbers, None) == {"shape": (5,), "target_shape": (2,)}
    masks = Shard(torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64))
    recipe = {"shape": (3, 4, 4), "target_shape": (4, 4), "num_classes": 2}
    assert calibration_recipe(masks, Kind(2, None)) == recipe
    unknown = Shard(torch.zeros(2, 5), torch.tensor([0, 4]))  # outputs that are no tensor
    assert calibration_recipe(unknown, None) == {"shape": (5,), "num_classes": 5}


def test_the_datasets_loss_is_cross_entropy_per_sample():
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    loss = DatasetTask("digits", 2).loss(outputs, targets)
    assert loss.shape == (4,)
    torch.testing.assert_close(loss.mean(), nn.functional.cross_entropy(outputs, targets))
