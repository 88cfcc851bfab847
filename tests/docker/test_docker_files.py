"""What the deployment is made of, without an engine: jobs, compose files, pinned packages."""

import os
import re
import shutil
import ssl
import stat
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from jobs import health, node_setup, register, tls
from jobs import run as run_job
from simulation.app_config import default_run_config
from simulation.engines.flower.submit import fingerprint, read_summary
from simulation.errors import LaunchFailed
from support.doc_commands import code_blocks
from task.datasets import dataset_info
from task.shards import dataset_source, file_shard

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# --- Certificates and keys ---------------------------------------------------------------------


def folders_in(root):
    made = [root / name for name in ("ca", "tls", "trust")]
    for folder in made:
        folder.mkdir(parents=True)
    return made


@pytest.fixture
def folders(tmp_path):
    return folders_in(tmp_path)


def make(folders, names=tls.NAMES):
    tls.ensure_certificates(*folders, list(names))
    return x509.load_pem_x509_certificate((folders[1] / "server.pem").read_bytes())


def test_private_keys_are_their_owners_alone(folders, tmp_path):
    before = os.umask(0)
    try:
        make(folders)
        node_setup.ensure_key(tmp_path, tmp_path)
    finally:
        os.umask(before)
    for path in (folders[0] / "ca.key", folders[1] / "server.key", tmp_path / "node.key"):
        assert mode(path) == 0o600
        assert path.stat().st_uid == os.getuid()
    assert mode(tmp_path / "node.pub") == 0o644


