"""An upload goes one way: few calls, few changes of module, and no imports in a circle."""

import ast
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

import fedpsa_strategy
from fedpsa_strategy import FedBuff, FedPSA
from fedpsa_strategy.server.loop import AsyncLoop
from support.grids import ScriptedGrid
from support.runs import run, virtual

LIBRARY = str(Path(fedpsa_strategy.__file__).parent)


def modules_of_calls(function: Callable[[], object]) -> list[str]:
    """Return the module of every function of the library that a call runs, in order."""
    called = []

    def note(frame, event, argument):
        code = frame.f_code
        # Comprehensions have frames of their own only in some versions of Python.
        if (
            event == "call"
            and code.co_filename.startswith(LIBRARY)
            and not code.co_name.startswith("<")
        ):
            called.append(code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize(
    ("method", "own", "most_calls", "most_changes"),
    [(FedBuff, {}, 36, 17), (FedPSA, {"sketch_fn": lambda arrays: [1.0, 0.0]}, 45, 25)],
)
def test_an_upload_makes_few_calls_in_few_modules(
    method, own, most_calls, most_changes, monkeypatch
):
    uploads = []
    apply = AsyncLoop._apply
    strategy = method(buffer_size=5, max_in_flight=4, listeners=[], **own, **virtual(8))

    def measured(loop, task):
        uploads_before, version = strategy.state.uploads, strategy.state.version
        called = modules_of_calls(lambda: apply(loop, task))
        if strategy.state.uploads > uploads_before and strategy.state.version == version:
            uploads.append(called)

    monkeypatch.setattr(AsyncLoop, "_apply", measured)
    run(strategy, ScriptedGrid(8), num_versions=10)
    assert len(uploads) == 40
    # The first upload of a version may sketch the model.
    assert median(len(called) for called in uploads) <= most_calls
    assert median(sum(a != b for a, b in pairwise(called)) for called in uploads) <= most_changes


def test_no_module_imports_one_that_imports_it():
    """Neither for types alone, nor inside a function."""
    modules = {}
    for path in Path(LIBRARY).rglob("*.py"):
        if path.name != "__init__.py":
            parts = path.relative_to(Path(LIBRARY).parent).with_suffix("").parts
            modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    assert "fedpsa_strategy.server.loop" in modules
    imports = {
        name: {
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for target in (node.module, *(f"{node.module}.{item.name}" for item in node.names))
            if target in modules
        }
        for name, tree in modules.items()
    }
    assert "fedpsa_strategy.server.hooks" in imports["fedpsa_strategy.server.loop"]
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_nobody_asks_what_kind_of_clock_it_is():
    for path in Path(LIBRARY, "server").rglob("*.py"):
        if path.name != "clock.py":
            text = path.read_text(encoding="utf-8")
            assert "VirtualClock)" not in text.replace("VirtualClock(latency)", ""), path
            assert "clock.virtual" not in text, path
