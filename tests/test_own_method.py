"""A method of somebody else's: the example of docs/METHODS.md, saved outside of the repository."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import fedpsa_strategy
from fedpsa_strategy import AsyncStrategy, FedBuff, Method, setting
from fedpsa_strategy.methods.registry import METHODS, MethodError, find_method, shared_settings
from fedpsa_strategy.server.strategies import strategy_of
from server_app.method_settings import SettingsError, parsed
from server_app.settings import Settings
from simulation import cli
from simulation.engines.grpc import run_on_processes
from simulation.engines.local.run import run_locally
from simulation.engines.ray import run_on_ray
from simulation.experiments.processes import set_options
from support.grids import ScriptedGrid, update
from support.own_method import REFERENCE, write_example
from support.programs import ROOT, printed_by
from support.runs import run, virtual

QUICK = {
    "strategy": REFERENCE,
    "method-settings": "trim=0.2 buffer-size=5",
    "num-clients": 6,
    "max-in-flight": 3,
    "num-server-rounds": 3,
    "local-epochs": 1,
}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The text of the page as a module on PYTHONPATH, for this process and those it starts."""
    folder = tmp_path / "elsewhere"
    write_example(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("trimmed", None)
    find_method.cache_clear()


def test_the_example_computes_a_trimmed_mean(example):
    values = iter([0.0, 1.0, 2.0, 3.0, 100.0])
    grid = ScriptedGrid(5, lambda message: update([next(values), 1.0], sketch=None))
    strategy = strategy_of(find_method(REFERENCE))(
        buffer_size=5, trim=0.2, max_in_flight=1, **virtual(5)
    )
    assert type(strategy).__name__ == "Trimmed mean"
    result = run(strategy, grid, num_versions=1)
    assert result.arrays["w"].numpy().tolist() == [2.0, 1.0]


def config(tmp_path, name, **more):
    folders = {"run-dir": str(tmp_path / name), "cache-dir": str(tmp_path / "cache")}
    return Settings.from_run_config(QUICK | folders | more).to_run_config()


@pytest.mark.engine
@pytest.mark.slow
def test_it_runs_on_every_engine_with_the_same_bits(example, tmp_path):
    nodes = {"num-clients": 3, "max-in-flight": 2, "method-settings": "buffer-size=3"}
    summaries = [
        run_locally(config(tmp_path, "local", **nodes), workers=1, stream=False),
        run_on_ray(ROOT, config(tmp_path, "ray", **nodes), num_clients=3, num_cpus=2),
        run_on_processes(ROOT, config(tmp_path, "grpc", **nodes), num_nodes=3),
    ]
    assert len({summary["model_sha256"] for summary in summaries}) == 1
    assert all(summary["versions"] == 3 for summary in summaries)


@pytest.mark.engine
def test_it_runs_in_other_processes_and_resumes_bit_for_bit(example, tmp_path):
    whole = run_locally(config(tmp_path, "whole"), workers=1, stream=False)
    assert whole["versions"] == 3
    saving = {"checkpoint-versions": 1, "num-server-rounds": 2}
    run_locally(config(tmp_path, "parts", **saving), workers=0, stream=False)
    again = {"method-settings": "buffer-size=5  trim=0.2", "resume": "true"}  # written otherwise
    resumed = run_locally(config(tmp_path, "parts", **again), workers=0, stream=False)
    assert resumed["model_sha256"] == whole["model_sha256"]


def test_settings_of_a_method_are_compared_as_the_method_reads_them(example):
    def of(text):
        return Settings.from_run_config(QUICK | {"method-settings": text})

    now = of("buffer-size=5 trim=0.20")
    before = now.to_run_config()
    assert not now.changed_since(before | {"method-settings": "trim=0.2 buffer-size=5"})
    for text in ("trim=0.3 buffer-size=5", "trim=0.2 buffer-size=5 gone=1"):
        assert set(now.changed_since(before | {"method-settings": text})) == {"method-settings"}


@pytest.mark.engine
def test_the_command_of_the_page_runs_it(example, tmp_path):
    folders = {"run-dir": str(tmp_path / "run"), "cache-dir": str(tmp_path)}
    values = QUICK | folders | {"method.trim": 0.2}
    del values["method-settings"]
    command = ["run", "--engine", "local", "--workers", "0", *set_options(values)]
    assert cli.main(command) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["versions"], summary["settings"]["method-settings"]) == (3, "trim=0.2")
    assert summary["uploads"] == 30


