"""Experiments on tasks of a user's own."""

import json
import sys

import pytest

from fedpsa_strategy.methods.registry import find_method
from simulation import cli
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.cells import METHODS
from simulation.experiments.choices import read_options
from simulation.experiments.estimate import expected_seconds
from support.commands import parsed
from task.tasks import find_task

TASK = """
import torch
from torch import nn

defaults = {"lr": 0.2, "batch-size": 8}


class Classes:
    defaults = {}

    def make_model(self, seed):
        torch.manual_seed(seed)
        return nn.Linear(4, 3)

    def train_data(self, node_config):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(node_config["partition-id"]))
        return x, x[:, :3].argmax(1)

    def test_data(self):
        return self.train_data({"partition-id": 1000})

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 1)


def train_data(node_config):
    x, _ = Classes().train_data(node_config)
    return x, x[:, :1] * 2


def test_data():
    return train_data({"partition-id": 1000})


def loss(outputs, targets):
    return (outputs - targets).square().mean(dim=1)
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    path = tmp_path / "tasks_of_mine.py"
    path.write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    find_task.cache_clear()
    yield path
    sys.modules.pop("tasks_of_mine", None)
    find_task.cache_clear()


def cells(*more):
    words = ["reproduce", "table-accuracy", "--datasets", "tasks_of_mine,tasks_of_mine:Classes"]
    arguments = parsed([*words, "--seeds", "0", *more])
    return EXPERIMENTS["table-accuracy"].cells(read_options(arguments))


def test_own_tasks_are_compared_once_for_each_method(own_tasks):
    found = cells("--alphas", "0.1,0.5")
    # They share out their data themselves; some methods need an encoder, which theirs lack.
    without_head = [
        label
        for label, config in METHODS.items()
        if not find_method(str(config["strategy"])).needs_head
    ]
    assert [cell.labels["method"] for cell in found] == 2 * without_head
    assert {cell.settings.task for cell in found} == {"tasks_of_mine", "tasks_of_mine:Classes"}
    assert {cell.labels["dataset"] for cell in found} == {cell.settings.task for cell in found}
    assert (found[0].settings.lr, found[0].settings.batch_size) == (0.2, 8)
    assert (found[-1].settings.lr, found[-1].settings.batch_size) == (0.01, 64)
    assert found[0].run_config["task"] == "tasks_of_mine"
    assert expected_seconds(found[0]) > 0


def test_a_changed_task_is_another_one(own_tasks):
    before = [cell.id for cell in cells()]
    assert before == [cell.id for cell in cells()]
    own_tasks.write_text(TASK.replace("* 2", "* 3"))
    assert not set(before) & {cell.id for cell in cells()}


@pytest.mark.engine
def test_their_names_and_numbers_are_in_the_tables(own_tasks, marked, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(own_tasks.parent))
    command = ["reproduce", "table-accuracy", "--seeds", "0", "--days", "0.01", "--jobs", "2"]
    command += ["--datasets", "tasks_of_mine,tasks_of_mine:Classes", "--methods", "FedBuff,Uniform"]
    assert cli.main([*command, "--set", "num-clients=4", "--set", "buffer-size=1"]) == 0
    folder = own_tasks.parent / "results" / "table-accuracy"
    rows = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == 4 * ["completed"]
    table = (folder / "table.md").read_text()
    assert "## tasks_of_mine, test loss (lower is better)\n" in table
    assert "## tasks_of_mine:Classes\n" in table
    assert f"| FedBuff | **{rows[0]['numbers']['loss']:.4f}** |" in table
    assert f"{100 * rows[2]['numbers']['accuracy']:.2f}" in table
    assert "Digits" not in table
    assert cli.main(["report"]) == 0
