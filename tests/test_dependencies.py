"""The folders depend on each other in one direction, and the library needs no torch."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fedpsa_strategy.wire import error_codes
from support.programs import ROOT, printed_by

ALLOWED = {
    "fedpsa_strategy": set(),
    "task": {"fedpsa_strategy"},
    "client_app": {"fedpsa_strategy", "task"},
    "server_app": {"fedpsa_strategy", "task"},
    "simulation": {"fedpsa_strategy", "task", "client_app", "server_app"},
}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_folder_dependencies_go_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = imported_packages(path) & ALLOWED.keys() - {package}
        assert ours <= ALLOWED[package], f"{path} imports {ours - ALLOWED[package]}"


def test_rules_know_nothing_of_flower_torch_or_files():
    paths = list((ROOT / "fedpsa_strategy" / "methods").glob("*.py"))
    assert len(paths) > 7
    for path in paths:
        if path.stem == "mapped_memory":  # which keeps vectors in a file
            continue
        forbidden = {"flwr", "torch", "logging", "time", "pathlib", "os", "random"}
        assert not imported_packages(path) & forbidden, path


def private_names_of_torch(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.fullmatch(r"torch\.([\w.]+\.)?_(?!_)[\w.]+", name)}


def test_nothing_of_torch_is_used_that_may_change_without_notice():
    found = {
        path.relative_to(ROOT): names
        for package in (*ALLOWED, "benchmarks", "docker")
        for path in (ROOT / package).rglob("*.py")
        if (names := private_names_of_torch(path))
    }
    assert not found


def test_what_flower_may_change_without_notice_is_imported_in_one_file():
    private = r"^ *(?:from|import) (?!flwr\.(?:app|clientapp|serverapp(?:\.strategy)?) )flwr\b"
    found = [
        path.relative_to(ROOT).as_posix()
        for package in (*ALLOWED, "benchmarks", "docker", "docs")
        for path in (ROOT / package).rglob("*.py")
        if re.search(private, path.read_text(), re.M)
    ]
    assert found == ["simulation/engines/local/internals.py"]


def test_error_codes_are_those_of_flower():
    from flwr.common.constant import ErrorCode

    ours = {name: value for name, value in vars(error_codes).items() if name.isupper()}
    names = {
        "CLIENT_APP_RAISED": "CLIENT_APP_RAISED_EXCEPTION",
        "REPLY_UNAVAILABLE": "REPLY_MESSAGE_UNAVAILABLE",
    }
    assert ours == {name: getattr(ErrorCode, names.get(name, name)) for name in ours}


@cache
def loaded_modules(code: str) -> set[str]:
    return set(printed_by(f"import sys\n{code}\nprint(*sys.modules)").split())


@pytest.mark.parametrize(
    "statement",
    ["from fedpsa_strategy import FedPSA, FedBuff, VirtualClock", "import fedpsa_strategy.watch"],
)
def test_the_library_imports_nothing_of_its_extras(statement):
    loaded = loaded_modules(statement) - loaded_modules("import flwr.serverapp")
    for name in (
        "starlette",
        "uvicorn",
        "matplotlib",
        "tensorboard",
        "mlflow",
        "wandb",
        "torch",
        "rich",
    ):
        assert name not in loaded, name


def test_the_server_app_does_not_import_the_live_page():
    assert "fedpsa_strategy.watch.dashboard" not in loaded_modules("import server_app.app")


def test_the_client_app_imports_only_what_a_training_step_needs():
    loaded = loaded_modules("import client_app.app")
    assert "torch" in loaded
    for name in ("torchvision", "sklearn", "scipy", "matplotlib", "ray", "pandas"):
        assert name not in loaded, name


def test_a_task_is_one_thing():
    """The server's train message on its way; what a user provides is a `LearningTask`."""
    classes = [
        path.relative_to(ROOT).as_posix()
        for package in ALLOWED
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "Task"
    ]
    assert len(classes) == 1, classes
