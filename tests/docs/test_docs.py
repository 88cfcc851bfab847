"""What the docs show really works."""

import logging
import re
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from support.doc_commands import PAGES, code_blocks
from support.engines import events
from support.events import rejected

OF_RAY = ("The current node timed out during startup",)
DOCS = Path(__file__).parents[2] / "docs"


def test_one_line_examples_work():
    for block in code_blocks("docs/METHODS.md", "python"):
        exec(block, {})


def test_the_examples_of_the_first_pages_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page in (DOCS / "start").glob("*.md"):
        for block in code_blocks(f"docs/start/{page.name}", "python"):
            exec(block, {})
    assert (tmp_path / "runs/my-run/summary.json").exists()


def test_the_example_of_a_listener_tells():
    (code,) = code_blocks("docs/WATCHING.md", "python")
    names = {}
    exec(code, names)
    told = []
    listen = names["TooManyRejections"](told.append)
    for client in (1, 2, 2, 1, 2, 2):
        listen(rejected(client=client, reason=f"client {client} is broken"))
    assert told == ["client 2: client 2 is broken"]
    assert isinstance(names["strategy"].listeners[0], names["TooManyRejections"])


def test_the_metrics_page_names_what_is_exported():
    pytest.importorskip("prometheus_client")
    from fedpsa_strategy.watch.prometheus import PrometheusMetrics

    with PrometheusMetrics("127.0.0.1:0") as metrics:
        address = f"http://127.0.0.1:{metrics.port}/metrics"
        with urllib.request.urlopen(address) as answer:
            exported = set(
                re.findall(r"^# TYPE (fedpsa_\w+)", answer.read().decode(), re.MULTILINE)
            )
    exported = {name for name in exported if not name.endswith("_created")}
    page = (DOCS / "WATCHING.md").read_text()
    assert set(re.findall(r"`(fedpsa_(?!strategy)\w+)", page)) - exported == set()
    assert exported - set(re.findall(r"fedpsa_\w+", page)) == set()


def test_the_tables_of_the_architecture_name_every_module():
    text = (DOCS / "ARCHITECTURE.md").read_text()
    library = ("", "server", "server/callbacks", "watch", "wire", "probe", "client")
    folders = [f"fedpsa_strategy/{name}" for name in library]
    folders += ["simulation", "simulation/engines/local", "simulation/engines/cluster"]
    modules = [path for folder in folders for path in (DOCS.parent / folder).glob("[!_]*.py")]
    assert len(modules) > 50
    assert not [str(path) for path in modules if not re.search(rf"[`/]{path.name}`", text)]


def test_the_settings_page_is_current():
    from server_app.settings_page import settings_page

    assert (DOCS / "SETTINGS.md").read_text() == settings_page(), (
        "run: python -m server_app.settings_page > docs/SETTINGS.md"
    )


def test_the_example_of_an_own_task_learns(tmp_path, monkeypatch, caplog):
    from simulation.engines.local.run import run_locally
    from task.tasks import find_task

    metrics, code = code_blocks("docs/OWN_TASK.md", "python")
    exec(metrics, names := {})
    found = names["metrics"](torch.tensor([[2.0], [-1.0], [1.0]]), torch.tensor([1, 0, 0]))
    assert float(found["f1"]) == pytest.approx(2 / 3)
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    find_task.cache_clear()
    config = {
        "task": "my_task",
        "run-dir": str(tmp_path / "run"),
        "num-clients": 10,
        "virtual-days": 0.0,
        "num-server-rounds": 12,
        "queue-size": 20,
        "evaluate-every": 1,
    }
    caplog.set_level(logging.INFO, "flwr")
    summary = run_locally(config, workers=0)
    assert summary["status"] == "completed"
    assert summary["uploads"] == 60
    assert summary["rejected"] == 0
    losses = [event["metrics"]["loss"] for event in events(tmp_path / "run", "evaluate")]
    assert losses[-1] < losses[0] / 2
    assert any("loss" in line and f"{losses[-1]:.4g}" in line for line in caplog.messages)
    assert not any("accuracy" in line for line in caplog.messages if "%" in line)


def test_measured_figures_are_those_of_the_files():
    from benchmarks.pages import PAGES, PARTS, with_figures

    used = set()
    for name in PAGES:
        page = (DOCS.parent / name).read_text()
        assert with_figures(page) == page, "run: python -m benchmarks.pages"
        used |= set(re.findall(r"<!-- measured: ([\w-]+) -->", page))
    assert used == PARTS.keys()


def test_readme_has_no_wall_of_text():
    text = (DOCS.parent / "README.md").read_text()
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for item in re.split(r"\n\n+|\n(?=- )", re.sub(r"^\|.*", "", text, flags=re.MULTILINE)):
        lines = item.splitlines()
        assert len(lines) <= 4, item
        assert all(len(line) <= 100 for line in lines), item


def test_prose_is_wrapped():
    for path in PAGES:
        generated = r"^```.*?^```|^<!-- [\w-]+: .*?^<!-- end -->"
        text = re.sub(generated, "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in text.splitlines():
            free = line.startswith(("|", "![")) or line.count(" ") < 4  # tables; links alone
            assert len(line) <= 104 or free, f"{path.name}: {line}"


def test_troubleshooting_knows_what_the_code_says():
    root = DOCS.parent
    folders = ("fedpsa_strategy", "server_app", "client_app", "task", "simulation")
    sources = [path.read_text() for name in folders for path in (root / name).rglob("*.py")]
    # As one text each, as the user sees them: literals that go on in the next line are joined.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    rows = re.findall(r"^\| `(.*?)`", (DOCS / "TROUBLESHOOTING.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        # Numbers and names vary; the words between them do not.
        parts = [part.strip() for part in re.split(r"\.\.\.|\[|\]|\d+(?:\.\d+)?|`|'", row)]
        words = max(parts, key=len)
        assert words in code or words in OF_RAY, row
