"""The benchmarks run, at a scale at which their numbers mean nothing."""

import importlib
import itertools
import json
import os
import re
import statistics
import sys
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import (
    cluster,
    engines,
    jobs,
    large_model,
    leftovers,
    machine,
    nodes,
    queued,
    server,
    sketch,
    sketch_noise,
    superlink,
    traffic,
)
from benchmarks.measure import Spread, interleave, paired_ratio, peak_memory
from benchmarks.report import Report
from fedpsa_strategy.methods.registry import METHODS
from task.tasks import DatasetTask


def results(folder, name):
    page = (folder / f"{name}.md").read_text()
    assert "Machine: " in page
    assert "Made by `python -m benchmarks." in page
    return page, json.loads((folder / f"{name}.json").read_text())


def test_make_bench_gives_options_that_exist(capsys):
    lines = re.findall(r"-m benchmarks\.(.*)", (jobs.ROOT / "Makefile").read_text())
    assert lines
    for name, *words in map(str.split, lines):
        with pytest.raises(SystemExit):
            importlib.import_module(f"benchmarks.{name}").main(["--help"])
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert f"{option} " in known, (name, option)


def test_measurements_take_turns():
    calls = []
    cases = {name: lambda name=name: calls.append(name) or 1.0 for name in ("a", "b")}
    assert interleave(cases, 2, warm_up=1) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert calls == ["a", "b"] * 3


def test_spread_and_ratio():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([0.002]).show(1e3) == "2 (2-2)"
    assert paired_ratio([2.0, 9.0], [1.0, 3.0]) == Spread(2.5, 2.0, 3.0, 2)


def test_peak_memory_sees_what_is_freed_again():
    assert peak_memory(lambda: bytearray(50_000_000)) >= 40_000_000


def test_stolen_time_is_a_share_of_all_processors_time(monkeypatch):
    class Times(NamedTuple):
        user: float
        idle: float
        steal: float
        guest: float

    def told(*times):
        monkeypatch.setattr(machine.psutil, "cpu_times", lambda: Times(*times))
        return machine.ProcessorTime.now()

    before = told(16.0, 80.0, 4.0, 7.0)  # guests are users too
    assert before == (4.0, 100.0)
    assert told(116.0, 130.0, 54.0, 9.0).stolen_since(before) == 0.25
    assert before.stolen_since(before) == 0


def test_a_report_says_what_was_missed(tmp_path):
    report = Report("it", "Title", "python -m benchmarks.it")
    report.target("fast", 2.0, 1.0)
    report.target("many", 2.0, 1.0, at_least=True)
    report.table("Times", ["a", "b"], [[1, Spread.of([1.0]).show()]])
    report.data("raw", Spread.of([1.0]))
    report.write(tmp_path)
    page, record = results(tmp_path, "it")
    assert "| fast | 2 | at most 1 | **missed** |" in page
    assert "| many | 2 | at least 1 | met |" in page
    assert [target["met"] for target in record["targets"]] == [False, True]
    assert record["raw"]["median"] == 1.0


def test_server(tmp_path):
    server.main(["--sizes", "2000", "--repeats", "1", "--out", str(tmp_path)])
    page, record = results(tmp_path, "server")
    assert set(record["times"]["2000"]) == set(METHODS)
    assert "fedpac" in page


def test_leftovers_are_samples_that_nobody_asked_for(tmp_path):
    leftovers.main(["--dataset", "digits", "--clients", "20", "--out", str(tmp_path)])
    page, record = results(tmp_path, "leftovers")
    assert "| `fitted-dirichlet` |" in page
    last = {
        name: [statistics.fmean(shares[-leftovers.LAST :]) for shares in by_alpha["0.1"]]
        for name, by_alpha in record["shares"].items()
    }
    assert min(last["client-dirichlet"]) > 5 * max(last["fitted-dirichlet"])
    # One client gets everything, whatever was drawn; without skew everybody gets what was drawn.
    labels = np.repeat([0, 1], 500)
    assert leftovers.leftovers(labels, 1, 0.1, 0, fitted=False)[0] > 0
    assert max(leftovers.leftovers(labels, 10, 1e9, 0, fitted=False)) == 0


