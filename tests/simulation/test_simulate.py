"""`from simulation import simulate`: runs from Python."""

import importlib
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedpsa_strategy import BufferedRule, FedBuff, Method, setting
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from simulation import compare, load, objects, simulate
from simulation.errors import Refused
from support.own_method import write_example

SMALL = {
    "clients": 4,
    "virtual_days": 0.0,
    "num_server_rounds": 2,
    "fraction_train": 0.5,
    "evaluate_every": 1,
    "log": False,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Signs:
    """A task with a state: its object travels, not its class."""

    def __init__(self, size=30):
        self.size = size

    def make_model(self, seed):
        torch.manual_seed(seed)
        return nn.Linear(3, 2)

    def train_data(self, node_config):
        generator = torch.Generator().manual_seed(int(node_config["partition-id"]))
        x = torch.randn(self.size, 3, generator=generator)
        return x, (x[:, 0] > 0).long()

    def test_data(self):
        return self.train_data({"partition-id": 999})

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


class MedianRule(BufferedRule):
    def aggregate(self, updates):
        return self.model + np.median([update.delta for update in updates], axis=0)


@dataclass(frozen=True)
class Median(Method):
    """Coordinate-wise median."""

    rule = MedianRule
    buffer_size: int = setting(3, "uploads per version", least=1)


def test_a_run_has_accuracy_curve_events_picture_and_model():
    threads = torch.get_num_threads()
    run = simulate("fedbuff", "digits", workers=0, name="first", tags=["a", "b"], **SMALL)
    assert torch.get_num_threads() == threads
    assert run.folder == Path("runs", "first").absolute()
    assert (run.status, run.tags) == ("completed", ["a", "b"])
    assert run.accuracy is not None
    assert len(run.curve) == 3
    assert len(run.events) > 10
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    assert isinstance(run.model, nn.Module)
    again = simulate("fedbuff", "digits", workers=0, **SMALL)
    assert again.summary["model_sha256"] == run.summary["model_sha256"]
    for name, array in run.arrays().items():
        assert np.array_equal(load(run.folder).model.state_dict()[name].numpy(), array)
    assert len(compare([run, again, load(run.folder)]).rows) == 3


def test_tasks_and_methods_may_be_objects_of_this_session_in_worker_processes():
    # As in a notebook: no other process can import these.
    task = type("Mine", (Signs,), {"__module__": "__main__"})(size=20)
    rule = type("Rule", (MedianRule,), {"__module__": "__main__"})
    method = type("OwnMedian", (Median,), {"__module__": "__main__", "rule": rule})
    run = simulate(method(buffer_size=2), task=task, workers=1, lr=0.1, batch_size=8, **SMALL)
    assert run.settings["task"].startswith("fedpsa_session:Mine_")
    assert run.settings["method-settings"] == "buffer-size=2"
    assert run.model.weight.shape == (2, 3)
    here = simulate(method(buffer_size=2), task=task, workers=0, lr=0.1, batch_size=8, **SMALL)
    assert here.summary["model_sha256"] == run.summary["model_sha256"]


def test_what_others_can_import_keeps_its_name(tmp_path, monkeypatch):
    write_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("trimmed")
    assert objects.reference_to(module.TrimmedMean) == "trimmed:TrimmedMean"
    assert objects.reference_to(module) == "trimmed"
    assert objects.reference_to(Signs()).startswith("fedpsa_session:Signs_")
    with pytest.raises(TypeError, match="write it into a module"):
        objects.reference_to(threading.Lock())


def test_a_method_of_ours_may_be_an_object_too():
    run = simulate(FedBuffMethod(buffer_size=2), "digits", workers=0, **SMALL)
    assert (run.settings["strategy"], run.settings["buffer-size"]) == ("fedbuff", 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learning_rate": 0.1}, "did you mean lr"),
        ({"lr": -1.0}, "lr = -1.0: must be above 0"),
        ({"strategy": "fedbuf"}, "did you mean 'fedbuff'"),
        ({"engine": "spark"}, "must be 'local' or 'ray'"),
        ({"preset": "papr"}, "there is no preset 'papr'; there are quick"),
        ({"task": Signs(), "engine": "ray"}, "does not reach Flower's processes"),
        ({"name": "../elsewhere"}, "name = '../elsewhere'"),
        ({"name": "a", "run_dir": "b"}, "both given"),
        ({"tags": ["two words"]}, "words without spaces"),
        ({"num_clients": 5}, "clients = 4 contradicts num_clients"),
        ({"clients": "ten"}, "num-clients = 'ten': must be a whole number"),
    ],
)
def test_what_cannot_run_is_one_sentence(given, sentence, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(Refused) as caught:
        simulate(**{**SMALL, **given})
    assert sentence in str(caught.value)
    assert not Path("runs").exists()


def test_a_strategy_is_not_a_method():
    with pytest.raises(TypeError, match="strategy is a FedBuff: name a method"):
        simulate(FedBuff(), "digits", **SMALL)


def test_a_name_is_taken_once():
    simulate("fedbuff", "digits", workers=0, name="mine", **SMALL)
    with pytest.raises(Refused, match="already holds a run"):
        simulate("fedbuff", "digits", workers=0, name="mine", **SMALL)
