"""`fedpsa doctor` against this machine, and against broken ones."""

import json
import socket
import subprocess
import sys
import time

from fedpsa_strategy.cli import doctor
from fedpsa_strategy.cli.main import main


def found(capsys):
    code = main(["doctor", "--json"])
    return code, {each["subject"]: each for each in json.loads(capsys.readouterr().out)}


def test_it_tells_what_is_here(capsys):
    code, findings = found(capsys)
    assert code == 0
    assert findings["Flower"]["state"] == "ok"
    assert findings["engine: Ray"]["text"].startswith("can run")
    assert all(each["advice"] for each in findings.values() if each["state"] == "problem")
    assert main(["doctor"]) == 0
    assert "Flower" in capsys.readouterr().out


def test_a_taken_port_and_a_superlink_left_running_are_named(capsys, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "_PORTS", {port: "the live page"})
        script = tmp_path / "flower-superlink"
        script.write_text("import time\ntime.sleep(60)\n")
        process = subprocess.Popen([sys.executable, script])
        try:
            for _ in range(100):
                _, findings = found(capsys)
                if (subject := f"SuperLink {process.pid}") in findings:
                    break
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    assert f"kill {process.pid}" in findings[subject]["advice"]
    assert findings[f"port {port}"]["state"] == "note"


def test_an_old_flower_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "1.8.0")
    code, findings = found(capsys)
    assert code == 1
    assert "too old" in findings["Flower"]["text"]
    assert "pip install" in findings["Flower"]["advice"]


def test_a_check_that_fails_does_not_silence_the_others(capsys, monkeypatch):
    def _gpus():
        raise RuntimeError("the driver is broken")
        yield

    monkeypatch.setattr(doctor, "_gpus", _gpus)
    code, findings = found(capsys)
    assert code == 1
    assert "the driver is broken" in findings["gpus"]["text"]
    assert "ports" in findings or any(key.startswith("port ") for key in findings)


def test_missing_commands_of_flower_are_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (finding,) = doctor._deployment()
    assert finding.state == "problem"
    assert "flower-supernode" in finding.text
