"""An app in the shape of Flower's PyTorch quickstart, before and after FedPSA moved in.

The app is ours; `DIFF` is what docs/DROP_IN.md shows.
"""

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "quickstart"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "example"

[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"

[tool.flwr.app.config]
num-server-rounds = 3
lr = 0.1
run-dir = ""
"""

TASK = '''
"""Model and data of the example: two noisy classes in the plane."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


def load_data(partition_id, size=64):
    generator = torch.Generator().manual_seed(partition_id)
    y = torch.randint(0, 2, (size,), generator=generator)
    x = torch.randn(size, 2, generator=generator) + 3.0 * y[:, None] - 1.5
    return x, y


def train(net, x, y, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for i in range(0, len(x), 16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[i : i + 16]), y[i : i + 16])
        loss.backward()
        optimizer.step()
    return loss.item()


def test(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()
'''

CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from example_task import Net, load_data, train

app = ClientApp()


@app.train()
def fit(msg: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(context.node_config["partition-id"])
    loss = train(net, x, y, msg.content["config"]["lr"])
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": loss, "num-examples": len(x)}),
        }
    )
    return Message(content=content, reply_to=msg)
"""

SERVER = """
import json
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from example_task import Net, load_data, test

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(net, *load_data(999, 500))})


@app.main()
def main(grid: Grid, context: Context) -> None:
    lr = context.run_config["lr"]
    net = Net()
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=4)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    accuracies = {k: v["accuracy"] for k, v in result.evaluate_metrics_serverapp.items()}
    summary = {"status": "completed", "accuracies": accuracies, "strategy": type(strategy).__name__}
    Path(context.run_config["run-dir"], "summary.json").write_text(json.dumps(summary))
"""

# (file, line before, line after); None for a line that is only added, behind the one before it.
CHANGES = [
    (
        "server.py",
        "from flwr.serverapp.strategy import FedAvg",
        "from fedpsa_strategy import FedPSA, Probe",
    ),
    (
        "server.py",
        "    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=4)",
        "    probe = Probe.gaussian(net, shape=(2,), num_classes=2)\n"
        "    strategy = FedPSA(sketch_fn=probe.sketch_fn(Net()), fraction_train=0.5, "
        "fraction_evaluate=0.0, min_available_nodes=4)",
    ),
    (
        "client.py",
        "from example_task import Net, load_data, train",
        "from example_task import Net, load_data, train\nfrom fedpsa_strategy import fedpsa_mod",
    ),
    ("client.py", "app = ClientApp()", "app = ClientApp(mods=[fedpsa_mod(Net)])"),
]


def before() -> dict[str, str]:
    """Return the app's files."""
    return {
        "pyproject.toml": PYPROJECT,
        "example_task.py": TASK,
        "client.py": CLIENT,
        "server.py": SERVER,
    }


def after() -> dict[str, str]:
    """Return its files with FedPSA."""
    files = before()
    for name, old, new in CHANGES:
        assert files[name].count(old) == 1, (name, old)
        files[name] = files[name].replace(old, new)
    return files
