"""Tables, figures and the report, made from runs that never took place."""

import json
import math
import random
import re
import shutil
from html.parser import HTMLParser

import pytest

from fedpsa_strategy.server.clock import DAY
from simulation import cli
from simulation.errors import RunFailed
from simulation.experiments import bodies, paper
from simulation.experiments.caption import scale_text, seeds_text, short_caption
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.cells import CONTROL, METHODS
from simulation.experiments.html import inline_svg, to_html
from simulation.experiments.numbers import Estimate
from simulation.experiments.options import Options
from simulation.experiments.report import write_report
from simulation.experiments.results import write_results
from simulation.experiments.rows import (
    Row,
    from_lines,
    kappa_stages,
    late_mean,
    make_row,
    recorded_rows,
    thinned,
    to_lines,
)
from simulation.experiments.store import CellStore
from simulation.experiments.tables import Pivot, pivot_tables, reading


def finish(cell, store, accuracy=None):
    """Write the folder of a run that could have been."""
    chance = random.Random(f"{cell.id}")
    settings = cell.settings
    fedpsa = settings.strategy == "fedpsa"
    level = {"fedpsa": 0.83, "fedbuff": 0.82, "ca2fl": 0.81}.get(settings.strategy, 0.78)
    final = accuracy if accuracy is not None else level + chance.gauss(0, 0.01)
    store.prepare(cell, {"cpu": "Abacus 1", "cores": 3, "engine": "local", "side_by_side": 2})
    folder, end = store.path(cell), settings.virtual_days * DAY
    lines = []
    for step in range(41):
        time = end * step / 40
        value = final * (1 - math.exp(-6 * step / 40)) / (1 - math.exp(-6))
        metrics = {"loss": 1.0, "accuracy": value + (chance.gauss(0, 0.01) if step < 40 else 0)}
        now = {"time": time, "version": step, "uploads": step}
        lines.append({"event": "evaluate", **now, "where": "server", "metrics": metrics})
        for _ in range(20 if fedpsa else 1):
            gap = min(int(chance.expovariate(0.08)), 120)
            kappa = max(-1.0, min(1.0, 0.95 - 0.004 * gap * (1 + step / 40) + chance.gauss(0, 0.1)))
            metrics = {"train-seconds": 0.04, "align": 0.5 * kappa + chance.gauss(0.2, 0.2)}
            lines.append(
                {
                    "event": "upload",
                    "time": time,
                    **dict.fromkeys(("sequence", "client", "node_id", "version"), 0),
                    **dict.fromkeys(("num_examples", "squared_norm", "num_bytes"), 1),
                    "staleness": gap,
                    "metrics": metrics if settings.alignment_every else {"train-seconds": 0.04},
                    "report": {"kappa": kappa} if fedpsa else {},
                }
            )
        report = {"effective_number": 5.0}  # whatever a method has beside this
        if fedpsa:
            kappas = [line["report"]["kappa"] for line in lines[-5:]]
            report = {"kappas": kappas, "temperature": 1.5, "effective_number": 4.9}
        lines.append({"event": "aggregate", **now, "report": report})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text)
    summary = {
        "status": "completed",
        "settings": settings.to_run_config(),
        "accuracy": final,
        "best_accuracy": final + 0.01,
        "area_under_curve": 0.8 * final * settings.virtual_days,
        "versions": 600,
        "uploads": 3000,
        "rejected": 0,
        "mean_kappa": 0.9 if fedpsa else None,
        "mean_staleness": 1.8,
        "mean_effective_number": 4.9 if fedpsa else 5.0,
        "bytes_up": 3000 * 32_000,
        "bytes_down": 3010 * 33_000,
        "server_seconds": 3.0 * (2.5 if fedpsa else 1.0),
        "mean_train_seconds": 0.041,
        "mean_sensitivity_seconds": 0.004 if fedpsa else None,
        "uploads_per_second": 20.0,
        "model_sha256": "0" * 64,
        "packages": {"flwr": "1.0", "torch": "2.0"},
        "python": "3.11.0",
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def finish_all(name, options, store):
    cells = EXPERIMENTS[name].cells(options)
    for cell in {cell.id: cell for cell in cells}.values():
        finish(cell, store)
    return cells


def row(method, alpha, seed, accuracy, **more):
    """Return a row of a table of accuracies; None: the run failed."""
    labels = {"method": method, "dataset": "fmnist", "alpha": alpha, "seed": seed}
    scale = {"days": 10.0, "clients": 50, "partition": "client-dirichlet", "lr": 0.01}
    scale |= {"local_epochs": 5, "batch_size": 64, "lr_decay_per": "version"}
    if accuracy is None:
        return Row(labels, f"{method}{alpha}{seed}", "failed", reason="no luck", scale=scale)
    numbers = {"accuracy": accuracy, "late_accuracy": accuracy, **more}
    return Row(labels, f"{method}{alpha}{seed}", "completed", scale=scale, numbers=numbers)


ACCURACIES = Pivot(("dataset",), "method", "alpha", paper.accuracy)


def lines_of(text, start):
    return [
        [part.strip() for part in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {start}")
    ]


def test_a_table_by_hand():
    rows = [
        row("FedPSA", 0.1, 0, 0.84, mean_kappa=0.9, mean_effective_number=4.8),
        row("FedPSA", 0.1, 1, 0.86, mean_kappa=0.7, mean_effective_number=4.6),
        row("FedFa", 0.1, 0, 0.80),
        row("FedFa", 0.1, 1, None),
        row(CONTROL, 0.1, 0, 0.83),
        row(CONTROL, 0.1, 1, 0.85),
    ]
    text = pivot_tables(rows, ACCURACIES)
    fedpsa, against, behind = lines_of(text, "FedPSA")
    # The paper: 83.84 for FedPSA and 82.19 for FedFa.
    assert fedpsa == ["FedPSA", "**85.00 ± 1.41**", "83.84", "+1.16"]
    assert against == ["FedPSA", "+1.00 ± 0.00"]
    assert behind[:5] == ["FedPSA, α = 0.1", "2", "85.00 ± 1.41", "4.70", "0.800"]
    assert lines_of(text, "FedFa")[:2] == [
        ["FedFa", "80.00 (1 of 2)", "82.19", "−2.19"],
        ["FedFa", "−3.00"],
    ]
    assert lines_of(text, CONTROL)[0] == [CONTROL, "84.00 ± 1.41", "–", "–"]
    assert "above Uniform in 1 of 1 columns" in text


def test_what_failed_or_is_missing_is_said():
    rows = [row("FedPSA", 0.5, 0, None), row(CONTROL, 0.5, 0, 0.8)]
    text = pivot_tables(rows, ACCURACIES)
    assert lines_of(text, "FedPSA")[0] == ["FedPSA", "failed", "83.93", "–"]
    assert "no pair of FedPSA and Uniform" in text


def test_words_about_the_control_are_careful():
    one = [row("FedPSA", 0.1, 0, 0.84), row(CONTROL, 0.1, 0, 0.83)]
    assert "above Uniform in 1 of 1" in reading(one, ACCURACIES)
    assert "one seed is not enough" in reading(one, ACCURACIES)
    same = [row("FedPSA", 0.1, 0, 0.830_04), row(CONTROL, 0.1, 0, 0.83)]
    assert "above Uniform in 0 of 1" in reading(same, ACCURACIES)
    values = {"FedPSA": (0.84, 0.86, 0.85), CONTROL: (0.85, 0.84, 0.86)}
    noisy = [row(m, 0.1, s, v) for m, found in values.items() for s, v in enumerate(found)]
    assert reading(noisy, ACCURACIES).endswith("it is above in 0 and below in 0.")
    clear = [row("FedPSA", 0.1, s, 0.80 + s / 1000) for s in range(3)]
    clear += [row(CONTROL, 0.1, s, 0.83) for s in range(3)]
    assert reading(clear, ACCURACIES).endswith("it is above in 0 and below in 1.")


def test_areas_of_shorter_runs_stand_alone():
    pivot = Pivot(
        ("dataset",),
        "method",
        "alpha",
        paper.area,
        number="area_under_curve",
        factor=1.0,
        decimals=3,
        grows=True,
    )
    whole = row("FedPSA", 0.1, 0, 0.6, area_under_curve=5.5)
    labels = {**whole.labels, "dataset": "cifar10"}
    whole = Row(**{**vars(whole), "labels": labels})
    short = Row(**{**vars(whole), "scale": {**whole.scale, "days": 1.0}})
    line = lines_of(pivot_tables([whole], pivot), "FedPSA")[0]
    assert line == ["FedPSA", "5.500", "5.859", "−0.359"]
    assert lines_of(pivot_tables([short], pivot), "FedPSA")[0] == ["FedPSA", "5.500"]


def test_the_papers_numbers_are_found():
    place = {"dataset": "cifar10", "alpha": 0.1}
    assert paper.accuracy({"method": "FedPSA", **place}) == 61.83
    assert paper.accuracy({"method": "FedPAC", "dataset": "fmnist", "alpha": 0.1}) is None
    assert paper.accuracy({"method": "FedPSA", "dataset": "digits", "alpha": 0.1}) is None
    assert paper.area({"method": "CA2FL", **place}) == 5.424
    assert paper.ablation({"variant": "without T", "concurrency": 0.2, **place}) == 56.9
    assert paper.calibration({"batch": "gaussian", "size": 128, **place}) == 63.24
    labels = {"method": "FedBuff", "dataset": "cifar100", "times": "long-tail 50-2500"}
    assert paper.heterogeneity(labels) == 29.89
    assert paper.heterogeneity({**labels, "dataset": "fmnist"}) is None
    assert paper.correlation("binned", "spearman") == 0.6833


def test_curves_are_thinned_and_their_end_is_averaged():
    curve = [(float(i), i / 100) for i in range(101)]
    few = thinned(curve, 11)
    assert (few[0], few[-1], len(few)) == (curve[0], curve[-1], 11)
    assert late_mean(curve) == pytest.approx(0.95)
    assert late_mean([(0.0, 0.1), (10.0, 0.5)]) == 0.5
    assert late_mean([]) is None


def test_rows_keep_what_a_run_left(tmp_path):
    store = CellStore(tmp_path)
    (cell, *_) = EXPERIMENTS["figure-kappa"].cells(Options(seeds=(0,), days=1.0))
    assert make_row(cell, store).status == "missing"
    assert make_row(cell, store, "on fire").reason == "on fire"
    finish(cell, store, accuracy=0.5)
    made = make_row(cell, store, series="pairs")
    assert made.number("accuracy") == 0.5
    assert made.curve[-1] == [1.0, 0.5]
    assert made.machine["cpu"] == "Abacus 1"
    assert len(made.series["pairs"]) == 41 * 20
    assert sum(stage[0] for stage in made.series["stages"]) == 41 * 5
    assert from_lines(to_lines([made])) == [made]


def test_stages_by_hand():
    def aggregate(time, kappas, temperature):
        report = {"kappas": kappas, "temperature": temperature, "effective_number": 2.0}
        return {"time": time, "report": report}

    events = [
        aggregate(1.0, [0.2, 0.4], None),
        aggregate(10.0, [0.9], None),
        aggregate(50.0, [0.5, 0.7], 3.0),
        aggregate(60.0, [0.6, 0.6], 4.0),
        aggregate(100.0, [1.0], 1.0),
    ]
    first, second, third, last = kappa_stages(events, 100.0)
    assert first == [3, 0.5, pytest.approx(0.2944, abs=1e-4), 0.2, 0.9, None, 2.0]
    assert second == [0, None, None, None, None, None, None]
    assert third == [4, 0.6, pytest.approx(0.0707, abs=1e-4), 0.5, 0.7, 3.5, 2.0]
    assert last == [1, 1.0, 0.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_table_and_a_figure(name, tmp_path):
    store = CellStore(tmp_path / "cells")
    less = {"model": "mlp"} if name == "table-midpoint-robust" else {}
    options = Options(seeds=(0, 1), days=1.0, alphas=(0.1,), extra=less)
    cells = finish_all(name, options, store)
    experiment = EXPERIMENTS[name]
    folder = write_results(experiment, cells, store, tmp_path, command="make it", failures={})
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["cells.jsonl", "figure.png", "figure.svg", "table.md"]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    table = (folder / "table.md").read_text()
    for part in (
        "1 virtual day of",
        "50 clients",
        "2 seeds (0, 1)",
        "Abacus 1, 3 cores",
        "`make it`",
    ):
        assert part in table
    if "midpoint" in name or name == "table-sharpness":
        assert "minus it: area" in table
        return
    if name != "figure-kappa":
        assert CONTROL in table
    if name.startswith("table"):
        assert "effective number" in table
        assert "mean κ" in table


@pytest.mark.parametrize("name", ["table-aulc", "figure-kappa"])
def test_the_same_cells_give_the_same_bytes(name, tmp_path):
    store = CellStore(tmp_path / "cells")
    cells = finish_all(name, Options(seeds=(0,), days=1.0, alphas=(0.1,)), store)
    written = []
    for out in (tmp_path / "once", tmp_path / "again"):
        folder = write_results(EXPERIMENTS[name], cells, store, out, command="x", failures={})
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["table-accuracy", *(n for n in EXPERIMENTS if "figure" in n)])
def test_what_is_not_complete_is_shown_as_far_as_it_is(name, tmp_path):
    store, experiment = CellStore(tmp_path / "cells"), EXPERIMENTS[name]
    cells = experiment.cells(Options(seeds=(0,), days=1.0, alphas=(0.1,)))
    failures = {cells[0].id: "it\nbroke"}
    folder = write_results(experiment, cells, store, tmp_path, command="x", failures=failures)
    table = (folder / "table.md").read_text()
    assert "0 of " in table
    assert f"- `{cells[0].id}`: it broke" in table


def test_correlations_of_made_up_pairs_are_in_the_table(tmp_path):
    labels = {"method": "FedPSA", "dataset": "digits", "alpha": 0.1, "seed": 0}
    pairs = [[0.05, 0.1], [0.15, 0.2], [0.25, 0.3]]
    scale = {"days": 1.0}
    made = Row(labels, "id", "completed", scale=scale, series={"pairs": pairs})
    text = bodies.kappa([made])
    assert lines_of(text, "Pearson, single uploads")[0][1:] == ["1.000", "0.191", "+0.809"]
    assert lines_of(text, "Spearman, bins")[0][1:] == ["1.000", "0.683", "+0.317"]
    assert lines_of(text, "0.1 to 0.2")[0][1:] == ["1", "0.200"]
    few = Row(labels, "id", "completed", scale=scale, series={"pairs": pairs[:2]})
    assert lines_of(bodies.kappa([few]), "Pearson, bins")[0][1:] == ["–", "0.762", "–"]


class Checker(HTMLParser):
    """Complains about elements that are not closed, and ids that occur twice."""

    empty = frozenset({"meta", "br", "img", "link"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.ids = set()
        self.texts = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.empty:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag, attrs):
        self._attributes(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def _attributes(self, attrs):
        for key, value in attrs:
            if key == "id":
                assert value not in self.ids
                self.ids.add(value)
            if key in ("href", "src", "xlink:href"):
                self.links.append(value)


def test_the_report_is_one_valid_page_with_everything_in_it(tmp_path):
    out = tmp_path / "results"
    with pytest.raises(RunFailed, match="no results"):
        write_report(out)
    store = CellStore(tmp_path / "cells")
    for name in ("table-accuracy", "figure-kappa"):
        cells = finish_all(name, Options(seeds=(0,), days=1.0), store)
        write_results(EXPERIMENTS[name], cells, store, out, command="x < y", failures={})
        write_results(EXPERIMENTS[name], cells, store, out, command="z", failures={}, label="again")
    (out / "figure-kappa" / "figure.svg").unlink()
    assert cli.main(["report", "--out", str(out)]) == 0
    page = (out / "index.html").read_text()
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    text = " ".join(" ".join(checker.texts).split())
    assert "0 of 4 tables and figures" in text
    assert "1 seed (0)" in text
    assert "x < y" in text
    assert "Final accuracy (again)" in text
    assert {"table-accuracy", "table-accuracy-again", "figure-kappa-again"} <= checker.ids
    number = lines_of((out / "table-accuracy" / "table.md").read_text(), "FedAvg")[0][1]
    assert f"<td>FedAvg</td>\n<td>{number}</td>" in page
    # Nothing is loaded from elsewhere, and what is linked to is there.
    for link in checker.links:
        assert link.startswith(("#", "data:image/png")), link
        if link.startswith("#"):
            assert link[1:] in checker.ids, link


def test_markdown_is_escaped():
    html = to_html(
        "# left out\n\n## A & B\n\n**bold** `<code>`\n\n| a | b |\n|---|---:|\n| <i> | 1 ± 2 |"
    )
    assert "left out" not in html
    assert "<h3>A &amp; B</h3>" in html
    assert "<strong>bold</strong> <code>&lt;code&gt;</code>" in html
    assert '<td>&lt;i&gt;</td>\n<td>1 <span class="deviation">± 2</span></td>' in html


def test_a_command_on_the_page_can_be_copied():
    html = to_html("the paper's `--set 'a=b'`")
    assert html == "<p>the paper’s <code>--set 'a=b'</code></p>\n"


def test_columns_of_the_paper_stand_back_and_details_are_folded():
    html = to_html(
        "### One\n\n| a | paper |\n|---|---:|\n| x | 1 |\n\n"
        "### Behind the numbers\n\n| a | b |\n|---|---:|\n| **1 ± 2** | y |\n\nafter"
    )
    assert "<h4>One</h4>" in html
    assert '<th class="beside">paper</th>' in html
    assert '<td class="beside">1</td>' in html
    folded = re.search("<details><summary>Behind the numbers</summary>(.*)</details>", html, re.S)
    assert folded is not None
    assert '<strong>1 <span class="deviation">± 2</span></strong>' in folded[1]
    assert html.endswith("</div></details>\n<p>after</p>\n")
    assert html.count('<div class="scroll"><table>') == 2


def test_figures_share_a_page_without_sharing_ids():
    svg = (
        '<?xml?><svg width="10pt" height="5pt" viewBox="0 0 10 5"><g id="a"/><use href="#a"/></svg>'
    )
    assert inline_svg(svg, "one", 'say "x"') == (
        '<svg role="img" aria-label="say &quot;x&quot;" style="max-width: 14px" viewBox="0 0 10 5">'
        '<g id="one-a"/><use href="#one-a"/></svg>'
    )


def test_an_estimate_of_nothing_is_nothing():
    assert not Estimate({})
    assert Estimate({0: 1.0}).deviation is None
    assert Estimate({0: 1.0, 1: 3.0}).standard_error == pytest.approx(1.0)


def test_what_is_finished_can_be_written_without_running_the_rest(tmp_path):
    cells = tmp_path / "cells"
    options = ["--days", "1", "--cells", str(cells), "--out", str(tmp_path), "--label", "part"]
    finish_all("table-accuracy", Options(seeds=(0,), days=1.0, alphas=(0.1,)), CellStore(cells))
    command = ["reproduce", "table-accuracy", "--seeds", "0,1", *options, "--finished-only"]
    assert cli.main(command) == 0
    table = (tmp_path / "table-accuracy-part" / "table.md").read_text()
    assert "(1 of 2)" in table
    assert "--label part" in table
    assert len(list(cells.iterdir())) == len(METHODS) - 1
    assert cli.main([*command, "--label", "no/slashes"]) == 2


def test_recorded_runs_need_not_be_there_any_more(tmp_path, capsys):
    cells, out = tmp_path / "cells", tmp_path / "results"
    options = ["--days", "1", "--seeds", "0", "--alphas", "0.1"]
    options += ["--cells", str(cells), "--out", str(out)]
    finish_all("table-accuracy", Options(seeds=(0,), days=1.0, alphas=(0.1,)), CellStore(cells))
    assert cli.main(["reproduce", "table-accuracy", *options, "--finished-only"]) == 0
    folder = out / "table-accuracy"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    shutil.rmtree(cells)
    assert cli.main(["reproduce", "table-accuracy", *options, "--recorded"]) == 0
    printed = capsys.readouterr().out
    count = len(METHODS) - 1  # FedPAC needs an encoder
    assert f"{count} cells are recorded" in printed
    assert f"All {count} cells of table-accuracy are finished" in printed
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # Another experiment takes its runs from there too.
    assert cli.main(["reproduce", "figure-curves", *options, "--recorded"]) == 0
    assert not list(cells.glob("*/summary.json"))
    # What was not kept of single uploads cannot be made up.
    assert recorded_rows(out)
    assert not recorded_rows(out, "pairs")


def with_scale(made, **scale):
    return Row(**{**vars(made), "scale": {**made.scale, **scale}})


def test_captions_are_about_the_cells_that_are_shown():
    shown = [row("FedPSA", 0.1, seed, 0.8) for seed in (0, 1, 2)]
    shown += [row("FedPSA", alpha, 0, 0.8) for alpha in (0.5, 1.0)]
    planned = [Row(**{**vars(row("FedPSA", 0.5, s, None)), "status": "missing"}) for s in (1, 2)]
    planned = [with_scale(made, days=99.0, clients=7, step="eager") for made in planned]
    rows = [with_scale(made, step="compiled", compiled="epochs") for made in shown] + planned
    text = scale_text(rows)
    assert text.startswith("10 virtual days of 86,400 units (as in the paper), 50 clients,")
    assert "compiled step. 5 of" in text
    assert "5 of 7 runs finished" in text
    assert "99" not in text
    older = scale_text([*rows, with_scale(shown[0], step="compiled")])
    assert "compiled step, compiled step of an earlier version" in older
    assert seeds_text(rows) == (
        "Mean ± sample standard deviation over 3 seeds (0, 1, 2) for α = 0.1; seed 0 alone, without"
        " a deviation, for α = 0.5 and α = 1."
    )
    assert short_caption(rows).startswith(
        "Fashion-MNIST, 10 virtual days (as in the paper), 50 clients, client-dirichlet, compiled"
        " step, 3 seeds (0, 1, 2) for α = 0.1; 1 seed (0) for α = 0.5 and α = 1"
    )


def test_captions_of_several_datasets_name_them():
    def on(dataset, seed):
        made = row("FedPSA", 0.1, seed, 0.8)
        return Row(**{**vars(made), "labels": {**made.labels, "dataset": dataset}})

    assert seeds_text([on("mnist", 0), on("cifar10", 0)]) == ("Seed 0 alone, without a deviation.")
    uneven = seeds_text([on("mnist", 0), on("cifar10", 0), on("cifar10", 1)])
    assert "2 seeds (0, 1) for CIFAR-10" in uneven
    assert "seed 0 alone, without a deviation, for MNIST" in uneven


def drawn(name, rows):
    from matplotlib.figure import Figure

    figure = Figure()
    EXPERIMENTS[name].draw(figure, rows)
    return figure


def ablation_rows(seeds):
    rows = []
    for number, variant in enumerate(("full", "without T", CONTROL)):
        for seed in seeds:
            made = row("FedPSA", 0.1, seed, 0.71 + number / 10_000 + seed / 1000)
            labels = {**made.labels, "variant": variant, "concurrency": 0.2}
            rows.append(Row(**{**vars(made), "labels": labels}))
    return rows


def test_axes_of_accuracies_do_not_blow_up_noise():
    figure = drawn("table-ablation", ablation_rows((0,)))
    low, high = figure.axes[0].get_xlim()
    assert high - low >= 2.0
    assert low < 71.0 < high
    assert "1 seed" in figure.get_suptitle()
    assert "deviation" not in figure.get_suptitle()
    several = drawn("table-ablation", ablation_rows((0, 1, 2)))
    assert "± standard deviation" in several.get_suptitle()
    assert several.axes[0].containers[0].has_xerr


def test_shades_of_accuracies_do_not_blow_up_noise():
    rows = []
    for grid, x, y in [("γ, δ", 1.0, 1.0), ("γ, δ", 2.0, 1.0), ("L_s, L_q", 5, 50)]:
        made = row("FedPSA", 0.1, 0, 0.7886 + x / 10_000)
        rows.append(Row(**{**vars(made), "labels": {**made.labels, "grid": grid, "x": x, "y": y}}))
    control = row(CONTROL, 0.1, 0, 0.7887)
    labels = {**control.labels, "grid": "control", "x": 0, "y": 0}
    rows.append(Row(**{**vars(control), "labels": labels}))
    for axes in drawn("figure-hyper", rows).axes:
        low, high = axes.images[0].get_clim()
        assert high - low >= 2.0


def test_the_report_says_each_scale_where_it_belongs(tmp_path):
    store, out = CellStore(tmp_path / "cells"), tmp_path / "results"
    for name, days, datasets, folder in (
        ("table-accuracy", 10.0, ("fmnist",), out),
        ("figure-kappa", 0.006, ("mnist",), out),
        ("table-accuracy", 0.25, ("digits",), out / "digits"),
    ):
        options = Options(seeds=(0,), days=days, alphas=(0.1,), datasets=datasets)
        cells = finish_all(name, options, store)
        write_results(EXPERIMENTS[name], cells, store, folder, command="x", failures={})
    page = write_report(out).read_text()
    head, *sections = page.split("<section ")
    assert "0.006" not in head.split('<div class="cards">')[0]
    assert "not the paper" not in page
    assert "1 of 3 tables and figures" in head
    by_id = {section.split('"')[1]: section for section in sections}
    assert list(by_id) == ["table-accuracy", "digits-table-accuracy", "figure-kappa"]
    for name, caption in {
        "table-accuracy": "Fashion-MNIST, 10 virtual days (as in the paper)",
        "digits-table-accuracy": "Digits, 0.25 virtual days (paper: 10)",
        "figure-kappa": "MNIST, 0.006 virtual days (paper: 10)",
    }.items():
        before_the_table = by_id[name].split("<table>")[0]
        assert caption in before_the_table
        assert "1 seed (0)" in before_the_table
        assert "Abacus 1, 3 cores" in before_the_table
    assert "Final accuracy (digits)" in by_id["digits-table-accuracy"]
    assert "digits/table-accuracy/" in by_id["digits-table-accuracy"]


def test_recorded_results_count_in_the_list(tmp_path, capsys):
    cells, out = tmp_path / "cells", tmp_path / "results"
    options = ["--days", "1", "--seeds", "0", "--alphas", "0.1", "--datasets", "digits"]
    options += ["--cells", str(cells), "--out", str(out)]
    chosen = Options(seeds=(0,), days=1.0, alphas=(0.1,), datasets=("digits",))
    store = CellStore(cells)
    made = finish_all("table-accuracy", chosen, store)
    experiment = EXPERIMENTS["table-accuracy"]
    write_results(experiment, made, store, out / "digits", command="x", failures={})
    shutil.rmtree(cells)
    finish(made[0], store)
    assert cli.main(["list", *options]) == 0
    printed = capsys.readouterr().out
    head, *lines = printed.splitlines()
    assert head.split()[:4] == ["name", "cells", "finished", "recorded"]
    (accuracy,) = (line.split() for line in lines if line.startswith("table-accuracy "))
    assert accuracy[1:5] == [str(len(METHODS)), "1", str(len(METHODS) - 1), "–"]
    assert f"Recorded in {out}" in printed
    (shipped,) = (line for line in lines if line.startswith("digits/table-accuracy "))
    assert f"{len(METHODS)} runs" in shipped
    assert "Digits, 1 virtual day (paper: 10)" in shipped
