"""What experiments consist of, and how cells are run, without training anything."""

import json
from pathlib import Path

import pytest

from fedpsa_strategy.server.checkpoint import CheckpointStore
from server_app.run_dir import RunDir
from server_app.settings import Settings
from simulation import cli
from simulation.experiments import processes as in_processes
from simulation.experiments import scheduler as scheduling
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.cells import CONTROL, METHODS
from simulation.experiments.choices import command_text, read_options
from simulation.experiments.display import LiveDisplay, PlainDisplay
from simulation.experiments.estimate import expected_seconds, expected_uploads, in_words
from simulation.experiments.numbers import (
    Estimate,
    binned,
    correlation,
    interpolated,
)
from simulation.experiments.options import Options
from simulation.experiments.processes import launch_command
from simulation.experiments.rows import kappa_pairs, version_gaps
from simulation.experiments.scheduler import Scheduler, State
from simulation.experiments.store import CellStore
from simulation.experiments.watch import Watch
from support import commands

PLACE = {"method": "FedPSA", "dataset": "digits", "alpha": 0.5, "seed": 3}


def cell(method="FedPSA", days=1.0, **config):
    named = {key.replace("_", "-"): value for key, value in config.items()}
    options = Options(days=days, extra=named)
    return options.cell({**PLACE, "method": method}, METHODS[method])


def parsed(*arguments):
    return commands.parsed(arguments)


# --- Cells -------------------------------------------------------------------------------------


def test_an_id_depends_on_what_decides_the_outcome_alone():
    assert cell().id == cell().id
    assert cell().id != cell("FedBuff").id != cell(CONTROL).id
    assert cell(gamma=3.0).id != cell().id
    assert cell(days=2.0).id != cell().id
    # What another method reads, and where things are, does not matter.
    assert cell("FedBuff", gamma=3.0, mixing=0.1).id == cell("FedBuff").id
    assert cell(data_dir="/elsewhere", reply_timeout=5.0, status_interval=1.0).id == cell().id
    assert cell(checkpoint_seconds=1.0, min_nodes=2).id == cell().id


def test_the_buffer_matters_where_the_decay_counts_in_units_of_it():
    def made(buffer, per):
        options = Options(days=1.0, extra={"buffer-size": buffer}, lr_decay_per=per)
        return options.cell(PLACE, METHODS["FedAvg"]).id

    assert made(5, "version") == made(7, "version")
    assert made(5, "upload") != made(7, "upload")


def test_an_id_is_what_it_was_when_finished_runs_were_made():
    """If this fails, all finished runs become strangers: is that meant? See `_FORMAT`."""
    assert cell(lr=0.01, batch_size=64).id == "71f401a42f05"
    assert cell(CONTROL, lr=0.01, batch_size=64).id == "93bf34562e05"
    assert cell(lr=0.01).id != cell().id
    # Not looked at where tests are made by the clock.
    assert cell(evaluate_every=3).id == cell().id


def test_a_cell_is_launched_with_what_matters_to_it():
    made = cell("FedBuff", gamma=3.0, data_dir="/elsewhere", lr=0.1)
    assert made.run_config == {
        "strategy": "fedbuff",
        "seed": 3,
        "lr": 0.1,
        "batch-size": 16,
        "virtual-days": 1.0,
        "evaluate-interval": 2160.0,
        "data-dir": "/elsewhere",
    }
    command = launch_command(made, Path("/cells/x"), "local", 2, resumed=True)
    arguments = parsed(*command[3:])
    assert (arguments.engine, arguments.workers, arguments.quiet) == ("local", 0, True)
    assert arguments.run_dir == Path("/cells/x")
    settings = dict(arguments.settings)
    assert settings["resume"] == '"true"'
    assert settings["data-dir"] == '"/elsewhere"'
    config = cli.build_run_config(arguments, Settings().to_run_config(), None)
    assert Settings.from_run_config(config).lr == 0.1
    command = launch_command(made, Path("/cells/x"), "ray", 1, resumed=False)
    assert parsed(*command[3:]).cpus >= 1


