"""The commands of README and docs, really run: in a clean copy, with an empty home.

Takes as long as following the pages by hand does. What is run here and what elsewhere is in
`doc_coverage.py`. FEDPSA_DOCS_FOLDER names a folder for the copy that is kept, with its .venv, for
the next time.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from simulation.engines.flower.process_table import end_processes, find_launched
from simulation.environment import free_port
from support.doc_commands import ROOT, code_blocks, commands
from support.doc_coverage import AFTER_SCALED, HERE, SCALE, SCALED

pytestmark = [pytest.mark.slow, pytest.mark.engine]

MARK = "FEDPSA_DOCS_TEST"
PATIENCE = 1800.0


class Checkout:
    """A copy of the files that git knows or would take, and shells in it."""

    def __init__(self, folder):
        self.folder, self.home = folder / "fedpsa", folder / "home"
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.mark = secrets.token_hex(8)
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, names.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        # As after a clone: Flower leaves out of the bundle what git ignores.
        subprocess.run(["git", "init", "-q"], cwd=self.folder, check=True)
        foreign = ("FLWR_", "RAY_", "FEDPSA_", "PYTEST_", "VIRTUAL_ENV", "PYTHON")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        # A SuperLink of somebody else may listen where Flower's own would.
        ports = {
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        }
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.environment = kept | ports | quiet | {"HOME": str(self.home), MARK: self.mark}

    def start(self, script):
        """Start a shell script; its output goes to a file that `output()` reads."""
        log = self.folder.parent / f"{secrets.token_hex(4)}.log"
        with log.open("wb") as file:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Where these tests run in the background, Ctrl-C is ignored, and that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        shell.log = log
        return shell

    def run(self, script):
        """Run a shell script to its end and return what it printed."""
        shell = self.start(script)
        code = shell.wait(PATIENCE)
        text = output(shell)
        assert code == 0, f"{script}\n{text[-4000:]}"
        return text

    def end_all(self):
        """End everything that was started from here, daemons too."""
        end_processes(lambda: find_launched(MARK, self.mark), grace=5.0)


def output(shell):
    return shell.log.read_text(errors="replace")


def wait_for(shell, pattern):
    """Wait until a running shell has printed this."""
    give_up = time.monotonic() + PATIENCE
    while not (found := re.search(pattern, output(shell))):
        assert shell.poll() is None, output(shell)[-4000:]
        assert time.monotonic() < give_up, output(shell)[-4000:]
        time.sleep(0.2)
    return found


def block(page, beginning, **replacements):
    """Return a shell block of a page as a script; by its beginning, or that of a line in it."""
    (script,) = [
        item
        for item in code_blocks(page, "bash|sh")
        if re.search(rf"^{re.escape(beginning)}", item, re.M)
    ]
    for old, new in replacements.items():
        assert old in script, (old, script)
        script = script.replace(old, new)
    return script


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    kept = os.environ.get("FEDPSA_DOCS_FOLDER")
    it = Checkout(Path(kept) if kept else tmp_path_factory.mktemp("clone"))
    for name in ("runs", "results/table-accuracy", "other"):
        shutil.rmtree(it.folder / name, ignore_errors=True)
    *_, code = code_blocks("docs/OWN_TASK.md", "python")
    (it.folder / "my_task.py").write_text(code)
    it.run("make install-dev")
    try:
        yield it
    finally:
        it.end_all()


def summaries(checkout):
    return set(checkout.folder.glob("runs/*/summary.json"))


@pytest.mark.parametrize("text", HERE)
def test_as_documented(checkout, text):
    (command,) = [item for item in commands() if item.text == text]
    before = summaries(checkout)
    try:
        printed = checkout.run(command.setup + text)
    finally:
        checkout.end_all()  # `flwr run` leaves a SuperLink behind
    if re.search(r"simulation run|make (run|deploy)", text):
        (summary,) = summaries(checkout) - before
        assert '"status": "completed"' in summary.read_text()
        assert (summary.parent / "curve.png").exists()
    elif "flwr run" in text:  # which ends well whatever happened
        assert "The run ends: " in printed
        assert "Traceback" not in printed


@pytest.mark.parametrize("text", SCALED + AFTER_SCALED)
def test_experiments_at_a_small_scale(checkout, text):
    checkout.run(text if text in AFTER_SCALED else f"{text} {SCALE}")
    if text in AFTER_SCALED:
        assert (checkout.folder / "results" / "index.html").exists()
    else:
        name = re.search(r"reproduce (\S+)", text)[1]
        assert list(checkout.folder.glob(f"results/**/{name}/figure.png")) or list(
            checkout.folder.glob(f"results/**/{name}/table.md")
        )


def test_the_dashboard(checkout):
    (checkout.folder / "runs" / "begun" / "engine-logs").mkdir(parents=True, exist_ok=True)
    (command,) = [item.text for item in commands() if "server_app.dashboard" in item.text]
    shell = checkout.start(f"exec {command} --port 0")
    url = wait_for(shell, r"http://\S+")[0]
    with urllib.request.urlopen(url) as answer:
        assert b"<title>" in answer.read()
    shell.send_signal(signal.SIGINT)
    assert shell.wait(30) == 0


def test_tensorboard_shows_the_run(checkout):
    (command,) = [item.text for item in commands() if ".venv/bin/tensorboard" in item.text]
    (run,) = [item.text for item in commands() if "tensorboard=true" in item.text]
    if not list(checkout.folder.glob("runs/*/tensorboard")):  # where this test runs alone
        checkout.run(run)
    shell = checkout.start(f"exec {command} --port {free_port()} --reload_interval 1")
    url = wait_for(shell, r"http://\S+")[0]
    give_up = time.monotonic() + PATIENCE
    while True:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/tags") as answer:
            tags = json.load(answer)
        if tags:
            break
        assert time.monotonic() < give_up
        time.sleep(1)
    (shown,) = tags.values()
    assert {"evaluate-server/accuracy", "upload/kappa", "upload/temperature"} <= shown.keys()
    shell.send_signal(signal.SIGINT)
    shell.wait(60)


def test_the_library_in_another_environment(checkout):
    checkout.run(
        ".venv/bin/python -m venv other && other/bin/pip install --no-deps ./fedpsa_strategy"
    )
    (packages,) = (checkout.folder / "other").glob("lib/*/site-packages")
    assert (packages / "fedpsa_strategy" / "server" / "fedpsa.py").exists()
    assert not any((packages / name).exists() for name in ("server_app", "task", "simulation"))


def test_interrupt_and_resume(checkout):
    begin, resume = (
        item.text for item in commands() if "simulation run --run-dir runs/mine" in item.text
    )
    shell = checkout.start(f"exec {begin}")
    wait_for(shell, r"uploads \d\d+")
    shell.send_signal(signal.SIGINT)
    assert shell.wait(120) != 0
    assert list(checkout.folder.glob("runs/mine/checkpoints/*"))
    checkout.run(resume)
    summary = (checkout.folder / "runs/mine/summary.json").read_text()
    assert '"status": "completed"' in summary


def test_real_nodes(checkout):
    page, fleet, control = "docs/TUTORIAL.md", free_port(), free_port()
    # The same words with ports that are free here.
    link = checkout.start(
        block(page, "flower-superlink").rstrip()
        + f" --fleet-api-address 127.0.0.1:{fleet} --host 127.0.0.1 --port {control}"
    )
    try:
        wait_for(link, "Starting Flower SuperLink|SuperLink.*(started|listening)|Uvicorn running")
        for line in ("9094", "9095"):
            text = next(item for item in code_blocks(page, "bash|sh") if f"--port {line}" in item)
            checkout.start(text.replace("9092", str(fleet)).replace(line, str(free_port())))
        printed = checkout.run(block(page, "flwr run . mine", **{"8000": str(control)}))
        assert "5 versions are made" in printed
        summary = json.loads((checkout.folder / "runs/real-nodes/summary.json").read_text())
        assert summary["status"] == "completed"
        events = (checkout.folder / "runs/real-nodes/events.jsonl").read_text()
        assert events.count('"event": "evaluate"') >= 6, "every version is tested"
        assert summary["accuracy"] > 0.3
    finally:
        checkout.end_all()


def test_tls_and_node_keys(checkout):
    page, fleet, control = "docs/SECURITY.md", free_port(), free_port()
    folder = checkout.folder
    for left in (*folder.glob("node.key*"), *folder.glob("superlink.db*")):
        left.unlink()  # by an earlier test in a folder that is kept
    np.savez(folder / "data.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.arange(4))
    for beginning in ("openssl", "ssh-keygen -q"):
        text = next(
            item for item in code_blocks(page, "bash|sh") if re.search(f"^{beginning}", item, re.M)
        )
        checkout.run(text)
    activate = 'export PATH="$PWD/.venv/bin:$PATH"\n'
    link = checkout.start(
        activate
        + block(
            page,
            "flower-superlink",
            **{
                "/var/lib/fedpsa": str(folder),
                "--port 8000": f"--port {control}",
                "0.0.0.0:9092": f"127.0.0.1:{fleet}",
            },
        )
    )
    try:
        wait_for(link, "Starting Flower SuperLink|SuperLink.*(started|listening)|Uvicorn running")
        (toml,) = code_blocks(page, "toml")
        toml = toml.replace("localhost:8000", f"localhost:{control}")
        toml = toml.replace("/home/me/ca.pem", str(folder / "ca.pem"))
        tomllib.loads(toml)
        config = checkout.home / ".flwr" / "config.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text((config.read_text() if config.exists() else "") + toml)
        printed = checkout.run(activate + block(page, "flwr supernode register"))
        node_id = re.search(r"\d{15,}", printed)[0]
        replaced = {"fl.example.org:9092": f"localhost:{fleet}", "/srv/data.npz": "data.npz"}
        node = checkout.start(
            activate + block(page, "fedpsa-node", **replaced).rstrip() + f" --port {free_port()}\n"
        )
        listing = activate + "flwr supernode list federation"
        give_up = time.monotonic() + 120
        while "online" not in checkout.run(listing):
            assert time.monotonic() < give_up, output(node)[-4000:]
            time.sleep(1)
        text = next(item.text for item in commands() if "unregister" in item.text)
        checkout.run(activate + text.replace("NODE_ID", node_id))
        node.wait(180)  # refused at its next call, it ends
    finally:
        checkout.end_all()
