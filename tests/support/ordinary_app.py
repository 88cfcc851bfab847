"""A Flower app as its own templates make them: it knows nothing of this repository."""

from pathlib import Path

PYPROJECT = """
[project]
name = "ordinary"
version = "1.0.0"
description = "Flower's own FedAvg on NumPy arrays"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "ordinary.server_app:app"
clientapp = "ordinary.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 2
learning-rate = 0.5
"""

SERVER = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(3)]),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    (values,) = result.arrays.to_numpy_ndarrays()
    print("final arrays:", values.tolist(), flush=True)
    if context.run_config["learning-rate"] > 1.0:
        raise RuntimeError("the model is on fire")
"""

CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    (values,) = message.content["arrays"].to_numpy_ndarrays()
    values = values + message.content["config"]["lr"] * (1 + context.node_config["partition-id"])
    content = {
        "arrays": ArrayRecord([values]),
        "metrics": MetricRecord({"num-examples": 10, "loss": 0.5}),
    }
    return Message(content=RecordDict(content), reply_to=message)
"""


def write_app(folder: Path) -> Path:
    """Write the app into a folder, and return it."""
    package = folder / "ordinary"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(SERVER)
    (package / "client_app.py").write_text(CLIENT)
    return folder