def test_sketch_and_calibration_follow_the_seed_unless_they_are_set():
    assert (cell().settings.sketch_seed, cell().settings.calibration_seed) == (3, 3)
    assert cell(sketch_seed=8).settings.sketch_seed == 8


def test_what_an_experiment_varies_cannot_be_set_for_all():
    with pytest.raises(ValueError, match="gamma cannot be set for all runs"):
        EXPERIMENTS["figure-hyper"].cells(Options(extra={"gamma": 1.0}))
    with pytest.raises(ValueError, match="seed cannot be set"):
        cell(seed=4)
    with pytest.raises(ValueError, match="run-dir cannot be set"):
        cell(run_dir="/x")


# --- Experiments -------------------------------------------------------------------------------


def ids(name, **choices):
    return {made.id for made in EXPERIMENTS[name].cells(Options(**choices))}


def test_experiments_share_runs():
    accuracy = ids("table-accuracy")
    assert accuracy == ids("table-aulc") == ids("figure-curves")
    assert ids("figure-overhead") < accuracy
    assert ids("figure-hyper") & accuracy  # through the paper's own values
    assert ids("table-ablation") & accuracy
    assert ids("table-heterogeneity") & accuracy


def test_experiments_have_the_papers_cells():
    assert len(ids("table-accuracy", datasets=("mnist",), seeds=(0,))) == len(METHODS) * 3
    # FedPAC needs an encoder.
    assert len(ids("table-accuracy", datasets=("fmnist",), seeds=(0,))) == (len(METHODS) - 1) * 3
    assert len(ids("table-heterogeneity", seeds=(0,))) == 4 * 6
    assert len(ids("table-ablation", seeds=(0,))) == 5 * 2 * 3
    assert len(ids("table-calibration", seeds=(0,))) == 2 * (2 * 4 + 1)
    without_control = ("figure-kappa", "table-midpoint-parts", "table-midpoint-robust")
    for experiment in EXPERIMENTS.values():
        methods = {made.labels["method"] for made in experiment.cells(Options())}
        assert CONTROL in methods or experiment.name in without_control


