"""Figures in the sentences of the pages about the reproduction are those of the files."""

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks.reproduction_tables import rows_of
from benchmarks.sketch_noise import effective
from simulation.experiments import paper
from simulation.experiments.derived import correlations, gap_bins
from simulation.experiments.tables import over_seeds

DOCS = Path(__file__).parents[2] / "docs"
SKEWED = 0.1


def rows(name, **labels):
    return [
        row
        for row in rows_of(name)
        if all(row.labels[key] == value for key, value in labels.items())
    ]


def number(name, what, factor=100.0, **labels):
    (row,) = rows(name, **labels)
    return factor * row.number(what)


def minus_control(method, what, factor=1.0):
    own, control = (
        over_seeds(rows("table-accuracy", method=each, alpha=SKEWED), what, factor)
        for each in (method, "Uniform")
    )
    gap = own.minus(control)
    return abs(gap.mean), gap.standard_error


def fedavg_late():
    found = rows("table-accuracy", method="FedAvg", alpha=SKEWED)
    return fmean(100 * row.number("late_accuracy") for row in found)


def above_paper(method):
    """Return the gaps to the paper's numbers, over the three splits."""
    gaps = []
    for alpha in (0.1, 0.5, 1.0):
        found = rows("table-accuracy", method=method, alpha=alpha)
        own = fmean(100 * row.number("accuracy") for row in found)
        gaps.append(own - paper.accuracy(found[0].labels))
    return gaps


def published(method):
    (first,) = rows("table-accuracy", method=method, alpha=SKEWED, seed=0)
    return paper.accuracy(first.labels)


def stage(number, column, name="table-accuracy", **labels):
    """Return a number of a stage of FedPSA's runs, the mean over seeds."""
    found = rows(name, method="FedPSA", **labels)
    return fmean(row.series["stages"][number][column] for row in found)


def accuracy_page():
    area, error = minus_control("FedBuff", "area_under_curve")
    yield f"area is larger than Uniform's by {area:.3f} ± {error:.3f} days"
    lower, error = minus_control("FedBuff", "accuracy", 100.0)
    yield f"its final accuracy is lower by {lower:.2f} ± {error:.2f} points"
    area, error = minus_control("CA2FL", "area_under_curve")
    yield f"far ahead in the area**, by {area:.3f} ± {error:.3f} days"
    lead = number("table-accuracy", "late_accuracy", method="FedPSA", alpha=1.0) - number(
        "table-accuracy", "late_accuracy", method="FedBuff", alpha=1.0
    )
    yield f"by {lead:.2f} points with one seed, which is {70 * lead:.1f} of 7,000 test images"
    late = fedavg_late()
    found = rows("table-accuracy", method="FedAvg", alpha=SKEWED)
    jump = fmean(100 * row.number("accuracy") for row in found) - late
    yield f"over the last tenth of the time its mean is {late:.2f} %, {jump:.1f} below"
    (curve,) = (row.curve for row in rows("figure-curves", method="FedAvg", alpha=0.5, seed=0))
    last = [100 * accuracy for day, accuracy in curve if day >= 8]
    yield f"FedAvg lies between {min(last):.1f} and {max(last):.1f} %"
    gaps = [
        published(better) - published(worse)
        for better in ("FedPSA", "FedBuff")
        for worse in ("FedAsync", "FedFa")
    ]
    yield f"these two are {min(gaps):.1f} to {max(gaps):.1f} points behind"
    versions = [
        int(number("table-accuracy", "versions", 1, method=method, alpha=SKEWED, seed=0))
        for method in ("FedAvg", "FedBuff")
    ]
    yield f"with {versions[0]:,} versions against {versions[1]:,}"
    assert 0.999 ** (versions[0] - versions[1]) == pytest.approx(200, rel=0.03)
    methods = ("FedPSA", "FedBuff", "CA2FL", "FedAsync", "FedFa")
    others = [gap for method in methods for gap in above_paper(method)]
    own = above_paper("FedAvg")
    yield f"ends {min(others):.1f} to {max(others):.1f} points above the paper"
    yield f"FedAvg {min(own):.1f} to {max(own):.1f}"