def test_the_certificate_names_the_superlink_and_is_the_authoritys(folders):
    certificate = make(folders, [*tls.NAMES, "fl.example.org"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "superlink",
        "superlink-control",
        "localhost",
        "fl.example.org",
    ]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    ca = x509.load_pem_x509_certificate((folders[2] / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(ca)
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def handshake(server_folders, trust, name):
    """Shake hands in memory; returns the client's error, if it has one."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(server_folders[1] / "server.pem", server_folders[1] / "server.key")
    client = ssl.create_default_context(cafile=trust / "ca.pem")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    a, b, c, d = (ssl.MemoryBIO() for _ in range(4))
    ends = [client.wrap_bio(a, b, server_hostname=name), server.wrap_bio(c, d, server_side=True)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error
            c.write(b.read())
            a.write(d.read())
    assert ends[0].version() == "TLSv1.3"
    return None


def test_a_client_trusts_this_authority_and_these_names_only(folders, tmp_path):
    make(folders)
    assert handshake(folders, folders[2], "superlink") is None
    assert handshake(folders, folders[2], "localhost") is None
    assert "mismatch" in str(handshake(folders, folders[2], "elsewhere"))
    others = folders_in(tmp_path / "other")
    make(others)
    assert handshake(others, folders[2], "superlink") is not None


def test_certificates_are_kept_while_they_are_good_and_fit(folders, monkeypatch):
    first = make(folders)
    assert make(folders) == first
    renamed = make(folders, [*tls.NAMES, "fl.example.org"])
    assert renamed != first
    # In less than a month it expires.
    monkeypatch.setattr(tls, "_SERVER_DAYS", 20)
    make(folders)
    short = make(folders)
    monkeypatch.undo()
    assert short.not_valid_after_utc < datetime.now(UTC) + timedelta(days=21)
    assert make(folders).not_valid_after_utc > datetime.now(UTC) + timedelta(days=300)
    # A new authority signs anew.
    (folders[0] / "ca.key").unlink()
    ca_before = (folders[2] / "ca.pem").read_bytes()
    make(folders)
    assert (folders[2] / "ca.pem").read_bytes() != ca_before
    assert handshake(folders, folders[2], "superlink") is None


def swap(folders, tmp_path, *names):
    """Put files of another deployment beside those of this one."""
    others = folders_in(tmp_path / "other")
    make(others)
    for name in names:
        mine = next(folder / name for folder in folders if (folder / name).exists())
        theirs = next(folder / name for folder in others if (folder / name).exists())
        mine.write_bytes(theirs.read_bytes())


@pytest.mark.parametrize(
    "names", [["server.key"], ["server.pem"], ["server.key", "server.pem"], ["ca.key"], ["ca.pem"]]
)
def test_files_that_do_not_belong_together_are_replaced(folders, tmp_path, names):
    make(folders)
    swap(folders, tmp_path, *names)
    make(folders)
    assert handshake(folders, folders[2], "superlink") is None


def test_a_certificate_that_only_names_the_authority_is_replaced(folders, tmp_path):
    make(folders)
    ca = x509.load_pem_x509_certificate((folders[2] / "ca.pem").read_bytes())
    stranger, key = ec.generate_private_key(ec.SECP384R1()), folders[1] / "server.key"
    server_key = tls.load_pem_private_key(key.read_bytes(), password=None)
    names = [tls._name(name) for name in tls.NAMES]
    forged = tls._builder("superlink", server_key.public_key(), ca.subject, 365)
    forged = forged.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signed = forged.sign(stranger, tls.hashes.SHA384())
    (folders[1] / "server.pem").write_bytes(signed.public_bytes(tls.Encoding.PEM))
    assert make(folders) != signed


@pytest.mark.parametrize("name", ["server.key", "server.pem", "ca.key", "ca.pem"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2]])
def test_damaged_files_are_replaced(folders, name, damage):
    make(folders)
    path = next(folder / name for folder in folders if (folder / name).exists())
    path.write_bytes(damage(path.read_bytes()))
    make(folders)
    assert handshake(folders, folders[2], "superlink") is None


def test_a_node_key_is_what_flower_takes_and_is_kept(tmp_path):
    from flwr.cli.supernode.register import try_load_public_key

    node_setup.ensure_key(tmp_path, tmp_path)
    private = (tmp_path / "node.key").read_bytes()
    key = load_ssh_private_key(private, password=None)
    assert isinstance(key.curve, ec.SECP384R1)
    assert load_ssh_public_key((tmp_path / "node.pub").read_bytes()) == key.public_key()
    assert try_load_public_key(tmp_path / "node.pub")
    (tmp_path / "node.pub").unlink()
    node_setup.ensure_key(tmp_path, tmp_path)
    assert (tmp_path / "node.key").read_bytes() == private
    assert load_ssh_public_key((tmp_path / "node.pub").read_bytes()) == key.public_key()


# --- Data --------------------------------------------------------------------------------------


def test_demo_data_are_the_shards_that_a_simulation_has(tmp_path):
    info = dataset_info("digits")
    sizes = 0
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        node_setup.ensure_demo_data(folder, number, 3)
        mine = file_shard(folder / "data.npz", info)
        theirs = dataset_source("digits", cache_dir=tmp_path / "cache").client(number, 3)
        assert (mine.x == theirs.x).all()
        assert (mine.y == theirs.y).all()
        sizes += len(mine)
    assert sizes == 3 * (1617 // 3)


def test_demo_data_follow_the_number_of_nodes_but_own_data_stay(tmp_path):
    node_setup.ensure_demo_data(tmp_path, 0, 3)
    with np.load(tmp_path / "data.npz") as data:
        three = len(data["y"])
    node_setup.ensure_demo_data(tmp_path, 0, 4)
    with np.load(tmp_path / "data.npz") as data:
        assert len(data["y"]) < three
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 1, 8, 8), np.uint8), y=np.array([1, 2]))
    node_setup.ensure_demo_data(tmp_path, 0, 3)
    with np.load(tmp_path / "data.npz") as data:
        assert data["y"].tolist() == [1, 2]


def test_the_demo_split_is_that_of_the_submitted_run():
    defaults = default_run_config(ROOT)
    config = {**defaults, **tomllib.loads((DOCKER / "run.toml").read_text())}
    assert (config["dataset"], config["partition"]) == (node_setup._DATASET, node_setup._PARTITION)
    assert config["dirichlet-alpha"] == node_setup._ALPHA
    assert (config["test-fraction"], config["seed"]) == (
        node_setup._TEST_FRACTION,
        node_setup._SEED,
    )


# --- The jobs ----------------------------------------------------------------------------------


def build(changes="", name="", settings=None):
    settings = tomllib.loads((DOCKER / "run.toml").read_text()) if settings is None else settings
    return run_job.build_run_config(
        settings,
        changes,
        default_run_config(ROOT),
        num_nodes=3,
        runs_dir=Path("/runs"),
        name=name,
        now=NOW,
    )


def test_the_run_is_fedpsa_on_digits_by_the_wall_clock():
    from server_app.settings import Settings

    config = build()
    assert (config["strategy"], config["dataset"], config["clock"]) == ("fedpsa", "digits", "wall")
    assert config["num-clients"] == 3
    assert config["run-dir"] == "/runs/20260102T030405Z-fedpsa-digits"
    Settings.from_run_config({**default_run_config(ROOT), **config})


def test_run_config_changes_single_values_in_their_types():
    config = build("strategy=fedbuff lr=1 'data-dir=/a b' resume=true num-server-rounds=2", "mine")
    assert config["strategy"] == "fedbuff"
    assert isinstance(config["lr"], float)
    assert (config["data-dir"], config["resume"]) == ("/a b", "true")
    assert config["num-server-rounds"] == 2
    assert config["run-dir"] == "/runs/mine"


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ("learning-rate=1", "", "there is no setting 'learning-rate': did you mean lr?"),
        ("lr", "", "key=value"),
        ("", "../elsewhere", "plain folder name"),
        ("", "..", "plain folder name"),
    ],
)
def test_impossible_runs_are_refused(changes, name, text):
    with pytest.raises(LaunchFailed, match=re.escape(text)):
        build(changes, name)


def test_an_earlier_runs_summary_is_not_this_runs(tmp_path):
    path = tmp_path / "summary.json"
    assert read_summary(tmp_path, None) is None
    path.write_text('{"status": "completed"}')
    before = fingerprint(path)
    assert read_summary(tmp_path, before) is None
    other = tmp_path / "new.json"
    other.write_text('{"status": "failed"}')
    other.replace(path)
    assert read_summary(tmp_path, before) == {"status": "failed"}


def test_a_key_that_is_registered_already_is_no_failure(tmp_path, monkeypatch):
    for name in ("node-1", "node-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node.pub").write_text("key")
    answers = iter([{"node-id": 7}, LaunchFailed("`flwr` failed: Public key already in use.")])

    def fake(*arguments):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(register, "flwr_json", fake)
    assert register.register_nodes(tmp_path) == 2
    monkeypatch.setattr(
        register, "flwr_json", lambda *_: (_ for _ in ()).throw(LaunchFailed("down"))
    )
    with pytest.raises(LaunchFailed, match="down"):
        register.register_nodes(tmp_path)


def test_a_node_is_healthy_only_with_an_open_connection():
    head = "  sl  local_address rem_address   st\n"
    row = "   0: 040013AC:C138 020013AC:2384 {} 00000000:00000000\n"
    assert health.connected_to(9092, head + row.format("01"))
    assert not health.connected_to(9092, head + row.format("06"))
    assert not health.connected_to(8000, head + row.format("01"))
    assert not health.connected_to(9092, head)


# --- Compose files -----------------------------------------------------------------------------


@pytest.fixture
def generate(tmp_path):
    """Run generate.sh on a copy of the folder."""
    copy = tmp_path / "docker"
    shutil.copytree(DOCKER, copy, ignore=shutil.ignore_patterns("wheels", "runs", ".env"))

    def run(nodes, **variables):
        clean = {"PATH": os.environ["PATH"], **variables}
        subprocess.run(
            ["bash", copy / "generate.sh", str(nodes)], env=clean, check=True, capture_output=True
        )
        lines = (copy / ".env").read_text().splitlines()
        env = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        return yaml.safe_load((copy / "compose.nodes.yaml").read_text()), env

    return run


def test_each_node_has_a_key_and_data_that_no_other_service_sees(generate):
    model, env = generate(5)
    assert env["NODES"] == "5"
    services = model["services"]
    assert len([name for name in services if re.fullmatch(r"node-\d+", name)]) == 5
    for kind in ("key", "data"):
        for number in range(1, 6):
            volume = f"node-{number}-{kind}"
            users = {
                name: entry
                for name, service in services.items()
                for entry in service["volumes"]
                if entry.split(":")[0] == volume
            }
            assert set(users) == {f"node-{number}", f"node-{number}-setup"}
            assert users[f"node-{number}"].endswith(":ro")
    partitions = [services[f"node-{i}"]["environment"]["PARTITION_ID"] for i in range(1, 6)]
    assert partitions == ["0", "1", "2", "3", "4"]
    # The authority's key is mounted by the job that signs, alone.
    base = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    owners = [
        name
        for name, service in base.items()
        if any(str(entry).startswith("ca:") for entry in service.get("volumes", []))
    ]
    assert owners == ["tls"]


def test_generate_takes_options_and_refuses_nonsense(generate):
    model, env = generate(2, GPU="1", WHEELS_DIR="/mnt/w", BASE_IMAGE="python:3.12-slim")
    assert model["services"]["node-2"]["extends"]["file"] == "compose.gpu.yaml"
    assert env["COMPOSE_FILE"] == "compose.yaml:compose.nodes.yaml:compose.wheels.yaml"
    assert env["BASE_IMAGE"] == "'python:3.12-slim'"
    assert env["APP_UID"] != "0"
    for nonsense in ("0", "-1", "many"):
        with pytest.raises(subprocess.CalledProcessError):
            generate(nonsense)


def test_a_flower_whose_nodes_talk_http_is_one_more_file(generate):
    _, pinned = generate(2)
    _, newer = generate(2, FLOWER="1.41.0")
    assert "FLEET_PORT" not in pinned
    assert newer["FLEET_PORT"] == "8000"
    assert newer["COMPOSE_FILE"] == f"{pinned['COMPOSE_FILE']}:compose.http.yaml"
    base, http = (
        yaml.safe_load((DOCKER / name).read_text())["services"]["superlink"]["command"]
        for name in ("compose.yaml", "compose.http.yaml")
    )
    # The addresses differ, and nothing else: TLS and known keys are asked for in both.
    differ = set(base) ^ set(http)
    assert {word.split("=")[0] for word in differ} == {"--host", "--fleet-api-address"}


def test_containers_are_locked_down_and_publish_nothing():
    common = yaml.safe_load((DOCKER / "compose.common.yaml").read_text())["services"]["fedpsa"]
    assert common["read_only"] is True
    assert common["cap_drop"] == ["ALL"]
    assert common["security_opt"] == ["no-new-privileges:true"]
    model = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert all(network["internal"] for network in model["networks"].values())
    nodes = yaml.safe_load((DOCKER / "compose.node.yaml").read_text())["services"]
    for name, service in {**model["services"], **nodes}.items():
        assert "ports" not in service, name
        assert service["extends"] == {"file": "compose.common.yaml", "service": "fedpsa"}, name
    command = model["services"]["superlink"]["command"]
    assert "--enable-supernode-auth" in command
    assert not [word for word in command if "insecure" in word]
    assert nodes["supernode"]["networks"] == ["fleet"]


# --- Git and the image -------------------------------------------------------------------------


def test_secrets_and_generated_files_stay_out_of_git_and_image():
    import pathspec

    ignored = pathspec.GitIgnoreSpec.from_lines((DOCKER / ".gitignore").read_text().splitlines())
    for name in (".env", "compose.nodes.yaml", "runs/x/summary.json", "a/node.key", "ca.pem"):
        assert ignored.match_file(name), name
    for name in ("compose.yaml", "Dockerfile", "jobs/tls.py"):
        assert not ignored.match_file(name), name
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in allowed
    assert not [line for line in allowed if line.startswith("!") and "runs" in line]


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="needs openssl and ssh-keygen",
)
def test_the_recipe_in_the_docs_makes_what_flower_takes(tmp_path):
    from flwr.cli.supernode.register import try_load_public_key

    blocks = code_blocks("docs/SECURITY.md")
    recipes = [block for block in blocks if "openssl" in block or "ssh-keygen" in block]
    assert len(recipes) == 2
    for recipe in recipes:
        subprocess.run(["bash", "-euo", "pipefail", "-c", recipe], cwd=tmp_path, check=True)
    for name in ("ca.key", "server.key", "node.key"):
        assert mode(tmp_path / name) == 0o600
    assert handshake([tmp_path, tmp_path], tmp_path, "fl.example.org") is None
    assert isinstance(
        load_ssh_private_key((tmp_path / "node.key").read_bytes(), password=None).curve,
        ec.SECP384R1,
    )
    assert try_load_public_key(tmp_path / "node.key.pub")


# --- Without an engine -------------------------------------------------------------------------

NO_COMPOSE = """case "$1" in compose) echo "docker: unknown command" >&2; exit 1;; esac"""
NO_ENGINE = """case "$1" in info) echo "Cannot connect to the Docker daemon" >&2; exit 1;; esac"""


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (None, "docker is not installed"),
        (NO_COMPOSE, "docker has no compose plugin"),
        (NO_ENGINE, "no Docker engine answers.*Cannot connect to the Docker daemon"),
    ],
)
def test_up_says_in_one_sentence_what_is_missing(tmp_path, script, text):
    folder, tools = tmp_path / "docker", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    for name in ("up.sh", "generate.sh"):
        shutil.copy(DOCKER / name, folder)
    for tool in ("bash", "env", "dirname", "id", "tr"):
        (tools / tool).symlink_to(shutil.which(tool))
    if script is not None:
        (tools / "docker").write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tools / "docker").chmod(0o755)
    done = subprocess.run(
        [folder / "up.sh", "2"], env={"PATH": str(tools)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"make docker-up: {text}.*\n", done.stderr)
    assert done.stdout == ""
    assert sorted(path.name for path in folder.iterdir()) == ["generate.sh", "up.sh"]
