"""SuperLink and nodes on hosts of their own: network namespaces with cables between them.

The commands are those of docs/SECURITY.md, with TLS and a key for each node. Needs root.
"""

import os
import re
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from simulation.engines.flower.processes import ProcessGroup
from simulation.engines.flower.staging import staged_app
from simulation.environment import flower_environment, format_run_config, new_token
from support.doc_commands import code_blocks
from support.engines import APP, assert_no_upload_twice, events, wait_for

PAGE = "docs/SECURITY.md"
NODES = 2
CUT_SECONDS = 60.0


def can_make_hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fedpsa-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def recipe(beginning):
    """Return a block of commands of the page."""
    (found,) = [block for block in code_blocks(PAGE) if re.search(rf"^{beginning}", block, re.M)]
    return found


class Host:
    """A host: a network of its own, a home, and what runs there."""

    def __init__(self, name, folder, group):
        self.name = f"fedpsa-{secrets.token_hex(3)}-{name}"
        self.folder, self.group = folder / name, group
        self.folder.mkdir()
        self.names = Path("/etc/netns") / self.name  # what `ip netns exec` shows as /etc/hosts
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")

    def knows(self, address):
        self.names.mkdir(parents=True)
        (self.names / "hosts").write_text(f"127.0.0.1 localhost\n{address} fl.example.org\n")

    def _command(self, script):
        shell = ["bash", "-euo", "pipefail", "-c", f"cd {self.folder}\n{script}"]
        # Flower's state is in the host's own home.
        home = ["env", "--unset=FLWR_HOME", f"HOME={self.folder}"]
        return ["ip", "netns", "exec", self.name, *home, *shell]

    def run(self, script):
        done = subprocess.run(
            self._command(script), env=self.group.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, script):
        return self.group.start(self.name, self._command(script))

    def remove(self):
        subprocess.run(["ip", "netns", "del", self.name])
        shutil.rmtree(self.names, ignore_errors=True)


@pytest.fixture
def hosts(tmp_path):
    """A server and two nodes, each node with a cable to the server."""
    (tmp_path / "launch").mkdir()
    environment = flower_environment(tmp_path / "launch", new_token())
    made = []
    with ProcessGroup(tmp_path / "logs", environment=environment) as group:
        try:
            server = Host("server", tmp_path, group)
            made.append(server)
            server.knows("127.0.0.1")
            for number in range(1, NODES + 1):
                node = Host(f"node-{number}", tmp_path, group)
                made.append(node)
                cable = f"to-node-{number}"
                ip("link", "add", cable, "netns", server.name, "type", "veth")
                found = subprocess.run(
                    ["ip", "-n", server.name, "-o", "link", "show", cable],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                other = re.search(rf"{cable}@(\w+)", found)[1]
                ip("-n", server.name, "link", "set", other, "netns", node.name)
                for host, device, last in ((server, cable, 1), (node, other, 2)):
                    ip("-n", host.name, "addr", "add", f"10.88.{number}.{last}/24", "dev", device)
                    ip("-n", host.name, "link", "set", device, "up")
                node.knows(f"10.88.{number}.1")
            yield made
        finally:
            for host in made:
                for process in pids_on(host):
                    subprocess.run(["kill", "-KILL", process])
                host.remove()


def pids_on(host):
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    return listed.stdout.split()


def test_hosts_with_tls_and_keys_survive_that_one_is_cut_off_for_a_minute(hosts, tmp_path):
    server, *nodes = hosts
    server.run(recipe("openssl"))
    link = server.start(
        recipe("flower-superlink").replace("/var/lib/fedpsa", str(server.folder)).strip()
    )
    config = server.folder / ".flwr" / "config.toml"
    config.parent.mkdir()
    (toml,) = code_blocks(PAGE, "toml")
    config.write_text(toml.replace("/home/me/ca.pem", str(server.folder / "ca.pem")))
    for number, node in enumerate(nodes):
        node.run(recipe("ssh-keygen -q"))
        shutil.copy(server.folder / "ca.pem", node.folder)
        shutil.copy(node.folder / "node.key.pub", server.folder)

        def register():
            try:
                return server.run("flwr supernode register node.key.pub federation")
            except AssertionError:
                assert link.running, link.tail()
                return ""

        wait_for(register, 120, "the registration")
        own = f"partition-id={number} num-partitions={NODES}"
        started = recipe("fedpsa-node").replace("data-path='/srv/data.npz'", own).strip()
        node.start(started)
    listing = "flwr supernode list federation"
    wait_for(lambda: server.run(listing).count("online") >= NODES, 180, "the nodes")

    run_dir = tmp_path / "run"
    settings = {
        "clock": "wall",
        "num-clients": NODES,
        "fraction-train": 1.0,
        "buffer-size": 1,
        "run-dir": str(run_dir),
        "num-server-rounds": 1_000_000,
    }
    with staged_app(APP, tmp_path) as app:
        server.run(f"flwr run {app} federation --run-config {_quoted(settings)}")

    def uploads(client):
        return sum(event["client"] == client for event in events(run_dir, "upload"))

    wait_for(lambda: min(uploads(0), uploads(1)) >= 2, 300, "uploads of both")
    ip("-n", server.name, "link", "set", "to-node-1", "down")
    time.sleep(5.0)  # what was on its way has come
    cut, other = uploads(0), uploads(1)
    time.sleep(CUT_SECONDS - 5.0)
    assert uploads(0) == cut, "a host without a cable sent something"
    assert uploads(1) > other, "the other host stood still"
    ip("-n", server.name, "link", "set", "to-node-1", "up")
    wait_for(lambda: uploads(0) >= cut + 2, 300, "uploads of the host that was cut off")
    (run_dir / "stop-requested").touch()
    wait_for(lambda: (run_dir / "summary.json").exists(), 60, "the end")
    assert_no_upload_twice(run_dir)


def _quoted(settings):
    return '"' + format_run_config(settings).replace('"', "'") + '"'
