"""A tiny Flower app: its server asks each node for its partition id."""

from pathlib import Path

PYPROJECT = """
[project]
name = "tinyapp"
version = "0.1.0"
description = "An app that asks each node for its partition id"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "tinyapp.server:app"
clientapp = "tinyapp.client:app"

[tool.flwr.app.config]
run-dir = ""
mode = "once"
text = ""
num-clients = 2
clock = "wall"
strategy = "tiny"
dataset = "none"
"""

SERVER = '''
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def ask(grid, nodes):
    """Ask all nodes for their partition id."""
    messages = [
        Message(
            content=RecordDict({"config": ConfigRecord({"question": "who are you?"})}),
            dst_node_id=node,
            message_type="query",
            group_id="0",
        )
        for node in nodes
    ]
    waiting, answers = set(grid.push_messages(messages)), []
    while waiting:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            answers.append(reply.content["config"]["partition-id"])
        time.sleep(0.05)
    return sorted(answers)


def work(grid, config):
    if config["mode"] == "raise":
        raise ValueError("the model is on fire")
    while len(list(grid.get_node_ids())) < config["num-clients"]:
        time.sleep(0.1)
    nodes = list(grid.get_node_ids())
    started = time.monotonic()
    answers = ask(grid, nodes)
    seconds = time.monotonic() - started
    print(f"answers: {answers} after {seconds:.1f} s")
    while config["mode"] == "forever":
        time.sleep(0.1)
    return {"status": "completed", "answers": answers, "seconds": seconds, "text": config["text"]}


@app.main()
def main(grid, context):
    folder = Path(context.run_config["run-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"status": "failed"}
    try:
        summary = work(grid, context.run_config)
    except Exception as error:
        summary = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        unfinished = folder / "summary.json.part"
        unfinished.write_text(json.dumps(summary))
        unfinished.replace(folder / "summary.json")
'''

CLIENT = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    answer = ConfigRecord({"partition-id": context.node_config["partition-id"]})
    return Message(content=RecordDict({"config": answer}), reply_to=message)
"""


def write_app(folder: Path) -> Path:
    """Write the app below `folder`, and return its folder."""
    folder = folder / "tinyapp"
    package = folder / "tinyapp"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(SERVER)
    (package / "client.py").write_text(CLIENT)
    return folder