def test_how_much_of_kappa_is_noise(tmp_path):
    arguments = ["--models", "perceptron on digits", "--stages", "2", "--projections", "2"]
    sketch_noise.main([*arguments, "--epochs", "1", "--out", str(tmp_path)])
    page, record = results(tmp_path, "sketch_noise")
    (found,) = record["models"]["perceptron on digits"]
    assert len(found["exact"]) == sketch_noise.CLIENTS
    # Longer sketches are nearer to the truth, by about the root of their length.
    assert found["noise"]["1024"] < found["noise"]["16"] / 3
    assert found["share"]["1024"] < found["share"]["16"]
    assert "noise at k = 1024" in page


def test_vectors_of_convolutions():
    model = DatasetTask("mnist", 10, model_width=0.25).make_model(0)
    vector = sketch_noise.vector_of(model)
    other = DatasetTask("mnist", 10, model_width=0.25).make_model(1)
    nn.utils.vector_to_parameters(vector, other.parameters())
    assert torch.equal(sketch_noise.vector_of(other), vector)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sketch(tmp_path, compiled):
    arguments = ["--models", "digits", "--size", "20000", "--repeats", "1"]
    sketch.main([*arguments, *["--compiled"] * compiled, "--out", str(tmp_path)])
    _, record = results(tmp_path, "sketch")
    found = record["models"]["digits"]
    assert found["parameters"] == 2410
    times = {"training", "sensitivity", "sketch"}
    if compiled:
        times |= {"compiled training"}
        assert found["share of compiled"] > 0
    assert found["seconds"].keys() == times
    assert {"sensitivity", "vmap", "loop", "sketch"} <= found["compared"].keys()
    assert record["long_sketch"]["size"] == 20000


def test_the_bare_loop_trains_as_the_run_does(tmp_path):
    job = jobs.Job("digits", versions=1, warm_up=1, epochs=3, clients=7, test_fraction=0.25)
    command, run = jobs.bare_command(job, tasks=5), job.run_config(tmp_path)
    told = dict(itertools.pairwise(command))
    for option, key in {
        "--dataset": "dataset",
        "--clients": "num-clients",
        "--epochs": "local-epochs",
        "--step": "step",
        "--test-fraction": "test-fraction",
    }.items():
        assert told[option] == str(run[key])


@pytest.mark.slow
@pytest.mark.engine
def test_engines(tmp_path):
    arguments = ["--datasets", "digits", "--versions", "2", "--steps", "eager", "--repeats", "1"]
    engines.main([*arguments, "--processes", "2", "--out", str(tmp_path)])
    _, record = results(tmp_path, "engines")
    runs = record["datasets"]["digits, eager"]["runs"]
    here = "local engine that trains in the server too"
    assert set(runs) == {
        *("bare loop, 2", "local engine, 2", "local engine, FedBuff, 2"),
        *(f"{here}, 2", f"{here}, FedBuff, 2"),
    }
    assert runs["local engine, 2"][0]["peak_memory"] > 0
    fedpsa, fedbuff = (runs[f"{here}{method}, 2"][0] for method in ("", ", FedBuff"))
    assert fedpsa["mean_sensitivity_seconds"]
    assert not fedbuff["mean_sensitivity_seconds"]


@pytest.mark.engine
def test_traffic(tmp_path):
    traffic.main(["--datasets", "digits", "--out", str(tmp_path)])
    _, record = results(tmp_path, "traffic")
    sizes = record["traffic"]["digits"]
    assert sizes["fedpsa, float16"]["up"] < 0.6 * sizes["fedpsa"]["up"]
    assert sizes["fedpsa"]["up"] > sizes["fedbuff"]["up"]


@pytest.mark.slow
@pytest.mark.engine
def test_superlink(tmp_path):
    arguments = ["--nodes", "1", "2", "--idle", "1", "--updates", "1", "2"]
    superlink.main([*arguments, "--out", str(tmp_path)])
    page, record = results(tmp_path, "superlink")
    assert [run["updates"] for run in record["runs"]] == [1, 2]
    assert record["runs"][1]["update_seconds"]["repeats"] == 2
    assert "One more idle node" in page


