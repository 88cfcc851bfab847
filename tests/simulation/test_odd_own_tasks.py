"""An own task with a frozen base in bfloat16, a bare parameter, a buffer and outputs in a dict."""

import pytest
from safetensors.numpy import load_file

from simulation.engines.grpc import run_on_processes
from simulation.engines.local.run import run_locally
from simulation.engines.ray import run_on_ray
from support.doc_commands import ROOT
from support.engines import events
from task.tasks import find_task

TASK = """
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

defaults = {"lr": 0.2, "batch-size": 16, "evaluate-every": 1}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 32).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        hidden = self.norm(self.scale * torch.tanh(self.base(x)))
        logits = self.head(hidden) + self.shift
        logits.sum().item()  # which cannot be vectorised
        return {"logits": logits, "hidden": hidden}


def make_model(seed):
    torch.manual_seed(seed)
    return Net().bfloat16()


def sample(seed, size):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), (x[:, 0] > x[:, 1]).long()


def train_data(node_config):
    return sample(node_config["partition-id"], 64)


def test_data():
    return sample(999, 200)


def loss(outputs, targets):
    logits = outputs["logits"][:, 0].float()
    return binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")


def metrics(outputs, targets):
    return {"ones": (outputs["logits"] > 0).float().mean()}
"""

CONFIG = {
    "task": "odd_task",
    "num-clients": 4,
    "virtual-days": 0.0,
    "num-server-rounds": 8,
    "buffer-size": 2,
    "queue-size": 4,
    "max-in-flight": 2,
    "audit-fraction": 1.0,
    "checkpoint-versions": 1,
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "odd_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    find_task.cache_clear()
    return lambda name, **more: CONFIG | {"run-dir": str(tmp_path / name)} | more


def test_it_learns_and_is_resumed_in_the_same_bits(config, tmp_path):
    whole = run_locally(config("whole"), workers=0)
    assert whole["status"] == "completed"
    assert whole["rejected"] == 0
    assert whole["accuracy"] > 0.8
    assert 0 < whole["metrics"]["ones"] < 1
    run_locally(config("parts", **{"num-server-rounds": 3}), workers=0)
    resumed = run_locally(config("parts", resume="true"), workers=0)
    assert resumed["model_sha256"] == whole["model_sha256"]
    model = load_file(tmp_path / "whole" / "model.safetensors")
    assert not any(key.startswith("base.") for key in model)
    assert all(event["num_bytes"] < 2500 for event in events(tmp_path / "whole", "upload"))


@pytest.mark.engine
@pytest.mark.slow
def test_it_is_the_same_run_on_every_engine(config):
    found = [
        run_locally(config("local"), workers=2),
        run_on_ray(ROOT, config("ray"), num_clients=4),
        run_on_processes(ROOT, config("grpc"), num_nodes=4),
    ]
    assert len({summary["model_sha256"] for summary in found}) == 1
    assert not any(summary["rejected"] for summary in found)
