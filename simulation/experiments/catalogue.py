"""The experiments by name: those of the paper, and those about Midpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.errors import Refused
from simulation.experiments import bodies, figures, grids, midpoint, paper
from simulation.experiments.cells import CONTROL, Cell
from simulation.experiments.options import Options
from simulation.experiments.paired import Paired, draw_paired, lines_body, paired_body
from simulation.experiments.rows import Row
from simulation.experiments.tables import Pivot, pivot_tables


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    name: str  # on the command line
    title: str
    summary: str  # what it shows, in one line
    cells: Callable[[Options], list[Cell]]  # the runs it needs
    body: Callable[[Sequence[Row]], str]  # its tables, as Markdown
    draw: Callable[[Any, Sequence[Row]], None]  # its figure
    notes: str = ""  # what a reader has to know to compare it with the paper
    series: str = ""  # what it needs of single uploads; see `make_row`
    takes_methods: bool = True  # whether a person may choose the methods


_CONTROL_NOTE = (
    f"{CONTROL} is the control: FedBuff whose uploads all weigh the same (staleness exponent 0)."
    " Same seed, same partition, initial model and response times."
)
_DECAY_NOTE = (
    "The learning rate decays per version, and FedAsync and FedFa make a version of every upload:"
    " theirs decays five times as fast, which `--lr-decay-per upload` evens out."
)
_EFFECTIVE_NOTE = (
    "Effective number: 1/Σw² of the normalised weights, 5 when all five uploads of a version weigh"
    " the same."
)
_METHOD_NOTES = f"{_CONTROL_NOTE} {_DECAY_NOTE} {_EFFECTIVE_NOTE} FedPAC needs an encoder, which"
_METHOD_NOTES += " Fashion-MNIST's single layer does not have."

_ACCURACY = Pivot(("dataset",), "method", "alpha", paper.accuracy)
_AREA = Pivot(
    ("dataset",), "method", "alpha", paper.area, number="area_under_curve", factor=1.0, decimals=3,
    grows=True,
)  # fmt: skip
_HETEROGENEITY = Pivot(
    ("dataset", "alpha"), "method", "times", paper.heterogeneity, paper_dataset="cifar100"
)
_ABLATION = Pivot(
    ("dataset", "alpha"), "variant", "concurrency", paper.ablation, "cifar10", subject="full"
)
_CALIBRATION = Pivot(
    ("dataset", "alpha"), "batch", "size", paper.calibration, "cifar10", subject="gaussian"
)


def _pivot(pivot: Pivot) -> dict[str, Any]:
    return {
        "body": partial(pivot_tables, pivot=pivot),
        "draw": partial(figures.draw_pivot, pivot=pivot),
    }


def _paired(*block: str, subject: str = midpoint.SUBJECT) -> dict[str, Any]:
    layout = Paired(subject, ("dataset", *block, "alpha"))
    return {
        "body": partial(paired_body, layout=layout),
        "draw": partial(draw_paired, layout=layout),
    }


_PAIRED_NOTE = (
    "Differences are taken seed by seed, ± is their standard error. The area is accuracy (as a"
    " fraction) integrated over days. Settings were chosen on seeds 0 to 5."
)


_CIRCUMSTANCES = Paired(midpoint.SUBJECT, ("dataset", "model", "alpha", "circumstances"))


def _accuracy_body(rows: Sequence[Row]) -> str:
    return "\n\n".join(filter(None, [pivot_tables(rows, _ACCURACY), bodies.stages(rows)]))


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table-accuracy",
            "Final accuracy",
            "test accuracy at the end of the virtual time, for all methods",
            grids.compare_methods,
            _accuracy_body,
            partial(figures.draw_pivot, pivot=_ACCURACY),
            notes=_METHOD_NOTES,
        ),
        Experiment(
            "table-aulc",
            "Area under the learning curve",
            "accuracy (as a fraction) integrated over time (in days), for all methods",
            grids.compare_methods,
            notes=f"Ten days at 60 % are 6.0. The area grows with the days, so the paper's numbers"
            f" stand beside runs of ten days alone; it has them for CIFAR. {_METHOD_NOTES}",
            **_pivot(_AREA),
        ),
        Experiment(
            "table-heterogeneity",
            "Other response times",
            "final accuracy for uniform and long-tail response times over wider intervals",
            grids.heterogeneity,
            notes="The paper's own are on CIFAR-100; it does not say for which α, 1.0 fits best."
            " Long-tail: a Pareto law truncated to the interval, so that far more uploads fit into"
            f" a day. {_CONTROL_NOTE} {_EFFECTIVE_NOTE}",
            **_pivot(_HETEROGENEITY),
        ),
        Experiment(
            "table-ablation",
            "FedPSA without its parts",
            "final accuracy without thermometer (T), without sensitivity (S), and without both",
            grids.ablation,
            notes="The paper's own are on CIFAR-10. Without T: no queue and no warm-up, the"
            " temperature is 1. Without S: raw parameters are sketched instead of sensitivities."
            f" {_CONTROL_NOTE} {_EFFECTIVE_NOTE}",
            takes_methods=False,
            **_pivot(_ABLATION),
        ),
        Experiment(
            "table-calibration",
            "The calibration batch",
            "final accuracy with real and Gaussian calibration batches of several sizes",
            grids.calibration,
            notes="The paper's own are on CIFAR-10. Real batches are training samples"
            " that are held out for them: no client has them, and the server does not test on"
            " them. The control has no calibration batch: one run fills"
            f" its row. {_CONTROL_NOTE} {_EFFECTIVE_NOTE}",
            takes_methods=False,
            **_pivot(_CALIBRATION),
        ),
        Experiment(
            "figure-curves",
            "Learning curves",
            "test accuracy against virtual time, for all methods",
            grids.compare_methods,
            bodies.curves,
            figures.draw_curves,
            notes=f"Lines are means over seeds, bands reach from the lowest to the highest. The"
            f" paper's own are on CIFAR-10 and CIFAR-100. {_METHOD_NOTES}",
        ),
        Experiment(
            "figure-hyper",
            "Hyper-parameters",
            "final accuracy of FedPSA over (γ, δ) and (L_s, L_q)",
            grids.hyper,
            bodies.hyper,
            figures.draw_hyper,
            notes="The paper does not say on which dataset, for which α and over which values. The"
            " other two hyper-parameters are at the paper's values: γ 5, δ 0.5, L_s 5, L_q 50."
            f" {_CONTROL_NOTE}",
            takes_methods=False,
        ),
        Experiment(
            "figure-overhead",
            "What it costs",
            "client compute, server compute and bytes moved, per method and dataset",
            grids.overhead,
            bodies.overhead,
            figures.draw_overhead,
            notes="Milliseconds are wall-clock time of one thread, with other runs beside it; the"
            " server's cover all it does with an upload, checks, events and, in FedPSA, the"
            " sketch of new versions. Bytes are those of the records in a message. The paper's own"
            f" are on all four datasets. {_CONTROL_NOTE} {_EFFECTIVE_NOTE}",
        ),
        Experiment(
            "figure-kappa",
            "Does κ tell how well a client agrees?",
            "κ of uploads against the alignment of client's and server's gradients on test data",
            grids.kappa,
            bodies.kappa,
            figures.draw_kappa,
            notes="align = cos(∇L(w_client; test batch), ∇L(w_server; test batch)), on a fixed"
            " batch of 256 test samples. Bins of κ are 0.1 wide; correlations over bins do not"
            " weigh them by their sizes. The paper does not say on which dataset.",
            series="pairs",
            takes_methods=False,
        ),
        Experiment(
            "figure-motivation",
            "Weight against version gap",
            "FedPSA's κ beside 1/√(1+τ), early and late, for a small and a large shift",
            grids.motivation,
            bodies.motivation,
            figures.draw_motivation,
            notes="Response times are long-tail over 50-10000 units here, so that large gaps occur."
            " Early and late are the first and the last third of the time. The paper does not say"
            f" on which dataset. {_CONTROL_NOTE}",
            series="gaps",
            takes_methods=False,
        ),
        Experiment(
            "table-sharpness",
            "Does any sharpness help?",
            "the control minus FedPSA at constant temperatures, with short and long sketches",
            grids.sharpness,
            notes=f"γ = 0 and a queue of one: the temperature is δ from the second version on."
            f" {_CONTROL_NOTE}",
            takes_methods=False,
            **_paired(subject=CONTROL),
        ),
        Experiment(
            "table-midpoint",
            "Midpoint against the others",
            "areas and late accuracies of Midpoint minus those of other methods, seed by seed",
            midpoint.evidence,
            notes="Unless methods are chosen, CA2FL is also run with half its step, ACE and ACED"
            " with a fifth of theirs: the better of two is the fair baseline."
            f" {_PAIRED_NOTE} {_CONTROL_NOTE}",
            **_paired("model"),
        ),
        Experiment(
            "table-midpoint-parts",
            "Midpoint without its parts",
            "Midpoint with other shifts, steps and means, without calibration, with κ",
            midpoint.parts,
            notes=f"θ ½ is Midpoint's own. {_PAIRED_NOTE}",
            takes_methods=False,
            **_paired("model"),
        ),
        Experiment(
            "table-midpoint-robust",
            "Midpoint over circumstances",
            "Midpoint over concurrency, buffer and response times, beside CA2FL with the best step",
            midpoint.robustness,
            partial(lines_body, layout=_CIRCUMSTANCES, line="circumstances"),
            partial(draw_paired, layout=_CIRCUMSTANCES),
            notes=f"Midpoint's settings are the same everywhere. {_PAIRED_NOTE}",
            takes_methods=False,
        ),
    )
}


def find_experiment(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    similar = difflib.get_close_matches(name, EXPERIMENTS, n=1)
    hint = f"Did you mean {similar[0]}?" if similar else f"There are {', '.join(EXPERIMENTS)}."
    raise Refused(f"There is no experiment {name!r}. {hint}")