@pytest.mark.slow
@pytest.mark.engine
def test_cluster(tmp_path):
    cluster.main(["--cells", "2", "--days", "0.005", "--repeats", "1", "--out", str(tmp_path)])
    page, record = results(tmp_path, "cluster")
    assert record["cases"].keys() == cluster.CASES.keys()
    assert all(rate > 0 for runs in record["cases"].values() for rate, _ in runs)
    assert "two Ray nodes" in page


NODE_LOG = """\
\x1b[92mINFO {0}\x1b[0m:      Receiving: query message (ID: 1)
\x1b[92mINFO {0}\x1b[0m:      Sent successfully
\x1b[92mINFO {1}\x1b[0m:      Receiving: train message (ID: 2)
\x1b[92mINFO {2}\x1b[0m:      Start `flwr-clientapp` process
INFO :      fedpsa-node: started in 0.051 s as process 12
BENCHMARK {3} {4}
BENCHMARK END {5}
\x1b[92mINFO {6}\x1b[0m:      Sent successfully
"""


def test_the_large_model_is_as_large_as_it_says(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with large_model.the_task(1_000_000) as name:
        folder, _, rest = os.environ["PYTHONPATH"].partition(os.pathsep)
        monkeypatch.syspath_prepend(folder)
        model = importlib.import_module(name).make_model(0)
    monkeypatch.delitem(sys.modules, name)
    assert rest == os.environ["PYTHONPATH"] == "/elsewhere"
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == pytest.approx(1_000_000, rel=0.01)


def test_a_checkpoint_of_a_large_model_holds_it_once():
    found = large_model.measure_checkpoint(100_000)
    assert 400_000 < found["bytes"] < 410_000


@pytest.mark.slow
@pytest.mark.engine
def test_large_model(tmp_path):
    options = ["--parameters", "100000", "--updates", "2", "--formats", "float32", "int8"]
    large_model.main([*options, "--out", str(tmp_path)])
    page, data = results(tmp_path, "large_model")
    assert data["runs"]["int8"]["bytes_up"] < 0.3 * data["runs"]["float32"]["bytes_up"]
    assert {"SuperLink", "ServerApp"} < data["runs"]["float32"]["memory"].keys()
    assert "| int8 |" in page


def test_parts_of_an_update_are_read_from_a_nodes_log():
    begin = datetime(2026, 1, 2, 3, 4, 5)
    moments = [begin + timedelta(seconds=s) for s in (0, 2, 2.25, 2.5, 2.625, 3.625, 4.125)]
    stamps = [f"{m:%Y-%m-%d %H:%M:%S},{m.microsecond // 1000:03d}" for m in moments]
    stamps[3:6] = [m.timestamp() for m in moments[3:6]]
    events = [
        {"event": "dispatch", "sequence": 0, "wall": begin.timestamp() + 0.5},
        {"event": "upload", "sequence": 0, "node_id": 7, "wall": begin.timestamp() + 5},
    ]
    found = nodes.parts(NODE_LOG.format(*stamps), events, 7)
    assert {name: [round(x, 3) for x in values] for name, values in found.items()} == {
        "node asks for work": [1.51],
        "start": [0.25],
        "message and bundle": [0.25],
        "import of the app": [0.125],
        "training": [1.0],
        "way back": [0.5],
        "hand-over and fork": [0.051],
        "own part": [0.176],
    }
    assert not nodes.parts(NODE_LOG.format(*stamps), events, 8)


@pytest.mark.slow
@pytest.mark.engine
def test_nodes(tmp_path):
    arguments = ["--datasets", "digits", "--nodes", "1", "--updates", "2", "--rounds", "1"]
    nodes.main([*arguments, "--out", str(tmp_path)])
    page, record = results(tmp_path, "nodes")
    assert len(record["digits"]["warm"]["models"]) == 1
    assert record["digits"]["warm"]["models"] == record["digits"]["ordinary"]["models"]
    assert "Ratio of the medians" in page


@pytest.mark.slow
@pytest.mark.engine
def test_queued(tmp_path):
    queued.main(["--updates", "8", "--repeats", "1", "--out", str(tmp_path)])
    page, record = results(tmp_path, "queued")
    assert set(record["runs"]) == {"0", "1"}
    assert record["runs"]["1"][0]["staleness"] > record["runs"]["0"][0]["staleness"]
    assert "uploads a minute" in page
