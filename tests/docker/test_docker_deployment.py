"""The real deployment: images, TLS, known and unknown nodes, a network that breaks.

Builds the image and runs the whole of docker/ under a project name of its own, from a copy, and
removes everything afterwards. BASE_IMAGE and PIP_* are handed on to the build; wheels that lie in
docker/wheels are used. FEDPSA_DOCKER_KEEP=1 keeps the image for the next time.
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = "fedpsa-test"
IMAGE = "fedpsa-test:latest"
NODES = 3
FLEET = f"{PROJECT}_fleet"

# Far more than needed: a node starts a new process, and imports torch, for each task.
PATIENCE = 1800.0


def engine_problem():
    """Return why there is no engine to test with, or None."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(command)}` failed: {done.stderr.strip().splitlines()[-1:]}"
    return None


pytestmark = [pytest.mark.docker, pytest.mark.slow]


def wait_for(what, condition, patience=PATIENCE):
    give_up = time.monotonic() + patience
    while not (result := condition()):
        assert time.monotonic() < give_up, f"waited {patience:.0f} s in vain for {what}"
        time.sleep(1.0)
    return result


class Deployment:
    """The compose project, in a copy of the repository's docker folder."""

    def __init__(self, root):
        self.folder = root / "docker"
        self.runs = self.folder / "runs"
        self.environment = os.environ | {"COMPOSE_PROJECT_NAME": PROJECT, "IMAGE": IMAGE}
        for name in ("RUN_CONFIG", "RUN_NAME", "RUNS_DIR", "NODES", "GPU", "WHEELS_DIR"):
            self.environment.pop(name, None)

    def shell(self, *command, check=True, timeout=PATIENCE, **variables):
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
        return done

    def compose(self, *arguments, **options):
        return self.shell("docker", "compose", *arguments, **options)

    def down(self):
        self.compose("--profile", "tools", "down", "--volumes", "--timeout", "5", check=False)

    def execute(self, service, *command, **options):
        return self.compose("exec", "-T", service, *command, **options)

    def container(self, service):
        return self.compose("ps", "--all", "--quiet", service).stdout.strip()

    def inspect(self, service, template):
        return self.shell(
            "docker", "inspect", "--format", template, self.container(service)
        ).stdout.strip()

    def health(self, service):
        return self.inspect(service, "{{.State.Health.Status}}")

    def node_ids(self):
        """Return Flower's id of each registered node, by service."""
        text = self.compose("logs", "--no-color", "register").stdout
        return {
            name: int(n) for name, n in re.findall(r"(node-\d+) is registered as node (\d+)", text)
        }

    def nodes(self):
        """Return the status of all nodes that the SuperLink knows, by id."""
        text = self.compose(
            "run", "--rm", "--no-deps", "-T", "flwr", "supernode", "list", "--format", "json"
        ).stdout
        answer = json.loads(text[text.index("{") :])
        return {int(node["node-id"]): node["status"] for node in answer["nodes"]}

    def events(self, run, *kinds):
        try:
            lines = (self.runs / run / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if not kinds or event["event"] in kinds]

    def summary(self, run):
        return json.loads((self.runs / run / "summary.json").read_text())

    def stranger(self, script):
        """Run a shell script where node-1 runs, but without its key and data."""
        name = f"{PROJECT}-stranger"
        return self.shell(
            *("docker", "run", "--rm", "--name", name, "--network", FLEET, "--read-only"),
            *("--tmpfs", "/tmp", "--cap-drop", "ALL", "--volume", f"{PROJECT}_trust:/trust:ro"),
            *(IMAGE, "sh", "-c", script),
            check=False,
        )


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    if problem := engine_problem():
        pytest.skip(f"no Docker engine with compose: {problem}")
    root = tmp_path_factory.mktemp("deployment")
    for name in ("client_app", "fedpsa_strategy", "server_app", "simulation", "task", "docker"):
        ignore = shutil.ignore_patterns("__pycache__", "runs", ".env", "compose.nodes.yaml")
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    it = Deployment(root)
    try:
        it.shell("./generate.sh", str(NODES))
        it.down()  # what a test that was killed left behind
        it.compose("build", timeout=3600)
        it.compose("up", "--detach", RUN_NAME="first")
        yield it
    finally:
        it.shell("docker", "rm", "--force", f"{PROJECT}-stranger", check=False)
        it.down()
        if os.environ.get("FEDPSA_DOCKER_KEEP") != "1":
            it.shell("docker", "image", "rm", IMAGE, check=False)
        # The results belong to the containers' user.
        shutil.rmtree(it.runs, ignore_errors=True)