def test_options_narrow_an_experiment():
    options = read_options(
        parsed("reproduce", "table-accuracy", "--datasets", "digits,mnist", "--alphas", "0.3")
    )
    assert len(EXPERIMENTS["table-accuracy"].cells(options)) == 2 * len(METHODS) * 3
    arguments = parsed(
        *("reproduce", "table-accuracy", "--methods", "fedpsa,uniform,fedac", "--seeds", "0,4-6"),
        *("--days", "0.5", "--set", "lr=1", "--set", "data-dir=/here", "--lr-decay-per", "upload"),
    )
    options = read_options(arguments)
    assert options.methods == ("FedPSA", CONTROL, "FedAC weights")
    assert options.seeds == (0, 4, 5, 6)
    assert options.extra == {"lr": 1.0, "data-dir": "/here"}
    assert command_text("table-accuracy", arguments) == (
        "python -m simulation reproduce table-accuracy --datasets fmnist"
        " --methods fedpsa,uniform,fedac"
        " --seeds 0,4,5,6 --days 0.5 --lr-decay-per upload --set lr=1"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["table-accuracy", "--methods", "fedsgd"], "no method 'fedsgd'; there are FedPSA"),
        (["table-accuracy", "--datasets", "imagenet"], "no dataset 'imagenet'"),
        (["table-accuracy", "--datasets", "no.such:task"], "no module 'no.such'"),
        (["table-accuracy", "--datasets", "task"], "'task' is a package of this repository"),
        (["table-accuracy", "--datasets", "json"], "lacks the functions"),
        (["table-accuracy", "--set", "task=json"], "task cannot be set for all runs"),
        (["table-acuracy"], "Did you mean table-accuracy?"),
        (["table-accuracy", "--set", "lrr=1"], "did you mean lr?"),
        (["table-accuracy", "--set", "lr=-1"], "lr = -1.0: must be above 0"),
        (["figure-kappa", "--methods", "FedPSA"], "no use for --methods"),
        (["table-accuracy", "--methods", "FedPAC"], "nothing to run"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(arguments, text, tmp_path, capsys):
    places = ["--cells", str(tmp_path / "cells"), "--out", str(tmp_path / "out")]
    assert cli.main(["reproduce", *arguments, *places]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_list_has_a_line_for_each(tmp_path, capsys):
    choices = ["--seeds", "0", "--set", "gamma=1", "--cells", str(tmp_path), "--jobs", "2"]
    assert cli.main(["list", *choices]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines[1:], EXPERIMENTS, strict=False):
        assert line.startswith(name)
    assert lines[1].split()[1:3] == [str((len(METHODS) - 1) * 3), "0"]
    assert "gamma cannot be set" in next(line for line in lines if line.startswith("figure-hyper"))


def test_uploads_are_estimated_from_response_times():
    constant = cell(latency="constant", latency_max=100)
    assert expected_uploads(constant) == pytest.approx(864 * 10)
    assert expected_uploads(cell("FedAvg", latency="constant", latency_max=100)) == 864 * 10
    # FLGo, with the paper's setting and one seed: 2,975 a day; the law's own mean is above.
    assert 2900 < expected_uploads(cell()) < 3900
    assert expected_uploads(cell(latency="long-tail")) > 5 * expected_uploads(cell())
    faster = expected_seconds(cell(), {"digits": 1e-6})
    assert faster < expected_seconds(cell(), {"digits": 1.0})
    assert [in_words(s) for s in (5, 600, 36_000, 864_000)] == [
        "5 s",
        "10 min",
        "10.0 h",
        "10.0 days",
    ]


# --- Numbers -----------------------------------------------------------------------------------


def test_correlations_by_hand():
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert correlation([1, 2, 3], [1, 10, 100], ranked=True) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 2, 1], ranked=True) == pytest.approx(-1)
    # Ranks 2, 3.5, 3.5, 1 against 1, 2, 3, 4: a covariance of -1.5 by √(4.5 · 5).
    assert correlation([10, 20, 20, 5], [1, 2, 3, 4], ranked=True) == pytest.approx(-0.3162277660)
    assert correlation([1, 1], [1, 2]) is None
    assert correlation([], []) is None


def test_bins_are_a_tenth_wide():
    pairs = [(0.3, 1.0), (0.39, 3.0), (0.4, 5.0), (-0.05, 7.0), (1.0, 9.0), (0.95, 11.0)]
    assert binned(pairs) == [(-0.05, 7, 1), (0.35, 2, 2), (0.45, 5, 1), (0.95, 10, 2)]


def test_curves_are_read_between_their_points():
    curve = [(0.0, 0.0), (1.0, 0.5), (3.0, 0.7)]
    assert [interpolated(curve, x) for x in (-1, 0.5, 2, 9)] == pytest.approx([0, 0.25, 0.6, 0.7])


def test_differences_are_taken_seed_by_seed():
    gap = Estimate({0: 5.0, 1: 7.0, 2: 9.0}).minus(Estimate({1: 6.0, 0: 4.0}))
    assert gap.by_seed == {0: 1.0, 1: 1.0}
    assert gap.deviation == 0


def upload(time, gap, kappa, align=None):
    metrics = {} if align is None else {"align": align}
    return {"time": time, "staleness": gap, "metrics": metrics, "report": {"kappa": kappa}}


def test_what_figures_need_of_uploads():
    uploads = [
        upload(10, 0, 0.9, 0.5),
        upload(20, 2, 0.5),
        upload(30, 2, 0.7, 0.1),
        upload(50, 0, 0.1),
        upload(90, 1, 0.25),
        upload(95, 1, None, 0.3),
    ]
    assert kappa_pairs(uploads) == [[0.9, 0.5], [0.7, 0.1]]
    assert version_gaps(uploads, 100.0) == {
        "early": [[0, 1, 0.9, 0.0], [2, 2, 0.6, 0.1]],
        "late": [[1, 1, 0.25, 0.0]],
    }


