"""The experiments about Midpoint: their runs, their tables, and the methods of the ablation."""

import numpy as np
import pytest

from fedpsa_strategy.methods.base import Given
from fedpsa_strategy.methods.registry import find_method
from simulation.experiments import midpoint
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.midpoint_parts import KappaResiduals, RelaxedStart, Uncalibrated
from simulation.experiments.options import Options
from simulation.experiments.paired import Paired, lines_body, paired_body
from simulation.experiments.rows import Row
from support.updates import ZERO, make_update

PLAIN = {"buffer_size": 2, "step_limit": 0.0, "fit_memory": False}


def started(method, **given):
    rule = method.make_rule(Given(4, **given))
    rule.start(ZERO)
    return rule


def test_without_calibration_the_mean_of_the_buffer_counts():
    rule = started(Uncalibrated(**PLAIN))
    rule.add(make_update([4, 0], client=0))
    assert rule.add(make_update([0, 8], client=1)).tolist() == [2.0, 4.0]
    assert rule.start_for(0).tolist() == [0.0, 4.0]
    rule.add(make_update([8, 0], client=0))
    assert rule.add(make_update([2, 2], client=2)).tolist() == [7.0, 5.0]
    assert rule.start_for(0).tolist() == [3.0, 5.0]


def test_without_calibration_starts_follow_what_is_expected():
    rule = started(Uncalibrated(**PLAIN | {"fit_memory": True}))
    for client, delta in enumerate([[4, 0], [0, 8]]):
        rule.add(make_update(delta, client=client))
    for client, delta in enumerate([[2, 2], [0, 4]]):
        rule.add(make_update(delta, client=client))
    assert rule.expected == 0.5
    assert rule.start_for(0).tolist() == [2.5, 6.5]  # (3, 7) - ½ ½ (2, 2)
    rule.add(make_update([4, 0], client=0))
    assert rule.add(make_update([0, 2], client=1)).tolist() == [5.0, 8.0]


def test_fedinits_start_is_relaxed_away_from_the_last_model():
    rule = started(RelaxedStart(**PLAIN, shift=0.5))
    rule.add(make_update([4, 0], client=0, start=(1, 1)))  # ends in (5, 1)
    assert rule.start_for(0).tolist() == [-2.5, -0.5]  # 0 + ½ (0 - (5, 1))
    assert rule.start_for(1) is rule.model


def test_residuals_are_weighted_by_kappa():
    """κ = 1 and 0 at temperature ½: weights e²/(e²+1) and 1/(e²+1)."""
    rule = started(KappaResiduals(**PLAIN), sketch=lambda model: [1.0, 0.0])
    rule.add(make_update([1, 0], client=0, sketch=[1.0, 0.0]))
    found = rule.add(make_update([0, 1], client=1, sketch=[0.0, 1.0]))
    share = np.exp(2) / (np.exp(2) + 1)
    np.testing.assert_allclose(found, [share, 1 - share], rtol=1e-6)
    # The second time client 0's residual is Δ - h: alike sketches, so the mean.
    rule.add(make_update([3, 0], client=0, sketch=[1.0, 0.0]))
    again = rule.add(make_update([0, 1], client=1, sketch=[1.0, 0.0]))
    np.testing.assert_allclose(again, found + np.float32([0.5 + 1, 0.5]), rtol=1e-6)


def test_residuals_of_a_model_in_double_precision_are_weighted_in_it():
    rule = KappaResiduals(**PLAIN).make_rule(Given(4, sketch=lambda model: [1.0, 0.0]))
    rule.start(np.zeros(2))
    rule.add(make_update([1, 0], client=0, sketch=[1.0, 0.0]))
    found = rule.add(make_update([0, 1], client=1, sketch=[0.0, 1.0]))
    share = np.exp(2) / (np.exp(2) + 1)
    np.testing.assert_allclose(found, [share, 1 - share], rtol=1e-14)


