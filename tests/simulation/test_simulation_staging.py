"""The lean copy gives the bundle that the app's own folder gives, only sooner."""

import pytest
from flwr.cli.build import build_fab_from_disk

from simulation.engines.flower.staging import staged_app


@pytest.fixture
def cluttered_app(tiny_app, tmp_path):
    app = tmp_path / "app"
    for path in tiny_app.rglob("*.*"):
        if path.is_file():
            copy = app / path.relative_to(tiny_app)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    files = {
        ".gitignore": "runs/\n*.log.json\n",
        "LICENSE": "text",
        "README.md": "# Tiny",
        "tinyapp/data/table.json": "{}",
        "tinyapp/weights.bin": "0",
        "tinyapp/debug.log.json": "{}",
        "runs/1/summary.json": "{}",
        "environment/pyvenv.cfg": "home = /usr/bin",
        "environment/lib/module.py": "raise SystemExit",
        ".venv/pyvenv.cfg": "home = /usr/bin",
        ".venv/lib/module.py": "raise SystemExit",
        "tinyapp/__pycache__/server.json": "{}",
    }
    for name, text in files.items():
        path = app / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return app


def test_only_what_flower_may_bundle_is_copied(cluttered_app, tmp_path):
    with staged_app(cluttered_app, tmp_path) as copy:
        names = {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()}
    assert not copy.exists()
    assert names == {
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "tinyapp/__init__.py",
        "tinyapp/client.py",
        "tinyapp/server.py",
        "tinyapp/data/table.json",
        "tinyapp/debug.log.json",  # left to Flower, which reads .gitignore as well
    }


def test_the_bundle_is_the_same(cluttered_app, tmp_path):
    # Flower itself would take a virtual environment that git does not ignore.
    (cluttered_app / ".gitignore").write_text("runs/\n*.log.json\nenvironment/\n")
    with staged_app(cluttered_app, tmp_path) as copy:
        assert build_fab_from_disk(copy) == build_fab_from_disk(cluttered_app)