# --- Store and scheduler -----------------------------------------------------------------------


def write_summary(store, made, status, **more):
    summary = {"status": status, "settings": made.settings.to_run_config(), **more}
    store.path(made).mkdir(parents=True, exist_ok=True)
    (store.path(made) / "summary.json").write_text(json.dumps(summary))


def leave_half(store, made, **changed):
    """Leave the folder of an interrupted run."""
    import tomli_w

    path = store.path(made)
    CheckpointStore(path / "checkpoints").save(1, {"version": 1})
    (path / "events.jsonl").write_text("{}\n")
    config = made.settings.to_run_config() | changed
    (path / "config.toml").write_text(tomli_w.dumps(config))


def test_only_completed_runs_with_these_settings_count(tmp_path):
    store, made = CellStore(tmp_path), cell()
    assert store.finished(made) is None
    for status in ("failed", "stopped"):
        write_summary(store, made, status)
        assert store.finished(made) is None
    write_summary(store, made, "completed", uploads_per_second=4.0)
    assert store.finished(made) is not None
    assert store.rates([made, made, cell("FedBuff")]) == {"digits": [4.0]}
    settings = made.settings.to_run_config()
    # A default that was another one when the run was made is noticed; a key it lacked is not one.
    write_summary(store, made, "completed", settings=settings | {"hinge-slope": 1.0, "gamma": 5.0})
    assert store.finished(made) is not None
    write_summary(store, made, "completed", settings=settings | {"gamma": 4.0})
    assert store.finished(made) is None
    del settings["alignment-every"]
    write_summary(store, made, "completed", settings=settings)
    assert store.finished(made) is not None
    (store.path(made) / "summary.json").write_text("{ damaged")
    assert store.finished(made) is None