@pytest.mark.parametrize("part", midpoint.PARTS)
def test_every_part_is_a_method(part):
    assert find_method(str(midpoint.PARTS[part]["strategy"])).rule


def test_which_runs_there_are():
    seeds = Options(seeds=(6, 7), days=2.0)
    assert len(EXPERIMENTS["table-midpoint"].cells(seeds)) == 17 * 2 * 2 * 2
    assert len(EXPERIMENTS["table-midpoint-parts"].cells(seeds)) == 13 * 2 * 2
    assert len(EXPERIMENTS["table-midpoint-robust"].cells(seeds)) == 4 * 36 * 2 * 2
    one = Options(seeds=(6,), alphas=(0.1,), extra={"model": "mlp"}, methods=("FedBuff", "ACE"))
    cells = EXPERIMENTS["table-midpoint"].cells(one)
    assert [cell.labels["method"] for cell in cells] == ["Midpoint", "FedBuff", "ACE"]
    both = EXPERIMENTS["table-midpoint"].cells(Options(seeds=(6,), alphas=(0.1,)))
    assert {cell.id for cell in cells[:2]} <= {cell.id for cell in both}


def row(method, seed, area, late, **more):
    labels = {"method": method, "dataset": "fmnist", "alpha": 0.1, "seed": seed, "model": "mlp"}
    labels |= more
    numbers = {"area_under_curve": area, "late_accuracy": late, "accuracy": late}
    return Row(labels, f"{method}{seed}", "completed", numbers=numbers)


def test_differences_by_hand():
    """Areas 2 and 3 minus 1 and 1.5: 1 and 1.5, mean 1.25, standard error 0.25."""
    rows = [row("Midpoint", 6, 2.0, 0.8), row("Midpoint", 7, 3.0, 0.9)]
    rows += [row("A", 6, 1.0, 0.9), row("A", 7, 1.5, 0.9), row("B", 7, 1.0, 0.1)]
    text = paired_body(rows, Paired("Midpoint"))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "+1.2500 ± 0.2500 | 2 | −5.00 ± 5.00" in lines["A"]
    assert "| +2.0000 | 1 | +80.00 |" in lines["B"]
    assert "Area: ahead of A. Last tenth: level with A." in text
    alone = paired_body(rows[:1] + rows[2:3], Paired("Midpoint"))
    assert "fewer than two seeds" in alone


def test_circumstances_have_a_line_each_beside_the_best_of_the_others():
    few, many = {"circumstances": "few"}, {"circumstances": "many"}
    rows = [row("Midpoint", 6, 2.0, 0.8, **few), row("Midpoint", 6, 1.0, 0.5, **many)]
    rows += [row("A", 6, 1.0, 0.7, **few), row("A", 6, 1.5, 0.9, **many)]
    rows += [row("B", 6, 1.5, 0.9, **few), row("B", 6, 1.2, 0.9, **many)]
    text = lines_body(
        rows, Paired("Midpoint", ("dataset", "model", "alpha", "circumstances")), "circumstances"
    )
    assert "| few | 2.0000 | 1.0000 | 1.5000 | B | +0.5000 | −10.00 |" in text
    assert "| many | 1.0000 | 1.5000 | 1.2000 | A | −0.5000 | −40.00 |" in text
    assert text.startswith("## Fashion-MNIST, α = 0.1, mlp\n")


def test_runs_of_before_the_fit_are_those_that_expect_a_whole_update():
    """The id of a run of Midpoint in results/ that was made when there was nothing to fit."""
    options = Options(
        datasets=("digits",), alphas=(0.1,), methods=("CA2FL",), seeds=(6,), days=0.25
    )
    place = {"dataset": "digits", "alpha": 0.1, "seed": 6}
    old = options.cell(place, {"strategy": "midpoint", "fit-memory": False})
    new = options.cell(place, {"strategy": "midpoint"})
    assert old.id == "4f6a8dca1fa8"
    assert new.id != old.id