@pytest.fixture(scope="module")
def finished(deployment):
    """The deployment after its first run."""
    code = deployment.shell("docker", "wait", deployment.container("run")).stdout.strip()
    log = deployment.compose("logs", "--no-color", "run").stdout
    assert code == "0", log[-4000:]
    return deployment


def assert_every_upload_counts_once(events):
    uploads = [event["sequence"] for event in events if event["event"] == "upload"]
    dispatches = [event["sequence"] for event in events if event["event"] == "dispatch"]
    rejects = [event["sequence"] for event in events if event["event"] == "reject"]
    assert len(set(uploads)) == len(uploads)
    assert set(uploads) <= set(dispatches)
    assert not set(uploads) & set(rejects)


# --- The first run ------------------------------------------------------------------------------


def test_the_run_completes_and_its_results_are_on_the_host(finished):
    summary = finished.summary("first")
    assert summary["status"] == "completed"
    assert summary["versions"] == 6
    assert summary["uploads"] == 12
    assert summary["accuracy"] > 0.3
    folder = finished.runs / "first"
    for name in ("config.toml", "events.jsonl", "model.safetensors", "curve.png"):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "checkpoints").iterdir())
    assert folder.stat().st_uid == finished.runs.stat().st_uid != 0


def test_every_node_took_part_with_its_own_data(finished):
    events = finished.events("first")
    joined = {event["node_id"]: event for event in events if event["event"] == "join"}
    assert set(joined) == set(finished.node_ids().values())
    assert sorted(event["partition"] for event in joined.values()) == list(range(NODES))
    assert {event["num_examples"] for event in joined.values()} == {1617 // NODES}
    assert_every_upload_counts_once(events)


def test_all_services_are_healthy_and_restart(finished):
    for service in ("superlink", *(f"node-{i + 1}" for i in range(NODES))):
        assert wait_for("health", lambda s=service: finished.health(s) == "healthy")
        assert finished.inspect(service, "{{.HostConfig.RestartPolicy.Name}}") == "unless-stopped"
    for service in ("tls", "register", "run", "node-1-setup"):
        assert finished.inspect(service, "{{.HostConfig.RestartPolicy.Name}}") in ("no", "")
        assert finished.inspect(service, "{{.State.ExitCode}}") == "0"


# --- Users, keys, networks ----------------------------------------------------------------------


def test_nothing_runs_as_root_or_writes_to_the_image(finished):
    for service in ("superlink", "node-1", "node-2", "node-3"):
        assert finished.execute(service, "id", "-u").stdout.strip() not in ("", "0")
        status = finished.execute(service, "cat", "/proc/1/status").stdout
        assert re.search(r"CapBnd:\s*0+\n", status)
        assert re.search(r"NoNewPrivs:\s*1\n", status)
        assert finished.execute(service, "touch", "/app/x", check=False).returncode != 0
    for service in ("tls", "register", "run", "node-1-setup"):
        assert not finished.inspect(service, "{{.Config.User}}").startswith("0")


def test_private_keys_are_readable_by_their_owner_alone(finished):
    for service, path in (
        ("superlink", "/tls/server.key"),
        *((f"node-{i + 1}", "/key/node.key") for i in range(NODES)),
    ):
        mode, owner = finished.execute(service, "stat", "-c", "%a %u", path).stdout.split()
        assert mode == "600"
        assert owner == finished.execute(service, "id", "-u").stdout.strip()
    # Nobody's authority key, nor another node's.
    for service in ("superlink", "node-1"):
        assert not finished.execute(service, "ls", "/ca").stdout.strip()
    mounts = finished.inspect("node-1", "{{range .Mounts}}{{.Name}} {{end}}").split()
    assert sorted(mounts) == [
        f"{PROJECT}_{name}" for name in ("node-1-data", "node-1-key", "trust")
    ]
    keys = {
        finished.execute(f"node-{i + 1}", "sha256sum", "/key/node.key").stdout.split()[0]
        for i in range(NODES)
    }
    assert len(keys) == NODES


def test_nodes_reach_the_fleet_api_and_nothing_else(finished):
    script = (
        "import socket, sys\n"
        "try:\n"
        "    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()\n"
        "except OSError: print('closed')\n"
        "else: print('open')\n"
    )

    def probe(host, port):
        return finished.execute("node-1", "python", "-c", script, host, str(port)).stdout.strip()

    assert probe("superlink", 9092) == "open"
    assert probe("superlink", 8000) == "closed"
    assert probe("superlink-control", 8000) == "closed"
    control = finished.inspect(
        "superlink", f'{{{{(index .NetworkSettings.Networks "{PROJECT}_control").IPAddress}}}}'
    )
    assert probe(control, 8000) == "closed"
    # Not even an address of another node's own API.
    assert probe("node-2", 9094) == "closed"
    assert finished.inspect("superlink", "{{.NetworkSettings.Ports}}") in ("map[]", "{}")


def test_a_strange_node_is_refused(finished):
    before = finished.nodes()
    tls = "flower-supernode --superlink=superlink:9092 --root-certificates=/trust/ca.pem"
    no_key = finished.stranger(f"{tls} --max-retries=2")
    assert no_key.returncode != 0
    assert "All SuperNodes must be registered" in no_key.stdout

    make_key = (
        'python -c "from pathlib import Path; from jobs.node_setup import ensure_key;'
        " ensure_key(Path('/tmp'), Path('/tmp'))\""
    )
    unknown = finished.stranger(
        f"{make_key} && {tls} --auth-supernode-private-key=/tmp/node.key --max-retries=2"
    )
    assert unknown.returncode != 0
    assert "New key." in unknown.stdout
    assert "Failed to activate SuperNode" in unknown.stdout

    plain = finished.stranger(
        "flower-supernode --superlink=superlink:9092 --insecure --max-retries=2"
    )
    assert plain.returncode != 0
    assert "Failed to initialize the connection" in plain.stdout

    for output in (no_key.stdout, unknown.stdout, plain.stdout):
        assert "SuperNode ID" not in output
    assert finished.nodes().keys() == before.keys()
    log = finished.compose("logs", "--no-color", "superlink").stdout
    assert "No SuperNode found with the given public key" in log
    assert "WRONG_VERSION_NUMBER" in log  # bytes that are no TLS


def test_a_node_refuses_a_superlink_of_another_authority(finished):
    make_other = (
        'python -c "from pathlib import Path as P; from jobs.tls import ensure_certificates;'
        " ensure_certificates(P('/tmp'), P('/tmp'), P('/tmp'), ['superlink'])\""
    )
    refused = finished.stranger(
        f"{make_other} && flower-supernode --superlink=superlink:9092"
        " --root-certificates=/tmp/ca.pem --max-retries=2"
    )
    assert refused.returncode != 0
    assert re.search(r"handshake|certificate", refused.stdout, re.IGNORECASE)
    assert "SuperNode ID" not in refused.stdout


# --- Breaking things ----------------------------------------------------------------------------


def test_a_run_that_cannot_work_ends_with_an_error(finished):
    done = finished.compose(
        *("run", "--rm", "--no-deps", "-T", "run"), check=False, RUN_CONFIG="lr=-1", RUN_NAME="bad"
    )
    assert done.returncode == 1
    assert "lr = -1.0: must be above 0" in done.stdout
    assert finished.summary("bad")["status"] == "failed"


def test_a_node_that_is_cut_off_comes_back_and_no_upload_counts_twice(finished):
    it, run = finished, "partition"
    lost = it.node_ids()["node-2"]
    it.compose(
        *("up", "--detach", "--no-deps", "run"),
        RUN_NAME=run,
        RUN_CONFIG="num-server-rounds=1000 reply-timeout=240 max-in-flight=2 failure-pause=15",
    )

    def uploads(by_lost, after=0.0):
        return [
            event
            for event in it.events(run, "upload")
            if (event["node_id"] == lost) == by_lost and event["wall"] > after
        ]

    wait_for("uploads of all", lambda: uploads(True) and uploads(False))
    it.shell("docker", "network", "disconnect", FLEET, it.container("node-2"))
    cut = time.time()
    version = it.events(run, "aggregate")[-1]["version"] if it.events(run, "aggregate") else 0

    # The others go on, and the SuperLink notices.
    wait_for("the run to go on", lambda: len(uploads(False, after=cut)) >= 4)
    wait_for("a missing node", lambda: [e for e in it.events(run, "leave") if e["node_id"] == lost])
    assert it.events(run, "aggregate")[-1]["version"] > version
    assert len(uploads(True, after=cut)) <= 1  # one may have been on its way
    assert it.nodes()[lost] == "offline"
    wait_for("a failing health check", lambda: it.health("node-2") == "unhealthy")

    it.shell("docker", "network", "connect", "--alias", "node-2", FLEET, it.container("node-2"))
    back = time.time()
    wait_for("the node's next upload", lambda: uploads(True, after=back))
    assert it.nodes()[lost] == "online"
    assert set(it.nodes()) == set(it.node_ids().values())
    wait_for("health", lambda: it.health("node-2") == "healthy")

    # `docker stop` ends the run cleanly.
    it.compose("stop", "run")
    assert it.inspect("run", "{{.State.ExitCode}}") == "1"
    summary = it.summary(run)
    assert summary["status"] == "stopped"
    events = it.events(run)
    assert_every_upload_counts_once(events)
    assert summary["uploads"] == len([e for e in events if e["event"] == "upload"])
    assert len([e for e in events if e["event"] == "end"]) == 1


def test_a_superlink_that_is_killed_comes_back_and_the_run_goes_on(finished):
    it, run = finished, "partition"
    # The settings of that run, which must be kept; it may only end elsewhere.
    config = "reply-timeout=240 max-in-flight=2 failure-pause=15 resume=true num-server-rounds="
    version = it.summary(run)["versions"]
    it.compose("up", "--detach", "--no-deps", "run", RUN_NAME=run, RUN_CONFIG=f"{config}1000")
    wait_for("a version", lambda: it.events(run, "aggregate")[-1]["version"] > version)
    # The SuperLink is the first child of the container's init. `docker kill` would be taken for the
    # wish to stop it, and it would stay down.
    it.execute("superlink", "sh", "-c", "kill -9 $(cut -d' ' -f1 /proc/1/task/1/children)")

    # The job notices that the run died with its server, and says how to go on.
    code = it.shell("docker", "wait", it.container("run")).stdout.strip()
    log = it.compose("logs", "--no-color", "--tail", "5", "run").stdout
    assert code == "1", log
    assert "RUN_NAME=partition with resume=true" in log
    wait_for("health", lambda: it.health("superlink") == "healthy")
    assert int(it.inspect("superlink", "{{.RestartCount}}")) >= 1
    # Who is registered is in the database.
    assert set(it.nodes()) == set(it.node_ids().values())
    wait_for("the nodes", lambda: set(it.nodes().values()) == {"online"})

    version = it.events(run, "aggregate")[-1]["version"]
    done = it.compose(
        *("run", "--rm", "--no-deps", "-T", "run"),
        RUN_NAME=run,
        RUN_CONFIG=f"{config}{version + 1}",
    )
    assert "Completed" in done.stdout
    summary = it.summary(run)
    assert (summary["status"], summary["versions"]) == ("completed", version + 1)
    assert_every_upload_counts_once(it.events(run))


def test_a_nodes_own_data_are_kept(finished, tmp_path):
    own = tmp_path / "own.npz"
    np.savez(own, x=np.zeros((4, 1, 8, 8), np.uint8), y=np.arange(4))
    own.chmod(0o644)
    job = ("run", "--rm", "--no-deps", "-T")
    finished.compose(
        *job, "--volume", f"{own}:/in.npz:ro", "node-3-setup", "cp", "/in.npz", "/data/data.npz"
    )
    assert "left as it is" in finished.compose(*job, "node-3-setup").stdout


def test_the_authoritys_certificate_can_be_copied(finished, tmp_path):
    finished.compose("cp", "superlink:/trust/ca.pem", str(tmp_path))
    assert "BEGIN CERTIFICATE" in (tmp_path / "ca.pem").read_text()


def test_starting_again_keeps_keys_and_registrations(finished):
    before = finished.execute("node-1", "sha256sum", "/key/node.key").stdout
    finished.compose("up", "--detach", "--force-recreate", "node-1-setup", "register", "tls")
    wait_for("the jobs", lambda: finished.inspect("register", "{{.State.Status}}") == "exited")
    assert finished.inspect("register", "{{.State.ExitCode}}") == "0"
    assert "is known already" in finished.compose("logs", "--no-color", "register").stdout
    assert finished.execute("node-1", "sha256sum", "/key/node.key").stdout == before