def test_a_run_goes_on_only_from_a_checkpoint_that_fits(tmp_path):
    store, made = CellStore(tmp_path), cell()
    assert store.prepare(made, {"cpu": "x"}) is False
    assert store.circumstances(made)["cpu"] == "x"
    leave_half(store, made)
    write_summary(store, made, "stopped")
    assert store.prepare(made, {}) is True
    assert not (store.path(made) / "summary.json").exists()
    assert (store.path(made) / "checkpoints").exists()
    # Its checkpoints are damaged: from the beginning.
    (checkpoint,) = store.path(made).glob("checkpoints/*.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert store.prepare(made, {}) is False
    assert not (store.path(made) / "events.jsonl").exists()
    # Another version of the program had another setting.
    leave_half(store, made, lr=0.5)
    assert store.prepare(made, {}) is False
    # It never came to a checkpoint.
    (store.path(made) / "events.jsonl").write_text("{}\n")
    assert store.prepare(made, {}) is False


def test_a_cell_is_run_by_one_command_at_a_time(tmp_path):
    store, made = CellStore(tmp_path), cell()
    with store.reserved(made) as ours:
        assert ours
        with CellStore(tmp_path).reserved(made) as theirs:
            assert not theirs
    with store.reserved(made) as again:
        assert again
    # Its command was killed, but not yet the run.
    with RunDir(store.path(made)), store.reserved(made) as free:
        assert not free
    with store.reserved(made) as again:
        assert again


class Recorder(PlainDisplay):
    def __init__(self):
        self.lines = []
        super().__init__(self.lines.append)


WORK = """
import json, sys, pathlib
path, settings, what = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if what == "die":
    sys.exit("a last word")
status = "completed" if what == "work" else "failed"
summary = {"status": status, "settings": settings, "accuracy": 0.5, "error": "ValueError: bad"}
(path / "summary.json").write_text(json.dumps(summary))
sys.exit(0 if what == "work" else 1)
"""


def test_failures_are_reported_and_do_not_stop_the_others(tmp_path, monkeypatch):
    import sys

    behaviours = {"FedPSA": "die", "FedBuff": "work", "FedAvg": "fail", CONTROL: "work"}
    cells = [cell(method) for method in behaviours]

    def command(made, path, *_):
        settings = json.dumps(made.settings.to_run_config())
        what = behaviours[str(made.labels["method"])]
        return [sys.executable, "-c", WORK, str(path), settings, what]

    monkeypatch.setattr(in_processes, "launch_command", command)
    monkeypatch.setattr(scheduling, "_PAUSE", 0.02)
    store, display = CellStore(tmp_path), Recorder()
    write_summary(store, cells[3], "completed", accuracy=0.7)
    scheduler = Scheduler([*cells, cells[1]], store)
    assert (scheduler.state.total, scheduler.state.done) == (4, 1)
    with in_processes.processes(store, jobs=2, engine="local") as place:
        failures = scheduler.run(place, display)
    assert failures == {cells[0].id: "a last word", cells[2].id: "ValueError: bad"}
    assert scheduler.state.done == 2
    text = "\n".join(display.lines)
    assert "failed    FedAvg · digits · α 0.5 · seed 3" in text
    assert "finished  FedBuff · digits · α 0.5 · seed 3: 50.00 % (2 of 4)" in text
    assert not any("Uniform" in line for line in display.lines)


class FakeTime:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_run_is_watched_through_its_events(tmp_path):
    path, clock = tmp_path / "events.jsonl", FakeTime()
    watch = Watch(path, 2.0, clock)
    watch.look()
    assert (watch.day, watch.uploads_per_second, watch.seconds_left) == (0.0, None, None)

    def write(*events):
        with path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def happened(kind, day, **more):
        return {"event": kind, "time": 86_400 * day, **more}

    def upload(day):
        numbers = ("sequence", "client", "node_id", "version", "staleness", "num_bytes")
        numbers += ("num_examples", "squared_norm")
        return happened("upload", day, **dict.fromkeys(numbers, 1))

    where = {"version": 0, "uploads": 0, "where": "server"}
    evaluated = happened("evaluate", 0.0, metrics={"accuracy": 0.1}, **where)
    write(evaluated, upload(0.5))
    clock.now = 10.0
    watch.look()
    assert (watch.day, watch.run.uploads, watch.share) == (0.5, 1, 0.25)
    assert watch.run.accuracy == 0.1
    write(upload(0.75), upload(1.0))
    clock.now = 14.0
    watch.look()
    assert watch.uploads_per_second == pytest.approx(0.5)
    assert watch.seconds_left == pytest.approx(8.0)
    path.unlink()  # it went on from a checkpoint
    write(evaluated, upload(0.25))
    watch.look()
    assert (watch.run.uploads, watch.day) == (1, 0.25)
    with path.open("ab") as file:  # damage is passed over
        file.write(b'{"event": "evaluate", "time": 8}\n' + json.dumps(upload(0.5)).encode())
        file.write(b"\n{\n\0\0\n")
    watch.look()
    assert (watch.run.accuracy, watch.day) == (0.1, 0.5)


def test_the_displays_show_where_things_are(tmp_path):
    from rich.console import Console

    made = cell()
    running = type("Running", (), {"cell": made, "resumed": True})()
    running.watch = Watch(tmp_path / "none", 2.0)
    running.watch.run.time, running.watch.run.accuracy = 43_200.0, 0.123
    state = State(total=5, done=2, failed={"x": "y"}, running=[running], seconds_left=7200.0)
    console = Console(width=120, record=True)
    console.print(LiveDisplay("table").render(state))
    text = console.export_text()
    for part in ("2 of 5 cells, 1 failed", "about 2.0 h left", "0.500 / 2", "12.30 %", "FedPSA"):
        assert part in text
    clock, lines = FakeTime(), []
    plain = PlainDisplay(lines.append, clock)
    plain.started(running)
    plain.update(state)
    clock.now = 60.0
    plain.update(state)
    assert lines[0].startswith("continued")
    assert lines[1] == "2 of 5 done, 1 failed, about 2.0 h left"
    assert "day 0.500 of 2, 12.30 %" in lines[2]
