"""Learning rate, batch size and interval of tests are the task's own unless they are set."""

import sys

import pytest

from server_app.build import build_experiment
from server_app.method_settings import SettingsError
from server_app.settings import Settings
from server_app.task_defaults import resolve
from task.tasks import find_task

TASK = """
import torch

def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 2)

def train_data(node_config):
    return torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)

def test_data():
    return train_data({})

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


def three(settings):
    return (settings.lr, settings.batch_size, settings.evaluate_every)


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    def write(more):
        (tmp_path / "some_task.py").write_text(TASK + more)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "some_task", raising=False)
        find_task.cache_clear()
        return Settings.from_run_config({"task": "some_task"})

    yield write
    find_task.cache_clear()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (0.1, 16, 5)),
        ({"dataset": "fmnist"}, (0.01, 64, 10)),
        ({"dataset": "cifar100"}, (0.01, 64, 10)),
        ({"lr": 0.01}, (0.01, 16, 5)),
        ({"batch-size": 64, "evaluate-every": 10}, (0.1, 64, 10)),
    ],
)
def test_zeros_mean_the_datasets_own(config, expected):
    assert three(resolve(Settings.from_run_config(config))) == expected


def test_an_own_task_may_declare_its_own(own_task):
    settings = own_task("\ndefaults = {'lr': 1, 'batch-size': 3}\n")
    assert three(resolve(settings)) == (1.0, 3, 10)


def test_an_own_task_that_declares_none_gets_the_papers(own_task):
    assert three(resolve(own_task(""))) == (0.01, 64, 10)


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        ("{'gamma': 1.0}", "must be a dict of lr, batch-size, evaluate-every"),
        ("3", "must be a dict of lr, batch-size, evaluate-every"),
        ("{'lr': -1.0}", "in its `defaults`, lr = -1.0: must be above 0"),
        ("{'batch-size': 'big'}", "in its `defaults`, batch-size = 'big': must be a whole number"),
    ],
)
def test_what_an_own_task_cannot_declare(own_task, declared, part):
    settings = own_task(f"\ndefaults = {declared}\n")
    with pytest.raises(SettingsError, match="task = 'some_task'") as error:
        resolve(settings)
    assert part in str(error.value)


def test_clients_are_told_the_tasks_own(tmp_path):
    experiment = build_experiment(Settings(num_clients=4, cache_dir=str(tmp_path)), [])
    assert experiment.train_config["lr"] == 0.1
    assert experiment.train_config["batch-size"] == 16
    assert experiment.strategy.evaluation.every == 5


def test_a_resumed_run_keeps_what_it_began_with():
    """A run of before, when the default was the paper's, goes on with the command it had."""
    before = {**Settings().to_run_config(), "lr": 0.01, "batch-size": 64, "evaluate-every": 10}
    settings = Settings.from_run_config({"resume": "true", "run-dir": "/x"})
    resumed = resolve(settings, before)
    assert three(resumed) == (0.01, 64, 10)
    assert not resumed.changed_since(before)
    explicit = Settings.from_run_config({"resume": "true", "run-dir": "/x", "lr": 0.1})
    assert set(resolve(explicit, before).changed_since(before)) == {"lr"}


def test_a_run_older_than_a_setting_did_what_it_did_then():
    """Midpoint expected clients to repeat all of their last update before it fitted how much."""
    before = {**Settings(strategy="midpoint").to_run_config()}
    del before["fit-memory"]
    assert Settings(strategy="midpoint").changed_since(before) == {"fit-memory": (False, True)}
    assert not Settings(strategy="midpoint", fit_memory=False).changed_since(before)
    assert not Settings(strategy="ca2fl").changed_since({**before, "strategy": "ca2fl"})
