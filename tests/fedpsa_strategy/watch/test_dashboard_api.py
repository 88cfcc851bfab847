"""The dashboard's web application, and its command."""

import asyncio
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from fedpsa_strategy.watch.dashboard import __main__ as command
from fedpsa_strategy.watch.dashboard.app import is_loopback, make_app
from fedpsa_strategy.watch.dashboard.library import Library
from fedpsa_strategy.watch.event_log import EventLog
from support.events import evaluated, rejected, started, uploaded


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "first"
    path.mkdir(parents=True)
    with EventLog(path / "events.jsonl") as log:
        log(started())
        log(uploaded(1.0, node_id=2**64 - 1, num_bytes=7))
        log(evaluated(2.0, accuracy=0.5, loss=1.0))
    return path


class Client:
    """Sends requests to an application in this process."""

    def __init__(self, app, base_url="http://127.0.0.1:8050"):
        self.app = app
        self.base_url = base_url

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def request(self, method, path, **options):
        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url) as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())


def client_of(*folders, loopback=True):
    return Client(make_app(Library(folders), loopback=loopback))


def test_runs_are_listed_and_shown(run):
    client = client_of(run.parent)
    listing = client.get("/api/runs").json()
    assert listing["folders"] == [str(run.parent)]
    assert [(item["name"], item["status"]) for item in listing["runs"]] == [("first", "running")]
    snapshot = client.get("/api/runs/first").json()
    assert snapshot["totals"]["accuracy"] == 0.5
    assert snapshot["totals"]["bytes_up"] == 7
    assert snapshot["uploads"][0]["node_id"] == "18446744073709551615"


def test_only_news_are_sent(run):
    client = client_of(run)
    cursor = client.get("/api/runs/first").json()["cursor"]
    response = client.get("/api/runs/first", params={"cursor": cursor})
    assert (response.status_code, response.content) == (204, b"")
    with EventLog(run / "events.jsonl") as log:
        log(rejected(3.0, reason="\ud800 broken"))
    response = client.get("/api/runs/first", params={"cursor": cursor})
    assert response.json()["rejections"][0]["reason"] == "\ud800 broken"


@pytest.mark.parametrize("host", ["localhost:8050", "127.0.0.1", "[::1]:8050", "127.8.8.8:1"])
def test_this_machine_is_answered(run, host):
    assert client_of(run).get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8050", "127.0.0.1.evil.example", "", "[", "10.0.0.1"]
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/first"])
def test_other_host_names_are_refused_on_loopback(run, host, path):
    response = client_of(run).get(path, headers={"Host": host})
    assert response.status_code == 403
    assert "first" not in response.text
    assert client_of(run, loopback=False).get(path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..",
        "/api/runs/%2e%2e",
        "/api/runs/..%2f..%2fetc%2fpasswd",
        "/api/runs/first%2f..%2fsecret",
        "/api/runs/first/events.jsonl",
        "/../library.py",
        "/%2e%2e/library.py",
        "/static/../library.py",
        "/library.py",
    ],
)
def test_nothing_but_runs_and_the_page_can_be_reached(run, path):
    (run.parent / "secret").mkdir()
    (run.parent / "secret/events.jsonl").write_text("")
    assert client_of(run).get(path).status_code == 404


def test_nothing_can_be_changed(run):
    client = client_of(run)
    before = (run / "events.jsonl").read_bytes()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs/first").status_code == 405
    assert (run / "events.jsonl").read_bytes() == before


def test_the_page_needs_nothing_from_elsewhere(run):
    client = client_of(run)
    for path, kind in (
        ("/", "text/html"),
        ("/app.js", "text/javascript"),
        ("/charts.js", "text/javascript"),
        ("/style.css", "text/css"),
        ("/icon.svg", "image/svg+xml"),
    ):
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in response.headers
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


def test_a_run_that_is_gone_is_an_answer(run):
    client = client_of(run.parent)
    assert client.get("/api/runs/first").status_code == 200
    run.rename(run.parent / "second")
    response = client.get("/api/runs/first")
    assert response.status_code == 404
    assert response.json() == {"error": "there is no run 'first'"}


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org", "")))


# --- The command --------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """Replace the endless serving; what would be served is noted."""
    calls = []

    def run_server(self, sockets):
        calls.append((self.config.app, sockets[0].getsockname()))
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run_server)
    monkeypatch.setattr("webbrowser.open", calls.append)
    return calls


def test_it_listens_on_loopback_only(run, served, capsys):
    assert command.main([str(run), "--port", "0"]) == 0
    app, (host, port) = served[0]
    assert host == "127.0.0.1"
    output = capsys.readouterr()
    assert f"http://127.0.0.1:{port}/" in output.out
    assert output.err == ""
    client = Client(app, base_url="http://evil.example")
    assert client.get("/api/runs").status_code == 403


def test_other_addresses_are_warned_about(run, served, capsys):
    assert command.main([str(run), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "reachable from other machines" in capsys.readouterr().err
    client = Client(served[0][0], base_url="http://my-server.lan")
    assert client.get("/api/runs").status_code == 200


def test_it_opens_a_browser_when_asked(run, served, capsys):
    assert command.main([str(run), "--port", "0", "--open"]) == 0
    assert served[0] in capsys.readouterr().out


def test_errors_are_one_clear_line(run, tmp_path, served, capsys):
    assert command.main([str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err == f"Error: {tmp_path / 'missing'} is no folder\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([str(run), "--port", str(port)]) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert command.main([str(run), "--port", "99999"]) == 2
    assert command.main([str(run), "--host", "no.such.host.invalid"]) == 2
    assert served == []


@pytest.mark.parametrize("module", ["fedpsa_strategy.watch.dashboard", "server_app.dashboard"])
def test_an_interrupt_ends_it_quietly(run, module):
    arguments = ["-m", module, str(run), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        address = server.stdout.readline().split()[1]
        assert httpx.get(f"{address}api/runs").status_code == 200
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=20) == ("", "")
    assert server.returncode == 0
