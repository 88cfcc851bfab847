"""What Flower Hub takes, as far as Flower's own code checks it without a network."""

import importlib
import io
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import APP_PUBLISH_INCLUDE_PATTERNS, MAX_FILE_BYTES, MAX_NAME_LENGTH
from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Return a copy of what git knows, with no file that a person has lying about."""
    folder = tmp_path_factory.mktemp("hub") / "fedpsa"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def test_the_hub_takes_the_files_of_the_repository(clean, capsys):
    publish = importlib.import_module("flwr.cli.app_cmd.publish")
    paths = publish._collect_file_paths(clean)
    publish._validate_files(paths)  # number, sizes, text
    assert "Validation passed" in capsys.readouterr().out
    assert clean / "LICENSE" in paths
    # What is left out is not needed by whoever gets the app from there.
    takes = GitIgnoreSpec.from_lines(APP_PUBLISH_INCLUDE_PATTERNS)
    lost = [
        path
        for folder in ("client_app", "server_app", "task", "fedpsa_strategy")
        for path in (clean / folder).rglob("*.py")
        if not takes.match_file(path.relative_to(clean).as_posix()) or path not in paths
    ]
    assert lost == []


def test_name_and_description_fit(clean):
    publish = importlib.import_module("flwr.cli.app_cmd.publish")
    project = tomllib.loads((clean / "pyproject.toml").read_text())["project"]
    assert len(project["name"]) <= MAX_NAME_LENGTH
    publish._validate_app_name(project["name"], "app")
    publish._validate_description(project["description"])
    assert len(project["description"]) <= 200  # more has to be confirmed by hand


def test_the_bundle_is_of_format_1_and_small(clean):
    app = tomllib.loads((clean / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["fab-format-version"] == 1
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(clean))) as bundle:
        infos = bundle.infolist()
    names = {info.filename for info in infos}
    assert {"LICENSE", "pyproject.toml", "server_app/app.py", "client_app/app.py"} <= names
    assert not {name for name in names if name.startswith(("tests/", "results/", "docs/"))}
    assert len(infos) <= 1000
    assert max(info.file_size for info in infos) <= MAX_FILE_BYTES
    assert sum(info.file_size for info in infos) <= 10 * 2**20
    assert max(len(Path(name).parts) for name in names) <= 10
