"""Tests import nothing from one another; what they share is in tests/support/."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("*.py"))}


def imported(tree):
    """Return the first parts of the names of all imported modules, wherever they are imported."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level if node.level else node.module.split(".")[0])
    return names


def is_fixture(node):
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(text.startswith("pytest.fixture") for text in decorators)


def test_a_test_imports_nothing_from_another_test():
    others = {path.stem for path in FILES.values() if path.parent.name != "support"}
    for name, path in FILES.items():
        found = imported(ast.parse(path.read_text())) & (others | {"tests", ".", ".."})
        assert not found, f"{name} imports {found}: what tests share belongs to tests/support/"


def test_no_file_changes_the_search_path():
    def calls(path):
        nodes = ast.walk(ast.parse(path.read_text()))
        return [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]

    changed = [name for name, path in FILES.items() if "sys.path.insert" in calls(path)]
    assert not changed, "pytest's pythonpath in pyproject.toml is enough"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("conftest.py")])
def test_a_conftest_holds_only_fixtures(name):
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Assign)
    nodes = [node for node in ast.parse(FILES[name].read_text()).body if isinstance(node, kinds)]
    assert all(is_fixture(node) for node in nodes), "helpers belong to tests/support/"


def test_helpers_are_in_support_alone():
    elsewhere = [name for name in FILES if not name.startswith("support/")]
    assert all(Path(name).name.startswith(("test_", "conftest")) for name in elsewhere)
