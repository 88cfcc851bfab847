"""Every command in README and docs is one that exists and takes these options."""

import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from server_app.settings import Settings
from simulation.cli import build_parser, build_run_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.split("  #")[0].strip()
                if text and not text.startswith("#"):
                    yield pytest.param(text, id=f"{page.name}: {text[:60]}")


def check_settings(config):
    known = Settings().to_run_config()
    Settings.from_run_config(
        {"run-dir": "/tmp/x"} | {k: v for k, v in config.items() if k in known}
    )
    assert config.keys() <= known.keys()


@pytest.mark.parametrize("command", list(commands()))
def test_the_command_exists(command):
    words = [w for w in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z]+=\S+", w)]
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:3] == ["python", "-m", "simulation"]:
        arguments = build_parser().parse_args(words[3:])
        check_settings(build_run_config(arguments, Settings().to_run_config(), datetime.now(UTC)))
    elif words[:3] == ["python", "-m", "server_app.dashboard"]:
        assert (ROOT / "server_app" / "dashboard" / "__main__.py").exists()
    elif words[:2] == ["flwr", "run"]:
        check_settings(parse_config_args([words[words.index("--run-config") + 1]]))
    elif words[0] != "export":
        pytest.fail(f"no test knows this command: {command}")