def kappa_page():
    shown = {"alpha": SKEWED}
    yield f"from {stage(0, 3, **shown):.3f} to {stage(0, 4, **shown):.3f} (three seeds)"
    yield f"in the second third from {stage(2, 3, **shown):.3f} to {stage(2, 4, **shown):.3f}"
    (row,) = rows("figure-kappa")
    found = correlations(row)
    yield (
        f"Over {len(row.series['pairs']):,} uploads of two days, κ and the alignment of client's "
        "and server's gradients on test images have a rank correlation of "
        f"{found['raw', 'spearman']:.2f} (Pearson {found['raw', 'pearson']:.2f}), more than the "
        f"paper's {paper.correlation('raw', 'spearman'):.2f} "
        f"({paper.correlation('raw', 'pearson'):.2f})"
    )
    for dataset in ("mnist", "cifar10"):
        (own,) = rows("table-accuracy-cnn", dataset=dataset, method="FedPSA")
        low = min(line[3] for line in own.series["stages"])
        high = max(line[4] for line in own.series["stages"])
        yield f"between {low:.2f} and {high:.2f}".replace("-0.00", "0.00")
    ends = {
        dataset: [
            f"{number('table-accuracy-cnn', 'accuracy', dataset=dataset, method=method):.1f}"
            for method in ("FedPSA", "Uniform", "FedBuff")
        ]
        for dataset in ("mnist", "cifar10")
    }
    yield (
        "FedPSA is at {} %, the control at {} and FedBuff at {} % on MNIST".format(*ends["mnist"])
    )
    yield "{}, {} and {} % on CIFAR-10".format(*ends["cifar10"])
    late = [
        number("table-midpoint-cnn", "late_accuracy", method=method)
        for method in ("FedPSA", "Uniform")
    ]
    uploads = number("table-midpoint-cnn", "uploads", 1, method="FedPSA")
    yield (
        f"The CNN's run has {uploads:.0f} uploads and one seed: over its last tenth FedPSA is at "
        f"{late[0]:.2f} %, the control at {late[1]:.2f} %"
    )
    (lost,) = (
        1 - row.series["stages"][3][6] / 5 for row in rows("table-midpoint-cnn", method="FedPSA")
    )
    assert lost == pytest.approx(1 / 60, rel=0.1)
    early = {
        first: mean
        for first, _, _, mean, _ in gap_bins(rows("figure-motivation", **shown), "early")
    }
    few = [early[first] for first in (1, 2, 3, 5, 9, 17)]
    yield (
        f"κ is {early[0]:.3f} without a gap and {min(few):.3f} to {max(few):.3f} at gaps up to 32 "
        f"versions (α = 0.1). The {early[33]:.3f} above that"
    )
    ends = {
        (method, alpha): number("figure-motivation", "accuracy", method=method, alpha=alpha)
        for method in ("FedPSA", "Uniform", "FedAsync")
        for alpha in (SKEWED, 1.0)
    }
    psa, uniform = ends["FedPSA", SKEWED], ends["Uniform", SKEWED]
    yield f"FedPSA ends at {psa:.2f} % and Uniform at {uniform:.2f} %"
    asynchronous, skewed = ends["FedAsync", 1.0], ends["FedAsync", SKEWED]
    yield f"{skewed:.2f} % (α = 0.1) and {asynchronous:.2f} against {ends['FedPSA', 1.0]:.2f} %"


def noise_page():
    perceptron = measured("sketch_noise", "perceptron on Fashion-MNIST")
    yield f"an effective number of {min(perceptron):.2f} of 10 or more"
    first, later = measured("sketch_noise-cnn", "MNIST's CNN, a quarter wide")
    yield f"With the CNN they would give {first:.2f} after one version and {later:.2f} after twenty"


def measured(page, model):
    """Return effective numbers of ten clients by exact cosines at a temperature of 0.5."""
    path = DOCS.parent / "benchmarks" / "results" / f"{page}.json"
    stages = json.loads(path.read_text(encoding="utf-8"))["models"][model]
    return [effective(np.array(stage["exact"]), 0.5) for stage in stages]


def ablation_page():
    found = rows("table-ablation")
    gaps = []
    for row in found:
        place = {key: row.labels[key] for key in ("alpha", "concurrency")}
        control = number("table-ablation", "accuracy", variant="Uniform", **place)
        gaps.append(abs(100 * row.number("accuracy") - control))
    yield f"All are within {max(gaps):.2f} points of the control"
    late = [
        number("table-ablation", "late_accuracy", variant="full", alpha=SKEWED, concurrency=share)
        for share in (0.3, 0.2)
    ]
    yield "it is ahead, {:.1f} against {:.1f} %".format(*late)
    by_buffer = [
        number("figure-hyper", "accuracy", grid="L_s, L_q", x=size, y=50)
        for size in (5, 10, 20, 50)
    ]
    text = "{:.1f} % with 5 uploads a version, {:.1f} with 10, {:.1f} with 20, {:.1f} with 50"
    yield text.format(*by_buffer)
    lowest = number("figure-hyper", "accuracy", grid="γ, δ", x=0.1, y=0.1)
    yield f"down to {lowest:.2f} % at 0.1 and 0.1"


@pytest.mark.parametrize(
    ("page", "claims"),
    [
        ("ACCURACY.md", accuracy_page),
        ("KAPPA.md", kappa_page),
        ("KAPPA.md", noise_page),
        ("ABLATION.md", ablation_page),
    ],
)
def test_figures_in_sentences(page, claims):
    text = " ".join((DOCS / "reproduction" / page).read_text(encoding="utf-8").split())
    missing = [claim for claim in claims() if " ".join(claim.split()) not in text]
    assert not missing