@pytest.mark.engine
def test_reproduce_compares_it_with_ours_and_tells_its_settings_apart(
    example, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def reproduce(first, second, *more):
        command = ["reproduce", "table-accuracy", "--methods", f"{REFERENCE},FedBuff", *more]
        command += ["--datasets", "digits", "--alphas", "0.5", "--seeds", "0", "--days", "0.005"]
        command += ["--set", "local-epochs=1", "--set", f"method.{first}"]
        assert cli.main([*command, "--set", f"method.{second}"]) == 0
        lines = Path("results", "table-accuracy", "cells.jsonl").read_text().splitlines()
        return {row["labels"]["method"]: row for row in map(json.loads, lines)}

    first = reproduce("trim=0.1", "buffer-size=3")
    assert {name: row["status"] for name, row in first.items()} == {
        "Trimmed mean": "completed",
        "FedBuff": "completed",
    }
    assert "Trimmed mean" in Path("results", "table-accuracy", "table.md").read_text()
    assert reproduce("buffer-size=3", "trim=0.1", "--finished-only") == first
    second = reproduce("trim=0.34", "buffer-size=3", "--finished-only")
    assert first["FedBuff"] == second["FedBuff"]
    assert first["Trimmed mean"]["id"] != second["Trimmed mean"]["id"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"strategy": "trimmed:Nothing"}, "trimmed has no 'Nothing'"),
        ({"strategy": "no_such_module:X"}, "cannot import 'no_such_module'"),
        ({"strategy": "trimmed:TrimmedMeanRule"}, "must be a subclass"),
        ({"strategy": "fedbuf"}, r"must be one of 'fedpsa', .*did you mean 'fedbuff'"),
        ({"strategy": REFERENCE, "method-settings": "trim=0.7"}, "trim = 0.7: must be at least 0"),
        ({"strategy": REFERENCE, "method-settings": "trimm=0.1"}, "did you mean trim"),
        ({"strategy": REFERENCE, "method-settings": "trim=="}, "must be key=value pairs"),
        ({"strategy": REFERENCE, "method-settings": "trim=0.1#2"}, "must be key=value pairs"),
        ({"method-settings": "trim=0.1"}, "has run-config keys of its own"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(example, given, text):
    with pytest.raises(SettingsError, match=text):
        Settings.from_run_config(given)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("mode=fast trim=0.1", {"mode": "fast", "trim": 0.1}),
        ("flag=true name='a b=c'", {"flag": True, "name": "a b=c"}),
        ("", {}),
    ],
)
def test_settings_may_be_words_and_texts_with_spaces(text, values):
    assert parsed(text) == values


def test_a_setting_of_the_method_that_stands_alone_is_found(example):
    from simulation.app_config import check_keys
    from simulation.errors import Refused

    with pytest.raises(Refused, match=r"did you mean method\.trim"):
        check_keys({"strategy": REFERENCE, "trim": 0.1}, Settings().to_run_config())


def test_methods_that_share_a_setting_share_its_meaning(monkeypatch):
    class Odd(Method):
        buffer_size: int = setting(7, "something else", least=1)

    shared_settings()
    from dataclasses import dataclass

    monkeypatch.setitem(METHODS, "odd", dataclass(frozen=True)(Odd))
    with pytest.raises(TypeError, match=r"Odd\.buffer_size is declared differently"):
        shared_settings()


def test_an_installed_method_is_found_by_its_name(example):
    folder = example / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    entry = "trimmed-mean = trimmed:TrimmedMean"
    (folder / "entry_points.txt").write_text(f"[fedpsa.methods]\n{entry}\n")
    given = {"strategy": "trimmed-mean", "method-settings": "trim=0.2"}
    assert Settings.from_run_config(given).method == find_method(REFERENCE)(trim=0.2)
    with pytest.raises(MethodError, match="'trimmed-mean'"):
        find_method("mine")


def test_strategies_show_the_settings_of_their_method():
    import inspect

    parameters = inspect.signature(FedBuff).parameters
    assert parameters["server_lr"].default == 1.0
    assert "factor of the aggregated step" in FedBuff.__doc__
    with pytest.raises(ValueError, match="buffer_size = 0: must be at least 1"):
        FedBuff(buffer_size=0)


def test_every_method_of_the_library_is_an_exported_strategy():
    names = {kind.__name__.removesuffix("Method"): kind for kind in METHODS.values()}
    exported = {name: getattr(fedpsa_strategy, name) for name in fedpsa_strategy.__all__}
    strategies = {
        name: kind
        for name, kind in exported.items()
        if isinstance(kind, type) and issubclass(kind, AsyncStrategy) and kind is not AsyncStrategy
    }
    assert strategies.keys() == names.keys()
    for name, strategy in strategies.items():
        assert getattr(strategy, "method_type", names[name]) is names[name], name


def test_the_lists_of_what_the_library_exports_agree():
    tree = ast.parse(Path(fedpsa_strategy.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))  # TYPE_CHECKING
    imported = {
        alias.name: node.module.removeprefix("fedpsa_strategy.")
        for node in checked.body
        for alias in node.names
    }
    assert imported == fedpsa_strategy._MODULE_OF
    assert sorted(fedpsa_strategy.__all__) == sorted(imported)


def test_methods_need_neither_flower_nor_torch():
    code = (
        "import sys\n"
        "for name in ('flwr', 'torch', 'ray'): sys.modules[name] = None\n"
        f"from fedpsa_strategy.methods import {', '.join(METHODS)}\n"
    )
    printed_by(code)
    shared = {f"fedpsa_strategy.methods.{name}" for name in ("base", "remembering", "thermometer")}
    allowed = {"numpy", "numpy.typing", "collections.abc", *shared} | sys.stdlib_module_names
    for method in METHODS:
        source = (ROOT / "fedpsa_strategy" / "methods" / f"{method}.py").read_text()
        imported = set(re.findall(r"^(?:from|import) ([\w.]+)", source, re.M))
        assert imported <= allowed, method


def test_the_pages_are_current():
    from server_app.methods_table import with_table

    page = (ROOT / "docs" / "METHODS.md").read_text()
    assert with_table(page) == page, "run: python -m server_app.methods_table"
